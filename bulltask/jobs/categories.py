"""Error categories: transient (retry), permanent (do not retry) or unknown.

:class:`Categorizer` decides: explicit categories first (``TransientError``, ``PermanentError``), then the user's rules,
then the table of known exceptions, then the error's message. :func:`retry_after_ms` reads the delay that a server
requests.
"""

from __future__ import annotations

import errno
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum

from bulltask.jobs.clock import to_ms
from bulltask.jobs.errors import ConfigError, PermanentError, TransientError

__all__ = ["Categorizer", "ErrorCategory", "Rule", "categorize_error", "explicit_category", "retry_after_ms"]


class ErrorCategory(StrEnum):
    """Whether an error is worth another attempt."""

    TRANSIENT = "transient"
    PERMANENT = "permanent"
    UNKNOWN = "unknown"


TRANSIENT, PERMANENT, UNKNOWN = ErrorCategory

Rule = Callable[[BaseException], ErrorCategory | None]
"""Returns an exception's category, or ``None`` if the rule does not apply."""


class Categorizer:
    """Ordered rules: the user's, newest first, then the built-in table of known exceptions.

    The first of these steps that finds a category decides:

    1. A ``TransientError`` or ``PermanentError`` in the chain of causes; the outermost one, if there are several.
    2. For each exception in the chain, outermost first: the user's rules, then the table. A known exception therefore
       overrides its cause, and an unknown exception has the category of its cause.
    3. The message of a lost or refused connection (``RuntimeError("connect ECONNREFUSED …")``): transient.

    An ``ExceptionGroup`` is transient only if all of its exceptions are, and permanent if any of them is.
    """

    def __init__(self) -> None:
        self._rules: list[Rule] = []

    def register(
        self,
        match: type[BaseException] | tuple[type[BaseException], ...] | str | Rule,
        category: ErrorCategory | None = None,
    ) -> None:
        """Add a rule that takes precedence over all existing rules.

        Args:
            match: One of the following:

                - an exception type or a tuple of them; subclasses match too;
                - the name of a type, which needs no import: ``"redis.ConnectionError"`` also matches a type that is
                  defined in a submodule such as ``redis.exceptions``; a bare ``"OperationalError"`` matches in any
                  module; subclasses match too;
                - a function that returns the category of an exception, or ``None`` if the rule does not apply. If the
                  function raises, the rule does not apply, and a note is added to the job's traceback.
            category: Category of a match; omit it for a function. ``UNKNOWN`` also ends the search.

        Raises:
            ConfigError: The arguments cannot be combined, or one of them is invalid.
        """
        if callable(match) and not isinstance(match, type):
            if category is not None:
                raise ConfigError(f"the rule {match!r} is a function, which returns the category itself: omit category")
            if inspect.iscoroutinefunction(match):
                raise ConfigError(f"the rule {match!r} must be a plain function, because it is not awaited")
            self._rules.insert(0, match)
            return
        if category not in set(ErrorCategory):
            raise ConfigError(f"the category for {match!r} must be transient, permanent or unknown, not {category!r}")
        self._rules.insert(0, _type_rule(match, ErrorCategory(category)))

    def categorize(self, exc: BaseException) -> ErrorCategory:
        """Return the category of ``exc``; never raises."""
        return self._categorize(exc, frozenset())

    def copy(self) -> Categorizer:
        """Return an independent copy with the same rules."""
        copied = Categorizer()
        copied._rules = self._rules.copy()
        return copied

    def _categorize(self, exc: BaseException, above: frozenset[int]) -> ErrorCategory:
        """``above`` contains the ids of the enclosing groups, because a member may have its own group as its cause."""
        chain = list(chain_of(exc, above))
        explicit = _explicit_category(chain)
        if explicit is not None:
            return explicit
        categories = (self._classify(each, above | {id(each)}) for each in chain)
        return next((category for category in categories if category is not None), None) or by_text(chain) or UNKNOWN

    def _classify(self, exc: BaseException, above: frozenset[int]) -> ErrorCategory | None:
        for rule in self._rules:
            category = _apply_rule(rule, exc)
            if category is not None:
                return category
        if not isinstance(exc, BaseExceptionGroup):
            return known_category(exc)
        members = {self._categorize(each, above) for each in exc.exceptions}
        if members == {TRANSIENT}:
            return TRANSIENT
        return PERMANENT if PERMANENT in members else UNKNOWN


