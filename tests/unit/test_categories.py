"""Categories of real exceptions: those of HTTP clients come from a misbehaving server on 127.0.0.1."""

from __future__ import annotations

import ast
import asyncio
import concurrent.futures
import csv
import errno
import functools
import gzip
import http.client
import io
import json
import lzma
import multiprocessing
import smtplib
import socket
import sqlite3
import ssl
import struct
import subprocess
import sys
import tarfile
import threading
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import httpx
import pydantic
import pytest
import redis
import requests
from hypothesis import given
from hypothesis import strategies as st
from redis._parsers.base import BaseParser

from bulltask.categories import Categorizer, ErrorCategory, categorize_error, explicit_category, retry_after_ms
from bulltask.errors import ConfigError, PermanentError, TransientError
from bulltask.jobs import errors

T, P, U = ErrorCategory.TRANSIENT, ErrorCategory.PERMANENT, ErrorCategory.UNKNOWN
NOW = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)
Get = Callable[[str], BaseException]

# Self-signed for "localhost" until 2126, created with `openssl req -x509`; only this file uses the key.
CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg47/ESjuabwrE9bTK
BVbTBWzjMpcf2mlJMfZmdD91rjehRANCAARlWVPklBtFe4jDfWXKXf3PBK89nFIt
g5coB5z3hIJueUcqfjURvSOJQOnrgnztVz4quWoyNxtlKet6Qg2Ib9mT
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBnDCCAUGgAwIBAgIUPitvfWFvyyshfmlL9pvfEcDB/LswCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMTAyMTk1OVoYDzIxMjYxMDI4
MDIxOTU5WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAARlWVPklBtFe4jDfWXKXf3PBK89nFItg5coB5z3hIJueUcqfjURvSOJ
QOnrgnztVz4quWoyNxtlKet6Qg2Ib9mTo28wbTAdBgNVHQ4EFgQUrHseAg94m8QC
cFWoV6chr19Lpr0wHwYDVR0jBBgwFoAUrHseAg94m8QCcFWoV6chr19Lpr0wDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSQAwRgIhANq2UGRxun8LLdfTwURnXzmzv2OdmeOmIf/b4sMoyf2AAiEA
rDZpN3em/Ke9I8zynfVRnExluNSg95LSqEWcPjMxNT8=
-----END CERTIFICATE-----
"""


# --- the server -------------------------------------------------------------------------------------------------------


class FaultyHandler(BaseHTTPRequestHandler):
    """Replies to ``/status/503?retry_after=7`` as requested; each other path violates the protocol differently."""

    ended = threading.Event()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        word, _, argument = url.path[1:].partition("/")
        getattr(self, f"send_{word}")(argument, parse_qs(url.query))

    def send_status(self, status: str, query: dict[str, list[str]]) -> None:
        self.send_response(int(status))
        for value in query.get("retry_after", []):
            self.send_header("Retry-After", value)
        self.end_headers()

    def send_loop(self, *_: object) -> None:
        self.send_response(302)
        self.send_header("Location", "/loop")
        self.end_headers()

    def send_body(self, kind: str, query: dict[str, list[str]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        for value in query.get("encoding", []):
            self.send_header("Content-Encoding", value)
        self.end_headers()
        self.wfile.write(b"{oops")

    def send_short(self, *_: object) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "100")
        self.end_headers()
        self.wfile.write(b"few")

    def send_nothing(self, *_: object) -> None:
        self.close_connection = True

    def send_garbage(self, *_: object) -> None:
        self.wfile.write(b"this is not HTTP\r\n\r\n")

    def send_late(self, *_: object) -> None:
        self.ended.wait(30)  # until the client has timed out and the fixture ends

    def log_message(self, *_: object) -> None:
        pass


class QuietServer(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        pass  # disconnecting clients are expected


def serve(server: ThreadingHTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    FaultyHandler.ended.set()
    server.shutdown()
    thread.join()
    server.server_close()
    FaultyHandler.ended.clear()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    yield from serve(QuietServer(("127.0.0.1", 0), FaultyHandler))


@pytest.fixture(scope="module")
def untrusted_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pem = tmp_path_factory.mktemp("tls") / "localhost.pem"
    pem.write_text(CERTIFICATE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    server = QuietServer(("127.0.0.1", 0), FaultyHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    yield from serve(server)


@pytest.fixture(scope="module")
def closed_address() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


# --- the clients ------------------------------------------------------------------------------------------------------


def catch(call: Callable[[], object]) -> BaseException:
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - the test checks any exception
        return error
    raise AssertionError(f"nothing was raised, but {result!r} returned")


def read_timeout(url: str) -> float:
    return 0.2 if url.endswith("/late") else 10


@functools.cache
def default_tls_context() -> ssl.SSLContext:
    """The TLS context of httpx, which would otherwise create one for each request, in 40 ms."""
    return httpx.create_ssl_context(trust_env=False)


def by_httpx(url: str) -> BaseException:
    def get() -> object:
        response = httpx.get(
            url, follow_redirects=True, trust_env=False, timeout=read_timeout(url), verify=default_tls_context()
        )
        return response.raise_for_status().json()

    return catch(get)


def by_requests(url: str) -> BaseException:
    def get() -> object:
        with requests.Session() as session:
            session.trust_env = False
            response = session.get(url, timeout=read_timeout(url))
            response.raise_for_status()
            return response.json()

    return catch(get)


def by_urllib(url: str) -> BaseException:
    def get() -> object:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=read_timeout(url)) as response:
            return json.loads(response.read())

    error = catch(get)
    if isinstance(error, urllib.error.HTTPError):
        error.close()
    return error


def by_aiohttp(url: str) -> BaseException:
    async def get() -> object:
        limit = aiohttp.ClientTimeout(total=read_timeout(url))
        async with aiohttp.ClientSession(raise_for_status=True, timeout=limit) as session, session.get(url) as response:
            return await response.json()

    return catch(lambda: asyncio.run(get()))


any_client = pytest.mark.parametrize("get", [by_httpx, by_requests, by_urllib, by_aiohttp])

# --- HTTP -------------------------------------------------------------------------------------------------------------


@any_client
@pytest.mark.parametrize("status", [500, 501, 502, 503, 504, 507, 599, 429, 408, 425])
def test_http_server_errors_timeouts_and_rate_limits_are_transient(get: Get, status: int, address: str) -> None:
    assert categorize_error(get(f"http://{address}/status/{status}")) is T


@any_client
@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 405, 409, 410, 413, 422, 451])
def test_other_http_client_errors_are_permanent(get: Get, status: int, address: str) -> None:
    assert categorize_error(get(f"http://{address}/status/{status}")) is P


@any_client
def test_a_refused_connection_is_transient(get: Get, closed_address: str) -> None:
    assert categorize_error(get(f"http://{closed_address}/")) is T


@any_client
@pytest.mark.parametrize("path", ["nothing", "garbage", "late"])
def test_a_missing_invalid_or_late_response_is_transient(get: Get, path: str, address: str) -> None:
    assert categorize_error(get(f"http://{address}/{path}")) is T


@any_client
def test_a_truncated_body_is_transient(get: Get, address: str) -> None:
    assert categorize_error(get(f"http://{address}/short")) is T


@any_client
def test_a_redirect_loop_is_permanent(get: Get, address: str) -> None:
    assert categorize_error(get(f"http://{address}/loop")) is P


@any_client
def test_a_body_that_is_not_json_is_permanent(get: Get, address: str) -> None:
    assert categorize_error(get(f"http://{address}/body/application/json")) is P


@pytest.mark.parametrize("get", [by_httpx, by_requests])
def test_a_body_that_cannot_be_decompressed_is_permanent(get: Get, address: str) -> None:
    assert categorize_error(get(f"http://{address}/body/application/json?encoding=gzip")) is P


def test_a_body_with_an_unexpected_content_type_is_permanent(address: str) -> None:
    assert categorize_error(by_aiohttp(f"http://{address}/body/text/html")) is P


@any_client
@pytest.mark.parametrize("url", ["no-scheme", "http://", "nope://127.0.0.1/", "http://127.0.0.1:port/"])
def test_an_invalid_url_is_permanent(get: Get, url: str) -> None:
    assert categorize_error(get(url)) is P


@any_client
def test_an_untrusted_certificate_is_permanent(get: Get, untrusted_address: str) -> None:
    assert categorize_error(get(f"https://{untrusted_address}/status/200")) is P


@any_client
def test_other_tls_handshake_failures_are_transient(get: Get, address: str) -> None:
    assert categorize_error(get(f"https://{address}/status/200")) is T


def test_redis_behind_an_untrusted_certificate_is_permanent(untrusted_address: str) -> None:
    with redis.Redis.from_url(f"rediss://{untrusted_address}", socket_timeout=5) as client:
        error = catch(client.ping)
    assert isinstance(error, redis.ConnectionError)
    assert categorize_error(error) is P


def test_an_http_error_without_a_response_is_unknown() -> None:
    assert categorize_error(requests.HTTPError("something")) is U


def test_errors_of_unknown_clients_are_categorized_by_their_response(address: str) -> None:
    class ApiError(Exception):
        def __init__(self, response: httpx.Response) -> None:
            super().__init__("the API failed")
            self.response = response

    assert categorize_error(ApiError(httpx.Response(529))) is T
    assert categorize_error(ApiError(httpx.Response(404))) is P


def test_code_and_status_attributes_are_not_treated_as_http_statuses() -> None:
    class OddError(Exception):
        code, status = 503, 503

    assert categorize_error(OddError()) is U


# --- network, operating system, time ----------------------------------------------------------------------------------

NETWORK = "ECONNREFUSED ECONNRESET ECONNABORTED EPIPE EHOSTUNREACH ENETUNREACH ENETDOWN ETIMEDOUT EADDRINUSE"
RESOURCES = "ENOSPC EDQUOT EMFILE ENFILE ENOMEM ENOBUFS EAGAIN EINTR EIO EBUSY EDEADLK ENOLCK ESTALE"
PROGRAMMING_ERRORS = "ENOENT EACCES EPERM EISDIR ENOTDIR EINVAL EBADF ENAMETOOLONG ELOOP EROFS"


@pytest.mark.parametrize("name", f"{NETWORK} {RESOURCES}".split())
def test_network_and_resource_errnos_are_transient(name: str) -> None:
    assert categorize_error(OSError(getattr(errno, name), "x")) is T


@pytest.mark.parametrize("name", PROGRAMMING_ERRORS.split())
def test_errnos_of_programming_errors_are_permanent(name: str) -> None:
    assert categorize_error(OSError(getattr(errno, name), "x")) is P


def test_the_errno_of_an_oserror_subclass_sets_the_category() -> None:
    class DriverError(OSError):
        pass

    assert categorize_error(DriverError(errno.EHOSTUNREACH, "x")) is T
    assert categorize_error(DriverError("no errno")) is U


def test_a_full_disk_is_transient() -> None:
    def fill() -> None:
        with Path("/dev/full").open("w") as full:
            full.write("x")

    assert categorize_error(catch(fill)) is T


def test_a_name_that_cannot_be_resolved_is_transient() -> None:
    def resolve() -> object:
        return socket.getaddrinfo("not-an-address", 80, flags=socket.AI_NUMERICHOST)

    error = catch(resolve)
    assert isinstance(error, socket.gaierror)
    assert categorize_error(error) is T
    assert categorize_error(urllib.error.URLError(error)) is T


def wait_until_timeout() -> None:
    async def wait() -> None:
        await asyncio.wait_for(asyncio.Event().wait(), 0.001)

    asyncio.run(wait())


def cancel_current_task() -> None:
    async def cancelled() -> None:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        await asyncio.Event().wait()

    asyncio.run(cancelled())


def read_from_a_short_stream() -> None:
    async def read() -> None:
        stream = asyncio.StreamReader()
        stream.feed_eof()
        await stream.readexactly(5)

    asyncio.run(read())


def read_cancelled_future() -> None:
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    future.cancel()
    future.result()


def read_from_idle_socket() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        left.recv(1)


def read_until_timeout() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.settimeout(0.001)
        left.recv(1)


def write_to_a_closed_socket() -> None:
    left, right = socket.socketpair()
    with left:
        right.close()
        left.send(b"x")


@pytest.mark.parametrize(
    "call",
    [
        wait_until_timeout,
        cancel_current_task,
        read_from_a_short_stream,
        read_cancelled_future,
        lambda: concurrent.futures.Future[None]().result(0.001),
        lambda: subprocess.run(["tail", "-f", "/dev/null"], timeout=0.001, check=True),
        read_from_idle_socket,
        read_until_timeout,
        write_to_a_closed_socket,
        lambda: bytearray(sys.maxsize),
    ],
)
def test_timeouts_cancellation_closed_sockets_and_memory_errors_are_transient(call: Callable[[], object]) -> None:
    assert categorize_error(catch(call)) is T


def test_a_multiprocessing_timeout_is_transient() -> None:
    assert categorize_error(multiprocessing.TimeoutError()) is T


# --- Redis ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "category"),
    [
        ("LOADING Redis is loading the dataset in memory", T),
        ("BUSY Redis is busy running a script", T),
        ("OOM command not allowed when used memory > 'maxmemory'", T),
        ("READONLY You can't write against a read only replica.", T),
        ("MISCONF Redis is configured to save RDB snapshots, but it cannot", T),
        ("CLUSTERDOWN The cluster is down", T),
        ("MASTERDOWN Link with MASTER is down", T),
        ("TRYAGAIN Multiple keys request during rehashing of slot", T),
        ("NOREPLICAS Not enough good replicas to write.", T),
        ("MOVED 3999 127.0.0.1:6381", T),
        ("ASK 3999 127.0.0.1:6381", T),
        ("ERR max number of clients reached", T),
        ("NOAUTH Authentication required.", P),
        ("WRONGPASS invalid username-password pair or user is disabled.", P),
        ("NOPERM this user has no permissions to run the 'set' command", P),
        ("ERR invalid password", P),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", P),
        ("CROSSSLOT Keys in request don't hash to the same slot", P),
        ("ERR unknown command 'NOPE'", U),
        ("BUSYKEY Target key name already exists.", U),
        ("", U),
    ],
)
def test_redis_error_replies_are_categorized_by_their_code(reply: str, category: ErrorCategory) -> None:
    error = BaseParser.parse_error(reply)
    assert isinstance(error, redis.RedisError)
    assert categorize_error(error) is category


@pytest.mark.parametrize(
    ("error", "category"),
    [
        (redis.ConnectionError("Connection closed by server."), T),
        (redis.TimeoutError("Timeout reading from socket"), T),
        (redis.BusyLoadingError("x"), T),
        (redis.ReadOnlyError("x"), T),
        (redis.OutOfMemoryError("x"), T),
        (redis.exceptions.ClusterDownError("x"), T),
        (redis.exceptions.MasterDownError("x"), T),
        (redis.exceptions.TryAgainError("x"), T),
        (redis.exceptions.SlotNotCoveredError("x"), T),
        (redis.exceptions.MaxConnectionsError("x"), T),
        (redis.sentinel.MasterNotFoundError("x"), T),
        (redis.WatchError("Watched variable changed."), T),
        (redis.exceptions.LockError("Unable to acquire lock"), T),
        (redis.AuthenticationError("x"), P),
        (redis.exceptions.AuthorizationError("x"), P),
        (redis.exceptions.NoPermissionError("x"), P),
        (redis.DataError("x"), P),
        (redis.RedisError("x"), U),
    ],
)
def test_redis_py_errors_are_categorized_by_their_type(error: BaseException, category: ErrorCategory) -> None:
    assert categorize_error(error) is category


def test_an_unreachable_redis_is_transient(closed_address: str) -> None:
    with redis.Redis.from_url(f"redis://{closed_address}") as client:
        assert categorize_error(catch(client.ping)) is T


@pytest.mark.parametrize(
    ("error", "category"),
    [
        (errors.BrokerError(), T),
        (errors.BrokerUnavailableError(), T),
        (errors.BrokerNotReadyError(), T),
        (errors.BrokerOutOfMemoryError(), T),
        (errors.BrokerAuthError(), P),
        (errors.ScriptIntegrityError(), P),
        (errors.ResultTimeoutError(), T),
        (errors.JobNotFoundError("1", "q"), P),
        (errors.TaskNotRegisteredError(), P),
        (errors.DuplicateTaskError(), P),
        (errors.AppNotFoundError(), P),
        (errors.ConfigError(), P),
        (errors.InvalidNameError(), P),
        (errors.EncodeError(), P),
        (errors.DecodeError(), P),
        (errors.PayloadTooLargeError(), P),
        (errors.JobExpiredError(), P),
        (errors.InvalidJobError(), P),
        (errors.TaskError("failed"), U),
    ],
)
def test_bulltask_errors_are_categorized_by_their_type(error: BaseException, category: ErrorCategory) -> None:
    assert categorize_error(error) is category


# --- databases --------------------------------------------------------------------------------------------------------


def exception_class(name: str, *bases: type[BaseException], **attributes: object) -> type[Any]:
    """Return an exception class with the name of a class in a library that may not be installed."""
    module, _, last = name.rpartition(".")
    return type(last, bases or (Exception,), {"__module__": module, **attributes})


PsycopgError = exception_class("psycopg.DatabaseError")
PsycopgOperational = exception_class("psycopg.OperationalError", PsycopgError)
PsycopgInternal = exception_class("psycopg.InternalError", PsycopgError)
MySQLOperational = exception_class("pymysql.err.OperationalError")
AlchemyOperational = exception_class("sqlalchemy.exc.OperationalError")
DjangoOperational = exception_class("django.db.utils.OperationalError")
AsyncpgError = exception_class("asyncpg.exceptions._base.PostgresError")


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None, timeout=0)
    connection.execute("CREATE TABLE jobs (id INTEGER PRIMARY KEY, name TEXT NOT NULL)")
    yield connection
    connection.close()


def test_a_locked_sqlite_database_is_transient(database: sqlite3.Connection, tmp_path: Path) -> None:
    database.execute("BEGIN EXCLUSIVE")
    other = sqlite3.connect(tmp_path / "jobs.db", timeout=0)
    error = catch(lambda: other.execute("INSERT INTO jobs VALUES (1, 'x')"))
    other.close()
    assert str(error) == "database is locked"
    assert categorize_error(error) is T


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM nothing",
        "SELECT nothing FROM jobs",
        "SELEC 1",
        "INSERT INTO jobs VALUES (1, NULL)",
        "INSERT INTO jobs VALUES ('text', 'x')",
        "SELECT ?",
    ],
)
def test_statement_and_constraint_errors_of_sqlite_are_permanent(database: sqlite3.Connection, statement: str) -> None:
    assert categorize_error(catch(lambda: database.execute(statement))) is P


def test_a_read_only_sqlite_database_is_permanent(database: sqlite3.Connection, tmp_path: Path) -> None:
    reader = sqlite3.connect(f"file:{tmp_path}/jobs.db?mode=ro", uri=True)
    error = catch(lambda: reader.execute("INSERT INTO jobs VALUES (1, 'x')"))
    reader.close()
    assert categorize_error(error) is P


def test_a_file_that_is_not_an_sqlite_database_is_permanent(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("not a database, but long enough for SQLite to read. " * 20)
    connection = sqlite3.connect(tmp_path / "x.db")
    error = catch(lambda: connection.execute("SELECT * FROM jobs"))
    connection.close()
    assert categorize_error(error) is P


@pytest.mark.parametrize(
    ("text", "category"),
    [
        ("database is locked", T),
        ("database or disk is full", T),
        ("disk I/O error", T),
        ("no such table: jobs", P),
        ("no such column: x", P),
        ('near "SELEC": syntax error', P),
        ("attempt to write a readonly database", P),
    ],
)
def test_sqlite_errors_without_a_code_are_categorized_by_their_message(text: str, category: ErrorCategory) -> None:
    assert categorize_error(sqlite3.OperationalError(text)) is category


@pytest.mark.parametrize(
    ("state", "category"),
    [
        ("08006", T),  # connection failure
        ("40001", T),  # serialization failure
        ("40P01", T),  # deadlock
        ("53100", T),  # disk full
        ("53300", T),  # too many connections
        ("55P03", T),  # lock not available
        ("57014", T),  # statement timeout
        ("57P01", T),  # admin shutdown
        ("57P03", T),  # cannot connect now
        ("25006", T),  # read-only after a failover
        ("28P01", P),  # wrong password
        ("3D000", P),  # no such database
        ("40002", P),  # a constraint was violated at commit
        ("42P01", P),  # undefined table
        ("22003", P),  # out of range
        ("23505", P),  # unique violation
    ],
)
def test_the_sqlstate_takes_precedence_over_the_exception_type(state: str, category: ErrorCategory) -> None:
    categories = {
        (base, attribute): categorize_error(exception_class("psycopg.errors.Some", base, **{attribute: state})("x"))
        for base in (PsycopgOperational, PsycopgInternal, PsycopgError, AsyncpgError)
        for attribute in ("sqlstate", "pgcode")
    }
    assert categories == dict.fromkeys(categories, category)


@pytest.mark.parametrize("state", ["XX000", "", "0", None, 40001])
def test_an_unknown_sqlstate_is_ignored(state: object) -> None:
    assert categorize_error(exception_class("psycopg.errors.Some", PsycopgOperational, sqlstate=state)("x")) is T
    assert categorize_error(exception_class("psycopg.errors.Some", PsycopgInternal, sqlstate=state)("x")) is U


@pytest.mark.parametrize(
    ("number", "category"),
    [
        (1040, T),  # too many connections
        (1203, T),  # too many connections of this user
        (1205, T),  # lock wait timeout
        (1213, T),  # deadlock
        (2003, T),  # cannot connect
        (2006, T),  # gone away
        (2013, T),  # lost during query
        (9999, T),  # unknown number: the type decides
        (1045, P),  # access denied
        (1049, P),  # unknown database
        (1054, P),  # unknown column
        (3819, P),  # check constraint
    ],
)
def test_a_mysql_error_number_takes_precedence_over_the_exception_type(number: int, category: ErrorCategory) -> None:
    assert categorize_error(MySQLOperational(number, "x")) is category


def test_a_deadlock_reported_as_a_mysql_internal_error_is_transient() -> None:
    assert categorize_error(exception_class("MySQLdb.InternalError")(1213, "Deadlock found")) is T


@pytest.mark.parametrize(
    ("text", "category"),
    [
        ("connection failed: Connection refused", T),
        ('connection failed: FATAL: password authentication failed for user "u"', P),
        ('connection failed: FATAL: database "x" does not exist', P),
        ("FATAL: the database system is starting up", T),
        ("FATAL: sorry, too many clients already", T),
    ],
)
def test_a_failed_connection_to_postgres_is_categorized_by_its_message(text: str, category: ErrorCategory) -> None:
    assert categorize_error(PsycopgOperational(text)) is category


def sqlalchemy_error(original: BaseException) -> BaseException:
    quoted = "[SQL: INSERT INTO notes VALUES ('syntax error, access denied, no such table')]"
    error: BaseException = AlchemyOperational(f"{original} {quoted}")
    error.orig = original  # type: ignore[attr-defined]
    error.__cause__ = original
    return error


def test_sqlalchemy_errors_are_categorized_by_the_drivers_error() -> None:
    assert categorize_error(sqlalchemy_error(PsycopgOperational("server closed the connection"))) is T
    assert categorize_error(sqlalchemy_error(sqlite3.OperationalError("database is locked"))) is T
    assert categorize_error(sqlalchemy_error(sqlite3.OperationalError("no such table: t"))) is P
    assert categorize_error(sqlalchemy_error(MySQLOperational(1045, "Access denied"))) is P


def test_django_errors_are_categorized_by_the_drivers_error(database: sqlite3.Connection) -> None:
    outer = DjangoOperational("no such table: nothing")
    outer.__cause__ = catch(lambda: database.execute("SELECT * FROM nothing"))
    assert categorize_error(outer) is P


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("psycopg.InterfaceError", T),
        ("psycopg2.OperationalError", T),
        ("asyncpg.exceptions._base.InterfaceError", T),
        ("anything.at.all.OperationalError", T),
        ("sqlalchemy.exc.TimeoutError", T),  # the pool is exhausted
        ("sqlalchemy.exc.IntegrityError", P),
        ("pymysql.err.ProgrammingError", P),
        ("oracledb.DataError", P),
        ("psycopg.NotSupportedError", P),
        ("sqlite3.InterfaceError", P),
        ("psycopg.DatabaseError", U),
    ],
)
def test_db_api_exception_names_match_in_any_package(name: str, category: ErrorCategory) -> None:
    assert categorize_error(exception_class(name)("x")) is category


# --- validation, parsing, configuration, bugs -------------------------------------------------------------------------


missing: Any = {}
index = 1


def overflow() -> None:
    overflow()


def open_zip(opener: Callable[[io.BytesIO], object]) -> Callable[[], object]:
    return lambda: opener(io.BytesIO(b"not an archive, but long enough to be read as one" * 20))


@pytest.mark.parametrize(
    "call",
    [
        lambda: int("x"),
        lambda: "a" + 1,  # type: ignore[operator]
        lambda: missing["key"],
        lambda: [][index],
        lambda: missing.attribute,
        lambda: 1 / 0,
        b"\xff".decode,
        lambda: json.loads("{"),
        lambda: __import__("no_such_module"),
        Path("/no/such/file").open,
        Path("/").open,
        lambda: eval("no_such_name"),
        lambda: compile("1 +", "x", "exec"),
        overflow,
        lambda: pydantic.TypeAdapter(int).validate_python("x"),
        lambda: struct.unpack("i", b"1"),
        lambda: zlib.decompress(b"x"),
        lambda: lzma.decompress(b"no lzma"),
        lambda: gzip.decompress(b"no gzip"),
        open_zip(zipfile.ZipFile),
        open_zip(lambda file: tarfile.TarFile(fileobj=file)),
    ],
)
def test_invalid_data_and_programming_errors_are_permanent(call: Callable[[], object]) -> None:
    assert categorize_error(catch(call)) is P


@pytest.mark.parametrize(
    "error",
    [
        ValueError(),
        TypeError(),
        KeyError("x"),
        AttributeError(),
        AssertionError(),
        UnicodeError(),
        LookupError(),
        ArithmeticError(),
        NotImplementedError(),
        ImportError(),
        PermissionError(),
        FileNotFoundError(),
        RecursionError(),
        csv.Error(),
        http.client.InvalidURL(),
        exception_class("marshmallow.exceptions.ValidationError")(),
        exception_class("django.core.exceptions.ImproperlyConfigured")(),
        exception_class("_pickle.UnpicklingError")(),
        exception_class("yaml.scanner.ScannerError", exception_class("yaml.error.YAMLError"))(),
    ],
)
def test_exception_types_for_invalid_data_and_bugs_are_permanent(error: BaseException) -> None:
    assert categorize_error(error) is P


class BusinessError(Exception):
    pass


@pytest.mark.parametrize(
    "error",
    [
        Exception(),
        RuntimeError("x"),
        BusinessError("insufficient funds"),
        OSError(),
        StopIteration(),
        KeyboardInterrupt(),
    ],
)
def test_all_other_exceptions_are_unknown(error: BaseException) -> None:
    assert categorize_error(error) is U


# --- mail -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "category"),
    [
        (smtplib.SMTPServerDisconnected("Connection unexpectedly closed"), T),
        (smtplib.SMTPConnectError(554, "busy"), T),
        (smtplib.SMTPDataError(451, "try later"), T),
        (smtplib.SMTPSenderRefused(452, b"full", "a@b"), T),
        (smtplib.SMTPDataError(554, "spam"), P),
        (smtplib.SMTPAuthenticationError(535, "wrong"), P),
        (smtplib.SMTPRecipientsRefused({"a@b": (550, b"no such user")}), P),
        (smtplib.SMTPRecipientsRefused({"a@b": (550, b"no such user"), "c@d": (450, b"greylisted")}), T),
    ],
)
def test_smtp_4xx_is_transient_and_5xx_permanent(error: BaseException, category: ErrorCategory) -> None:
    assert categorize_error(error) is category


# --- explicit categories, and causes ----------------------------------------------------------------------------------


def from_cause(outer: BaseException, cause: BaseException) -> BaseException:
    def raise_outer() -> None:
        raise outer from cause

    return catch(raise_outer)


def test_transient_error_and_permanent_error_set_the_category() -> None:
    assert categorize_error(TransientError("not deployed yet")) is T
    assert categorize_error(PermanentError("insufficient funds")) is P


def test_an_explicit_category_applies_anywhere_in_the_chain_of_causes() -> None:
    assert categorize_error(from_cause(TransientError(), ValueError())) is T
    assert categorize_error(from_cause(ValueError(), TransientError())) is T
    assert categorize_error(from_cause(PermanentError(), ConnectionError())) is P
    assert categorize_error(from_cause(RuntimeError(), from_cause(ConnectionError(), PermanentError()))) is P


def test_the_outermost_explicit_category_takes_precedence() -> None:
    assert categorize_error(from_cause(TransientError(), PermanentError())) is T
    assert categorize_error(from_cause(PermanentError(), TransientError())) is P


def test_an_unknown_error_has_the_category_of_its_cause() -> None:
    assert categorize_error(from_cause(BusinessError("sync failed"), ConnectionResetError())) is T
    assert categorize_error(from_cause(BusinessError("sync failed"), KeyError("x"))) is P


def test_a_known_error_hides_its_cause() -> None:
    assert categorize_error(from_cause(ValueError("no such host"), socket.gaierror())) is P
    assert categorize_error(from_cause(ConnectionError(), KeyError())) is T


def test_an_exception_passed_as_an_argument_counts_as_the_cause() -> None:
    assert categorize_error(BusinessError(ConnectionResetError())) is T
    assert categorize_error(BusinessError(TransientError())) is T


def test_the_implicit_exception_context_is_ignored() -> None:
    def fail(first: BaseException, second: BaseException) -> BaseException:
        def handle() -> None:
            try:
                raise first  # noqa: TRY301
            except BaseException:  # noqa: BLE001
                raise second  # noqa: B904

        return catch(handle)

    error = fail(ConnectionResetError(), BusinessError())
    assert isinstance(error.__context__, ConnectionResetError)
    assert categorize_error(error) is U
    assert categorize_error(fail(TransientError(), KeyError())) is P
    assert categorize_error(fail(PermanentError(), TimeoutError())) is T


def test_a_cycle_of_causes_does_not_loop_forever() -> None:
    first, second = BusinessError("1"), BusinessError("2")
    first.__cause__, second.__cause__ = second, first
    assert categorize_error(first) is U
    assert retry_after_ms(first, now=NOW) is None


def test_explicit_category_considers_only_transient_and_permanent_error() -> None:
    assert explicit_category(from_cause(RuntimeError(), PermanentError())) is P
    assert explicit_category(TransientError()) is T
    assert explicit_category(ValueError()) is None


@pytest.mark.parametrize(
    "text",
    [
        "dial tcp 10.0.0.7:5432: connect: connection refused",
        "read tcp 10.0.0.7:5432: i/o timeout",
        "connect ECONNREFUSED 127.0.0.1:6379",
        "getaddrinfo EAI_AGAIN db.internal",
        "Error: read ECONNRESET",
        "LOADING Redis is loading the dataset in memory",
    ],
)
def test_an_unknown_error_with_the_message_of_a_lost_connection_is_transient(
    text: str,
) -> None:
    assert categorize_error(BusinessError(text)) is T
    assert categorize_error(from_cause(BusinessError("sync failed"), RuntimeError(text))) is T
    assert categorize_error(ExceptionGroup("several", [RuntimeError(text), TimeoutError()])) is T


def test_messages_of_known_errors_and_quoted_statements_are_ignored() -> None:
    text = "connection refused"
    assert categorize_error(ValueError(text)) is P
    assert categorize_error(from_cause(RuntimeError(text), KeyError())) is P
    quoting = BusinessError(f"INSERT INTO log VALUES ('{text}')")
    vars(quoting)["orig"] = BusinessError("no such tenant")
    assert categorize_error(quoting) is U
    assert categorize_error(RuntimeError("HECONNREFUSEDX")) is U


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "category"),
    [
        ([ConnectionError(), TimeoutError()], T),
        ([ConnectionError(), ExceptionGroup("inner", [TransientError(), TimeoutError()])], T),
        ([ConnectionError(), ValueError()], P),
        ([ConnectionError(), BusinessError()], U),
        ([ConnectionError(), BusinessError(), PermanentError()], P),
        ([from_cause(BusinessError(), TimeoutError()), TimeoutError()], T),
    ],
)
def test_a_group_is_transient_only_if_all_its_members_are(members: list[Exception], category: ErrorCategory) -> None:
    assert categorize_error(ExceptionGroup("several", members)) is category
    assert categorize_error(from_cause(BusinessError(), ExceptionGroup("several", members))) is category


def test_the_same_error_may_be_in_a_group_twice() -> None:
    same = ConnectionError()
    assert categorize_error(ExceptionGroup("several", [same, same])) is T


def test_an_asyncio_task_group_is_categorized_by_its_members(closed_address: str) -> None:
    async def fetch_both() -> None:
        async with httpx.AsyncClient(trust_env=False) as client, asyncio.TaskGroup() as group:
            group.create_task(client.get(f"http://{closed_address}/1"))
            group.create_task(client.get(f"http://{closed_address}/2"))

    assert categorize_error(catch(lambda: asyncio.run(fetch_both()))) is T


def test_a_group_that_is_the_cause_of_one_of_its_members_is_unknown() -> None:
    member = BusinessError()
    group = ExceptionGroup("circle", [member, ConnectionError()])
    member.__cause__ = group
    assert categorize_error(group) is U
    assert categorize_error(member) is U


def test_an_explicit_category_of_a_group_takes_precedence_over_its_members() -> None:
    assert categorize_error(from_cause(TransientError(), ExceptionGroup("x", [ValueError()]))) is T


# --- user-defined rules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "match",
    [
        BusinessError,
        (KeyError, BusinessError),
        "BusinessError",
        f"{BusinessError.__module__}.BusinessError",
        lambda exc: T if "funds" in str(exc) else None,
    ],
)
def test_a_rule_may_be_a_type_several_types_a_name_or_a_function(match: Any) -> None:
    rules = Categorizer()
    rules.register(match, *([] if callable(match) and not isinstance(match, type) else [T]))
    assert rules.categorize(BusinessError("no funds")) is T
    assert rules.categorize(exception_class("other.DeepError", BusinessError)("no funds")) is T
    assert rules.categorize(ValueError("other")) is P


@pytest.mark.parametrize(
    ("name", "matches"),
    [
        ("redis.exceptions.ReadOnlyError", True),
        ("redis.ReadOnlyError", True),
        ("ReadOnlyError", True),
        ("redis.RedisError", True),
        ("redis.ConnectionError", False),
        ("redi.ReadOnlyError", False),
        ("exceptions.ReadOnlyError", False),
        ("redis.exceptions.deeper.ReadOnlyError", False),
        ("builtins.Exception", True),
    ],
)
def test_a_name_matches_base_classes_and_submodules(name: str, matches: bool) -> None:
    rules = Categorizer()
    rules.register(name, U)
    assert rules.categorize(redis.ReadOnlyError("x")) is (U if matches else T)


def test_a_name_matches_types_defined_in_c() -> None:
    rules = Categorizer()
    rules.register("csv.Error", T)
    assert rules.categorize(csv.Error()) is T


def test_newer_rules_precede_older_rules_and_built_in_categories() -> None:
    rules = Categorizer()
    rules.register(LookupError, T)
    assert rules.categorize(KeyError()) is T
    rules.register(KeyError, P)
    assert rules.categorize(KeyError()) is P
    assert rules.categorize(IndexError()) is T


def test_explicit_categories_take_precedence_over_rules() -> None:
    rules = Categorizer()
    rules.register(Exception, T)
    assert rules.categorize(PermanentError()) is P


def test_rules_apply_to_causes_of_unknown_errors_and_to_groups() -> None:
    rules = Categorizer()
    rules.register(BusinessError, T)
    assert rules.categorize(from_cause(RuntimeError(), BusinessError())) is T
    assert rules.categorize(ExceptionGroup("x", [BusinessError(), TimeoutError()])) is T
    rules.register(ExceptionGroup, P)
    assert rules.categorize(ExceptionGroup("x", [TimeoutError()])) is P


def test_a_rule_that_returns_unknown_ends_the_search() -> None:
    rules = Categorizer()
    rules.register(ConnectionError, U)
    assert rules.categorize(from_cause(ConnectionError(), TimeoutError())) is U


def test_a_copy_of_a_categorizer_is_independent() -> None:
    first = Categorizer()
    first.register(BusinessError, T)
    second = first.copy()
    second.register(BusinessError, P)
    first.register(KeyError, T)
    assert (first.categorize(BusinessError()), second.categorize(BusinessError())) == (T, P)
    assert (first.categorize(KeyError()), second.categorize(KeyError())) == (T, P)


@pytest.mark.parametrize("rule", [lambda exc: exc.no_such_attribute, lambda exc: "sometimes", lambda: T])
def test_a_rule_that_fails_is_skipped_with_a_note(rule: Any) -> None:
    rules = Categorizer()
    rules.register(rule)
    error = ConnectionError()
    assert rules.categorize(error) is T
    assert "was skipped" in error.__notes__[0]


async def _async_rule(_: BaseException) -> None: ...


@pytest.mark.parametrize(
    "arguments",
    [
        (BusinessError,),
        ("BusinessError",),
        (BusinessError, "sometimes"),
        (lambda exc: None, T),
        ((), T),
        ("", T),
        (int, T),
        ((KeyError, 3), T),
        (None, T),
        (_async_rule,),
    ],
)
def test_an_invalid_rule_is_rejected(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError):
        Categorizer().register(*arguments)


def test_a_category_may_be_given_as_a_string() -> None:
    rules = Categorizer()
    rules.register(BusinessError, "transient")  # type: ignore[arg-type]
    assert rules.categorize(BusinessError()) is T


# --- robustness -------------------------------------------------------------------------------------------------------


class UnreadableError(Exception):
    args = None  # type: ignore[assignment]

    def __str__(self) -> str:
        raise RuntimeError("no text")

    @property
    def response(self) -> object:
        raise RuntimeError("no response")

    reason = orig = sqlstate = pgcode = status_code = errno = response


def test_an_exception_whose_attributes_raise_is_unknown() -> None:
    assert categorize_error(UnreadableError()) is U
    assert retry_after_ms(UnreadableError(), now=NOW) is None


odd_values = st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers()) | st.just(ValueError())


@given(
    base=st.sampled_from([OSError, sqlite3.OperationalError, requests.HTTPError, urllib.error.URLError, Exception]),
    attributes=st.dictionaries(
        st.sampled_from(["errno", "sqlstate", "reason", "orig", "response", "status_code", "sqlite_errorname"]),
        odd_values,
    ),
)
def test_unexpected_attribute_values_never_raise(base: type[Exception], attributes: dict[str, object]) -> None:
    error = exception_class("odd.Error", base, **attributes)("x")
    assert isinstance(categorize_error(error), ErrorCategory)
    assert retry_after_ms(error, now=NOW) is None


def test_categories_import_only_bulltask_and_the_standard_library() -> None:
    for file in Path(errors.__file__).parent.joinpath("categories").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            outer = {name.partition(".")[0] for name in names}
            assert outer <= {"bulltask"} | sys.stdlib_module_names, file.name


# --- Retry-After ------------------------------------------------------------------------------------------------------


@any_client
@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_of_a_busy_server_is_respected(get: Get, status: int, address: str) -> None:
    assert retry_after_ms(get(f"http://{address}/status/{status}?retry_after=7"), now=NOW) == 7_000


@any_client
@pytest.mark.parametrize("path", ["status/503", "status/500?retry_after=7", "status/404?retry_after=7", "nothing"])
def test_retry_after_is_none_without_the_header_or_for_other_statuses(get: Get, path: str, address: str) -> None:
    assert retry_after_ms(get(f"http://{address}/{path}"), now=NOW) is None


def busy_error(value: str) -> BaseException:
    request = httpx.Request("GET", "http://127.0.0.1/")
    response = httpx.Response(429, headers={"retry-after": value}, request=request)
    return catch(response.raise_for_status)


@pytest.mark.parametrize(
    ("value", "expected_ms"),
    [
        ("0", 0),
        ("120", 120_000),
        (" 5 ", 5_000),
        ("3600", 3_600_000),
        ("3601", 3_600_000),
        ("9" * 5_000, 3_600_000),
        ("Fri, 01 May 2026 12:00:30 GMT", 30_000),
        ("Fri, 01 May 2026 14:00:30 +0200", 30_000),
        ("Fri, 01 May 2026 12:00:30 -0000", 30_000),
        ("Fri, 01 May 2026 11:00:00 GMT", 0),
        ("Sat, 02 May 2026 12:00:00 GMT", 3_600_000),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 3_600_000),
        ("", None),
        ("soon", None),
        ("-5", None),
        ("1.5", None),
        ("1e3", None),
        ("Fri, 99 May 2026 12:00:30 GMT", None),
    ],
)
def test_retry_after_may_be_seconds_or_a_date_up_to_an_hour(value: str, expected_ms: int | None) -> None:
    assert retry_after_ms(busy_error(value), now=NOW) == expected_ms
    assert retry_after_ms(busy_error(value), now=round(NOW.timestamp() * 1000)) == expected_ms


@given(value=st.text(st.characters(codec="latin-1", exclude_characters="\r\n\0")))
def test_any_retry_after_header_is_either_parsed_or_ignored(value: str) -> None:
    delay_ms = retry_after_ms(exception_class("x.Error", response=response_with(value))("x"), now=NOW)
    assert delay_ms is None or 0 <= delay_ms <= 3_600_000


def response_with(value: str) -> object:
    return type("Response", (), {"status_code": 429, "headers": {"Retry-After": value}})()


@given(moment=st.datetimes(datetime(1990, 1, 1), datetime(2090, 1, 1), timezones=st.just(UTC)))  # noqa: DTZ001
def test_a_retry_after_date_is_relative_to_now(moment: datetime) -> None:
    date = moment.replace(microsecond=0)
    expected = min(max(timedelta(), date - NOW), timedelta(hours=1))
    error = busy_error(format_datetime(date, usegmt=True))
    assert retry_after_ms(error, now=NOW) == expected / timedelta(milliseconds=1)


@pytest.mark.parametrize(
    ("value", "expected_ms"),
    [(5, 5_000), (0.25, 250), (timedelta(hours=6), 21_600_000), (0, 0), (-1, None), (float("nan"), None), ("5", None)],
)
def test_retry_after_of_a_transient_error_has_no_maximum(value: Any, expected_ms: int | None) -> None:
    assert retry_after_ms(TransientError("later", retry_after=value), now=NOW) == expected_ms
    assert retry_after_ms(from_cause(BusinessError(), TransientError(retry_after=value)), now=NOW) == expected_ms


def test_retry_after_of_a_transient_error_takes_precedence_over_the_header() -> None:
    assert retry_after_ms(from_cause(TransientError(retry_after=1), busy_error("60")), now=NOW) == 1_000
    assert retry_after_ms(from_cause(TransientError("later"), busy_error("60")), now=NOW) == 60_000


def test_a_group_has_the_longest_retry_after_of_its_members() -> None:
    members = [TransientError(retry_after=1), ExceptionGroup("inner", [TransientError(retry_after=3)]), ValueError()]
    assert retry_after_ms(ExceptionGroup("several", members), now=NOW) == 3_000


def test_other_errors_have_no_retry_after() -> None:
    assert retry_after_ms(ConnectionError(), now=NOW) is None