def categorize_error(exc: BaseException) -> ErrorCategory:
    """Return the category of ``exc``, without user rules."""
    return Categorizer().categorize(exc)


def explicit_category(exc: BaseException) -> ErrorCategory | None:
    """Return the category of a ``TransientError`` or ``PermanentError`` in the chain, ``None`` if there is none.

    For jobs that other BullMQ clients sent, no other category prevents a retry.
    """
    return _explicit_category(list(chain_of(exc)))


def _explicit_category(chain: list[BaseException]) -> ErrorCategory | None:
    for each in chain:
        if isinstance(each, PermanentError | TransientError):
            return PERMANENT if isinstance(each, PermanentError) else TRANSIENT
    return None


def _type_rule(match: object, category: ErrorCategory) -> Rule:
    if isinstance(match, str) and match:
        return lambda exc: category if any(_is_named(cls, match) for cls in type(exc).__mro__) else None
    types = match if isinstance(match, tuple) else (match,)
    if not types or not all(isinstance(each, type) and issubclass(each, BaseException) for each in types):
        raise ConfigError(f"a rule must be exception types, the name of a type, or a function, not {match!r}")
    return lambda exc: category if isinstance(exc, types) else None


def _is_named(cls: type, name: str) -> bool:
    package, _, last = name.rpartition(".")
    if last != cls.__name__:
        return False
    # With a leading underscore, because csv.Error and pickle.UnpicklingError are defined in _csv and _pickle.
    return not package or f"{cls.__module__}.".lstrip("_").startswith(f"{package.lstrip('_')}.")


def _apply_rule(rule: Rule, exc: BaseException) -> ErrorCategory | None:
    try:
        category = rule(exc)
        return None if category is None else ErrorCategory(category)
    except Exception as error:  # noqa: BLE001 - a user's rule must not block the job's outcome
        # A note is part of the traceback, so the traceback shows why the rule did not apply.
        with suppress(Exception):
            exc.add_note(f"bulltask: the category rule {rule!r} raised {error!r} and was skipped")
        return None


def category_table(*, transient: str = "", permanent: str = "") -> dict[str, ErrorCategory]:
    """Return a mapping from space-separated words to their category."""
    return dict.fromkeys(transient.split(), TRANSIENT) | dict.fromkeys(permanent.split(), PERMANENT)


# The causes of an exception are explicit ones: ``raise … from cause``, and the exception that a wrapper contains as
# ``.reason`` (urllib, urllib3), as ``.orig`` (SQLAlchemy) or as its first argument. The implicit ``__context__`` is not
# one: a bug in an ``except ConnectionError:`` block, whose context is the ``ConnectionError``, would be retried.


def chain_of(exc: BaseException, skip: frozenset[int] = frozenset()) -> Iterator[BaseException]:
    """Yield ``exc`` and its causes, outermost first, each once; ``skip`` has the ids of those to leave out."""
    stack, seen = [exc], set(skip)
    while stack:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        causes = (first_argument(each), attribute(each, "orig"), attribute(each, "reason"), each.__cause__)
        stack.extend(cause for cause in causes if isinstance(cause, BaseException))


def tree_of(exc: BaseException) -> Iterator[BaseException]:
    """Yield the chain of ``exc``, and the chains of all exceptions in its exception groups."""
    stack, seen = [exc], set[int]()
    while stack:
        for each in list(chain_of(stack.pop(), frozenset(seen))):
            seen.add(id(each))
            yield each
            if isinstance(each, BaseExceptionGroup):
                stack.extend(each.exceptions)


def attribute(obj: object, name: str) -> object:
    """Return an attribute, ``None`` if it is missing or its property raises (httpx's ``request`` may)."""
    try:
        return getattr(obj, name, None)
    except Exception:  # noqa: BLE001 - a broken property must not hide the error itself
        return None


def first_argument(exc: BaseException) -> object:
    """Return ``exc.args[0]``, ``None`` if there is none."""
    arguments = attribute(exc, "args")
    return arguments[0] if isinstance(arguments, tuple) and arguments else None


def text_of(exc: BaseException) -> str:
    """Return ``str(exc)``, ``""`` if that raises."""
    try:
        return str(exc)
    except Exception:  # noqa: BLE001 - as above
        return ""


_MAX_CHARS = 10_000  # a message may be megabytes long

# Messages from Go, Node, curl, the C library and Redis for temporary errors of the network or of Redis.
_TRANSIENT = re.compile(
    r"connection refused|connection reset|connection timed out|i/o timeout|no route to host|network is unreachable|"
    r"temporary failure in name resolution|"
    r"\b(?:ECONNREFUSED|ECONNRESET|ECONNABORTED|ETIMEDOUT|EPIPE|EHOSTUNREACH|ENETUNREACH|EAI_AGAIN|ENOTFOUND)\b|"
    r"\bLOADING \w+ is loading the dataset",
    re.IGNORECASE,
)


def by_text(chain: Iterable[BaseException]) -> ErrorCategory | None:
    """Return the category of a chain without a known type, code or status; ``None`` if no message is known."""
    # Messages of SQLAlchemy's errors are skipped, because they contain the statement and its parameters.
    texts = (text_of(each)[:_MAX_CHARS] for each in chain if attribute(each, "orig") is None)
    return TRANSIENT if any(map(_TRANSIENT.search, texts)) else None


def status_of(exc: BaseException) -> int | None:
    """Return the HTTP status code of an HTTP client's error, ``None`` if it has none."""
    values = (attribute(exc, name) for name in ("status_code", "status", "code"))
    return _first_status(attribute(attribute(exc, "response"), "status_code"), *values)


def by_status_error(exc: BaseException) -> ErrorCategory | None:
    """Return the category of a status error; ``None`` if it has no status."""
    # aiohttp sets status 400 for a response that is not HTTP, even though no server has sent that status.
    if type(exc.__cause__).__module__ == "aiohttp.http_exceptions":
        return TRANSIENT
    return _by_status(status_of(exc))


def by_response(exc: BaseException) -> ErrorCategory | None:
    """Return an unknown client's error category, by ``response.status_code`` or ``status_code``.

    ``status`` and ``code`` are not used, because errors that are unrelated to HTTP have these attributes, too.
    """
    status_code = attribute(exc, "status_code")
    return _by_status(_first_status(attribute(attribute(exc, "response"), "status_code"), status_code))


def by_url_error(exc: BaseException) -> ErrorCategory | None:
    """Return the category of urllib's ``URLError``: invalid URLs are permanent, unreachable hosts are transient."""
    reason = attribute(exc, "reason")
    if isinstance(reason, BaseException):
        return None  # the cause is next in the chain
    return PERMANENT if str(reason).startswith(("unknown url type", "no host given")) else TRANSIENT


def _first_status(*values: object) -> int | None:
    return next((value for value in values if isinstance(value, int) and 100 <= value <= 599), None)


def _by_status(status: int | None) -> ErrorCategory | None:
    if status is None or status < 300:
        return None
    # 408 (timeout) and 425 (too early) are temporary, even though they are 4xx.
    return TRANSIENT if status >= 500 or status in {408, 425, 429} else PERMANENT


# Transient: lost or refused connections, too many connections, shutdown, read-only after a failover, locks, deadlocks,
# timeouts, no space left. Permanent: accounts, unknown names, constraints, missing values.
_MYSQL = category_table(
    transient="1015 1021 1037 1040 1041 1053 1114 1203 1205 1213 1226 1290 1317 1836 2002 2003 2006 2013 2055 3024 "
    "3572",
    permanent="1044 1045 1049 1054 1142 1143 1227 1364 3819 4025",
)
_SQLITE = category_table(
    permanent="ERROR READONLY PERM AUTH MISMATCH MISUSE RANGE TOOBIG CONSTRAINT NOTADB CORRUPT FORMAT"
)
_SQLSTATE_PERMANENT = ("0A", "21", "22", "23", "28", "2B", "34", "3D", "3F", "40002", "42", "44")
# Classes: connection, rollback (deadlock, serialization), resources, operator, system. Codes: lock not available,
# object in use, read-only (a failover), ODBC's timeouts.
_SQLSTATE_TRANSIENT = ("08", "40", "53", "57", "58", "55P03", "55006", "25006", "HYT")
# Errors of failed PostgreSQL connections have only a message, and SQLite's errors may have lost their code.
_PERMANENT_TEXT = re.compile(
    r"no such (table|column|function|module)|syntax error|has no column|readonly database|not a database|"
    r"authentication failed|no pg_hba\.conf entry|(role|database|user) \S+ does not exist",
    re.IGNORECASE,
)


def by_sqlstate(exc: BaseException) -> ErrorCategory | None:
    """Return the category for the SQLSTATE that psycopg, psycopg2, asyncpg and others attach."""
    state = attribute(exc, "sqlstate") or attribute(exc, "pgcode")
    if not isinstance(state, str) or len(state) != 5:
        return None
    if state.startswith(_SQLSTATE_PERMANENT):  # checked first, as 40002 is an exception to 40
        return PERMANENT
    return TRANSIENT if state.startswith(_SQLSTATE_TRANSIENT) else None


def by_database(exc: BaseException) -> ErrorCategory | None:
    """Return a generic database error's category, by code or else by message; ``None`` if neither is known."""
    # SQLAlchemy and Django wrap the driver's error, which contains the code, in an error with the same name.
    chain = list(chain_of(exc))
    category = next((found for each in chain if (found := _by_driver(each)) is not None), None)
    # Messages of SQLAlchemy's errors are skipped, because they contain the statement and its parameters.
    texts = (text_of(each) for each in chain if attribute(each, "orig") is None)
    return category or (PERMANENT if any(map(_PERMANENT_TEXT.search, texts)) else None)


def by_operation(exc: BaseException) -> ErrorCategory:
    """Return the category of an ``OperationalError`` or ``InterfaceError``: transient unless known to be permanent."""
    return by_database(exc) or TRANSIENT


def _by_driver(exc: BaseException) -> ErrorCategory | None:
    number = first_argument(exc)  # MySQL's drivers
    if isinstance(number, int) and str(number) in _MYSQL:
        return _MYSQL[str(number)]
    library, _, code = str(attribute(exc, "sqlite_errorname")).partition("_")  # SQLITE_BUSY_SNAPSHOT
    return _SQLITE.get(code.partition("_")[0], TRANSIENT) if library == "SQLITE" else by_sqlstate(exc)


# An exception's classes are looked up from the most specific to the most general; the first match decides. A key
# consists of the top-level package and a type's name, so ``redis.ConnectionError`` matches wherever redis defines it,
# and the library is never imported.


def known_category(exc: BaseException) -> ErrorCategory | None:
    """Return the category of this exception (not of its causes), ``None`` if it is unknown."""
    # Clients convert a certificate error to a connection error, sometimes without the original as its cause.
    if any("certificate verify failed" in text_of(each).lower() for each in chain_of(exc)):
        return PERMANENT
    for cls in type(exc).__mro__:
        for name in (f"{cls.__module__.partition('.')[0]}.{cls.__name__}", cls.__name__):
            entry = _KNOWN.get(name)
            category = entry(exc) if callable(entry) else entry
            if category is not None:
                return category
    return by_response(exc) or by_sqlstate(exc)


_ERRNO = category_table(
    transient="ECONNREFUSED ECONNRESET ECONNABORTED EPIPE ESHUTDOWN ENOTCONN ETIMEDOUT EHOSTUNREACH EHOSTDOWN "
    "ENETUNREACH ENETDOWN ENETRESET EADDRINUSE EADDRNOTAVAIL EINPROGRESS EALREADY EAGAIN EWOULDBLOCK EINTR EBUSY "
    "EDEADLK EDEADLOCK ENOLCK ESTALE EIO EREMOTEIO ENOSPC EDQUOT EMFILE ENFILE ENOMEM ENOBUFS",
    permanent="EINVAL EBADF ENAMETOOLONG ELOOP EROFS EXDEV ENOEXEC ENOSYS E2BIG EFBIG EAFNOSUPPORT EPROTONOSUPPORT",
)
_REDIS_WORDS = category_table(
    transient="LOADING BUSY OOM READONLY MISCONF CLUSTERDOWN MASTERDOWN TRYAGAIN NOREPLICAS NOGOODSLAVE MOVED ASK",
    permanent="NOAUTH WRONGPASS NOPERM WRONGTYPE CROSSSLOT DENIED",
)


def _by_errno(exc: BaseException) -> ErrorCategory | None:
    number = attribute(exc, "errno")
    return _ERRNO.get(errno.errorcode.get(number, "")) if isinstance(number, int) else None


def _by_redis_reply(exc: BaseException) -> ErrorCategory | None:
    return _REDIS_WORDS.get(text_of(exc).partition(" ")[0])


def _by_smtp(exc: BaseException) -> ErrorCategory | None:
    recipients = attribute(exc, "recipients")
    replies = recipients.values() if isinstance(recipients, dict) else [(attribute(exc, "smtp_code"),)]
    codes = [reply[0] for reply in replies if isinstance(reply[0], int)]
    if any(400 <= code < 500 for code in codes):  # in SMTP, unlike in HTTP, 4yz is a temporary error
        return TRANSIENT
    return PERMANENT if any(500 <= code < 600 for code in codes) else None


def _by_content_type(exc: BaseException) -> ErrorCategory | None:
    return by_status_error(exc) or PERMANENT  # the status is good, but the body cannot be parsed


def _table(*rows: tuple[ErrorCategory | Rule, str, str]) -> dict[str, ErrorCategory | Rule]:
    """Build a mapping from ``package.Type`` (``Type`` for package ``*``) to a category or rule."""
    return {
        name if package == "*" else f"{package}.{name}": category
        for category, packages, names in rows
        for package in packages.split()
        for name in names.split()
    }


_KNOWN = _table(
    (TRANSIENT, "bulltask", "BrokerError SoftTimeLimitExceeded TimeLimitExceeded"),
    (
        PERMANENT,
        "bulltask",
        "BrokerAuthError ScriptIntegrityError JobNotFoundError ParentNotFoundError AppNotFoundError",
    ),
    (PERMANENT, "bulltask", "DuplicateTaskError"),
    (_by_errno, "builtins", "OSError"),
    (TRANSIENT, "builtins", "ConnectionError TimeoutError BlockingIOError InterruptedError MemoryError"),
    (PERMANENT, "builtins", "PermissionError FileNotFoundError IsADirectoryError NotADirectoryError"),
    (PERMANENT, "builtins", "ValueError TypeError LookupError AttributeError AssertionError ArithmeticError"),
    (PERMANENT, "builtins", "NameError NotImplementedError RecursionError ImportError SyntaxError"),
    (TRANSIENT, "socket", "gaierror herror"),
    (TRANSIENT, "ssl", "SSLError"),
    (PERMANENT, "ssl", "SSLCertVerificationError"),
    (TRANSIENT, "asyncio", "CancelledError IncompleteReadError"),
    (TRANSIENT, "concurrent", "CancelledError"),
    (TRANSIENT, "multiprocessing", "TimeoutError"),
    (TRANSIENT, "subprocess", "TimeoutExpired"),
    # HTTP
    (by_status_error, "httpx", "HTTPStatusError"),
    (TRANSIENT, "httpx httpcore", "TimeoutException NetworkError ProxyError RemoteProtocolError"),
    (TRANSIENT, "httpcore", "ConnectionNotAvailable"),
    (PERMANENT, "httpx httpcore", "UnsupportedProtocol LocalProtocolError"),
    (PERMANENT, "httpx", "InvalidURL DecodingError TooManyRedirects CookieConflict StreamError"),
    (by_status_error, "requests", "HTTPError"),
    (TRANSIENT, "requests", "ConnectionError Timeout ChunkedEncodingError RetryError"),
    (PERMANENT, "requests", "InvalidURL MissingSchema InvalidSchema URLRequired InvalidHeader InvalidJSONError"),
    (PERMANENT, "requests", "ContentDecodingError TooManyRedirects StreamConsumedError"),
    (TRANSIENT, "urllib3", "TimeoutError ProtocolError ProxyError EmptyPoolError IncompleteRead SSLError"),
    (PERMANENT, "urllib3", "LocationValueError DecodeError InvalidHeader"),
    (by_status_error, "urllib", "HTTPError"),
    (by_url_error, "urllib", "URLError"),
    (TRANSIENT, "urllib", "ContentTooShortError"),
    (TRANSIENT, "http", "IncompleteRead BadStatusLine"),
    (PERMANENT, "http", "InvalidURL"),
    (by_status_error, "aiohttp", "ClientResponseError"),
    (_by_content_type, "aiohttp", "ContentTypeError"),
    (TRANSIENT, "aiohttp", "ClientConnectionError ClientPayloadError UploadAbortedError"),
    (PERMANENT, "aiohttp", "ClientConnectorCertificateError ServerFingerprintMismatch"),
    (PERMANENT, "aiohttp", "InvalidURL NonHttpUrlClientError TooManyRedirects"),
    # mail, files over the network
    (_by_smtp, "smtplib", "SMTPResponseException SMTPRecipientsRefused"),
    (TRANSIENT, "smtplib", "SMTPServerDisconnected SMTPConnectError"),
    (PERMANENT, "smtplib", "SMTPAuthenticationError SMTPNotSupportedError"),
    (TRANSIENT, "ftplib", "error_temp"),
    (PERMANENT, "ftplib", "error_perm"),
    # Redis and Valkey
    (TRANSIENT, "redis valkey", "ConnectionError TimeoutError BusyLoadingError OutOfMemoryError ReadOnlyError"),
    (TRANSIENT, "redis valkey", "ClusterDownError MasterDownError TryAgainError AskError SlotNotCoveredError"),
    (TRANSIENT, "redis valkey", "WatchError LockError InvalidResponse"),
    (PERMANENT, "redis valkey", "AuthenticationError AuthorizationError AuthenticationWrongNumberOfArgsError"),
    (PERMANENT, "redis valkey", "NoPermissionError DataError ClusterCrossSlotError CrossSlotTransactionError"),
    (_by_redis_reply, "redis valkey", "ResponseError"),
    # databases: DB-API names in any package
    (by_operation, "*", "OperationalError InterfaceError"),
    (by_database, "*", "InternalError DatabaseError"),
    (PERMANENT, "*", "IntegrityError ProgrammingError DataError NotSupportedError"),
    (PERMANENT, "sqlite3", "InterfaceError"),  # SQLite has no network connection: the call was invalid
    (TRANSIENT, "sqlalchemy", "TimeoutError DisconnectionError"),
    (PERMANENT, "sqlalchemy", "ArgumentError CompileError"),
    # invalid input or configuration
    (PERMANENT, "*", "ValidationError ImproperlyConfigured"),
    (PERMANENT, "struct zlib", "error"),
    (PERMANENT, "_csv configparser", "Error"),
    (PERMANENT, "_pickle", "UnpicklingError"),
    (PERMANENT, "_lzma", "LZMAError"),
    (PERMANENT, "gzip", "BadGzipFile"),
    (PERMANENT, "zipfile", "BadZipFile"),
    (PERMANENT, "tarfile", "ReadError"),
    (PERMANENT, "yaml", "YAMLError"),
)

_MAX_MS = 3_600_000  # with a longer delay, the job would seem to be lost


def retry_after_ms(exc: BaseException, *, now: datetime | int) -> int | None:
    """Return the minimum delay in milliseconds before the next attempt that the error requests, ``None`` for none.

    If the task set ``TransientError.retry_after``, that is the delay. Otherwise, it is the ``Retry-After`` header of a
    429 or 503 response (seconds or an HTTP date, at most 1 h) in an error of httpx, requests, aiohttp, urllib or a
    similar client. If there are several errors (causes, members of an ``ExceptionGroup``), the longest delay is used.
    ``now`` is for HTTP dates: an aware ``datetime``, or epoch milliseconds.
    """
    errors = list(tree_of(exc))
    now_ms = round(now.timestamp() * 1000) if isinstance(now, datetime) else now
    explicit = [ms for each in errors if (ms := _explicit_ms(each)) is not None]
    delays = explicit or [ms for each in errors if (ms := _header_ms(each, now_ms)) is not None]
    return max(delays, default=None)


def _explicit_ms(exc: BaseException) -> int | None:
    if not isinstance(exc, TransientError) or exc.retry_after is None:
        return None
    try:
        return to_ms(exc.retry_after)
    except ConfigError:
        return None  # raising would hide the attempt's error


def _header_ms(exc: BaseException, now_ms: int) -> int | None:
    if status_of(exc) not in {429, 503}:
        return None
    for holder in (attribute(exc, "response"), exc):
        get = attribute(attribute(holder, "headers"), "get")
        with suppress(Exception):  # an object that only looks like headers
            value = get("Retry-After") if callable(get) else None
            if isinstance(value, str):
                return _parse_ms(value.strip(), now_ms)
    return None


def _parse_ms(value: str, now_ms: int) -> int | None:
    if value.isascii() and value.isdigit():
        return min(int(value[:10]) * 1000, _MAX_MS)  # ten digits of seconds are more than three centuries
    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return min(max(0, round(aware.timestamp() * 1000) - now_ms), _MAX_MS)
