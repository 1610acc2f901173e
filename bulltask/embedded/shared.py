"""``broker_url="embedded://"``: a server that all processes of a project share, started by the first.

:func:`shared_url` turns such a URL into that of the project's server, which runs until the last process that uses it
has exited (:mod:`bulltask.embedded.keeper`). Its files are in a :class:`DataDirectory`. In a process that runs tests,
apps use an empty server of that process instead, so that tests send nothing to the development server.

An invalid URL or name raises ``ConfigError``; a server that cannot be used raises ``BrokerUnavailableError``.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

from bulltask.config.urls import SecretUrl
from bulltask.embedded import is_under_test, keeper
from bulltask.embedded.server import (
    ADVICE,
    HOST,
    STARTED_HERE,
    EmbeddedServer,
    ServerBinary,
    ServerLog,
    find_binary,
    lock,
    lock_directory,
    open_lock,
    restrict_clients,
    send_command,
    server_command,
    server_environment,
    server_info,
    try_ports,
    wait_until_ready,
)
from bulltask.jobs.errors import BrokerUnavailableError, ConfigError

if sys.platform != "win32":
    import fcntl

__all__ = [
    "DataDirectory",
    "ServerRecord",
    "find_project",
    "is_server_of_tests",
    "server_name",
    "server_of_tests",
    "shared_url",
    "start_and_record",
    "start_or_join",
]

log = logging.getLogger(__name__)

_URL = re.compile(r"embedded:(?://)?(?P<name>[^/?#@]*)(?:/(?P<db>\d*))?")
_LOCK_TIMEOUT = 90.0  # longer than a start may take
_REGISTRATION_TIMEOUT = 40.0  # longer than a keeper waits for its server to exit

_process_locks: dict[Path, int] = {}
"""The descriptors of ``users.lock`` files, by the directory whose server this process uses. They stay open until the
process exits, and forked children inherit them, so the server runs at least as long as a worker's children."""


def shared_url(broker_url: SecretUrl, directory: Path | None) -> SecretUrl:
    """Return the URL for :func:`bulltask.embedded.resolve_url`."""
    match = _URL.fullmatch(broker_url.get_secret_value())
    if match is None and broker_url.scheme.startswith("embedded"):
        raise ConfigError(f"Invalid broker_url {broker_url}: use embedded://, embedded://NAME or embedded://NAME/DB")
    named = DataDirectory.named(match["name"]) if match is not None and match["name"] else None
    if match is None or is_under_test(broker_url):
        return url_in_tests(broker_url)
    data = named or DataDirectory.of_project(directory)
    return SecretUrl(_start_or_join(data).removesuffix("0") + (match["db"] or "0"))


def start_or_join(data_dir: Path | str | None = None) -> str:
    """Ensure that a directory's server is running, and use it until this process and its forked children exit.

    The first process starts the server, others join it. No process owns it: it runs until the last process that uses it
    has exited, even if that process was killed with ``kill -9``, and is then shut down cleanly, so no data is lost
    between runs. A server is joined only if it reports the run id that is recorded for this directory. Call this again
    if the server has died, to restart it, on the same port if that is still free.

    The default is the directory of the project in the current directory, in ``$XDG_DATA_HOME/bulltask``. The files are
    in a subdirectory that is named after the server's release series, such as ``valkey-9``.
    """
    return _start_or_join(DataDirectory.of_project() if data_dir is None else DataDirectory.at(data_dir))


def start_and_record(server: EmbeddedServer, data: DataDirectory) -> None:
    """Start a server that belongs to this process, and record it so that `start_or_join` finds it."""
    with _start_lock(data):
        other = data.running()
        if other is not None:
            directory, record = other
            raise BrokerUnavailableError(
                f"a server is already running on the data in {directory}: {record.url} (pid {record.pid}). "
                f"Use that server, stop the processes that use it, or choose another directory"
            )
        server.start()
        ServerRecord(server.pid, server.port, server.run_id).write(server.data_dir)


def _start_or_join(data: DataDirectory) -> str:
    binary = find_binary()
    with _start_lock(data):
        # Of any release series, because two environments with different servers installed must not start two servers.
        running = data.running()
        if running is not None and _join(*running):
            return running[1].url
        for other in data.newer_directories(binary):
            log.warning(
                "%s starts without data, because it cannot read the newer data of another server in %s", binary, other
            )
        return _start_here(binary, data.directory(binary))


def _join(directory: Path, record: ServerRecord) -> bool:
    """Use a running server; return False if its last user has just exited, and so the server has stopped."""
    new = _register_process(directory)
    if record.is_running():
        return True
    if new:
        _unregister_process(directory)
    return False


def _start_here(binary: ServerBinary, directory: Path) -> str:
    record = ServerRecord.read(directory)
    new = _register_process(directory)
    try:
        # The last port first, so that processes whose server died reach the new server at the same URL.
        running = try_ports(lambda port: _start_on(binary, directory, port), record.port if record else None)
        running.write(directory)
    except BaseException:
        if new:
            _unregister_process(directory)  # otherwise the keeper would wait for this process forever
        raise
    return running.url


@contextmanager
def _start_lock(data: DataDirectory) -> Iterator[None]:
    """Hold the lock while this process decides whether to start the directory's server."""
    fd = open_lock(data.lock_file)
    try:
        if not lock(fd, fcntl.LOCK_EX, _LOCK_TIMEOUT):
            raise BrokerUnavailableError(
                f"another process has held the lock on {data.lock_file} for {_LOCK_TIMEOUT:g} s: see server.log"
            )
        try:
            yield
        finally:
            # close() alone is not enough, because a child that another thread has just forked has the descriptor, too.
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def _register_process(directory: Path) -> bool:
    """Register this process as one that uses the directory's server; return False if it is already registered."""
    fd = open_lock(directory / "users.lock")
    known_fd = _process_locks.get(directory)
    if known_fd is not None and os.path.samestat(os.fstat(known_fd), os.fstat(fd)):
        os.close(fd)
        return False
    # The keeper of a server that no process uses holds the exclusive lock until that server has exited.
    if not lock(fd, fcntl.LOCK_SH, _REGISTRATION_TIMEOUT):
        os.close(fd)
        raise BrokerUnavailableError(
            f"the server that uses {directory} did not stop within {_REGISTRATION_TIMEOUT:g} s: see its server.log"
        )
    _process_locks[directory] = fd
    return True


def _unregister_process(directory: Path) -> None:
    os.close(_process_locks.pop(directory))


def _start_on(binary: ServerBinary, directory: Path, port: int) -> ServerRecord:
    lock_fd = lock_directory(directory)
    server_log = ServerLog(directory)
    status, write_end = os.pipe()
    try:
        try:
            command = server_command(binary, directory, port, extra=restrict_clients(directory))
            _run_keeper(directory, [write_end, lock_fd], command, server_log)
        finally:
            os.close(write_end)
            os.close(lock_fd)
        pid = os.read(status, 32)  # the server's; empty if the keeper is gone
        if pid:
            # From now on, the pipe becomes readable when the keeper has exited, after its server.
            run_id = wait_until_ready(port, int(pid), lambda s: bool(select.select([status], [], [], s)[0]))
            if run_id:
                return ServerRecord(int(pid), port, run_id)
        raise server_log.failure(port)
    finally:
        os.close(status)


def _run_keeper(directory: Path, fds: list[int], command: list[str], server_log: ServerLog) -> None:
    program = [sys.executable, "-I", "-S", keeper.__file__, str(directory / "users.lock"), *map(str, fds)]
    with server_log.path.open("ab") as output:
        try:
            subprocess.run(  # noqa: S603 # bulltask's keeper
                [*program, "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=server_environment(),  # inherited by the server
                pass_fds=fds,
                umask=0o077,  # inherited by the server
                timeout=30,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise BrokerUnavailableError(f"the embedded server's keeper did not start: {error}") from error


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class DataDirectory:
    """The data directories for one name (which may be empty), one for each release series: ``ROOT/valkey-9/NAME``.

    A release series is a flavor and a major version. Each has a separate directory: Redis cannot read Valkey's files.
    """

    root: Path
    name: str = ""

    @classmethod
    def of_project(cls, directory: Path | None = None) -> Self:
        """Return the data directory of the project that contains a directory (default: the current directory)."""
        return cls.named(server_name(find_project(directory)))

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the user's data directory with that name, in ``$XDG_DATA_HOME/bulltask``."""
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"Invalid embedded server name {name!r}: use 1 to 64 letters, digits, '_', '.' or '-', and do "
                f"not start with '.' or '-'"
            )
        xdg_data_home = os.environ.get("XDG_DATA_HOME", "")
        try:
            base = Path(xdg_data_home) if Path(xdg_data_home).is_absolute() else Path.home() / ".local" / "share"
        except RuntimeError as exc:
            raise ConfigError(f"embedded:// has no directory for its data, because HOME is not set: {ADVICE}") from exc
        return cls(base / "bulltask", name)

    @classmethod
    def at(cls, directory: Path | str) -> Self:
        """Return the data directory at a path; a relative path is relative to the current directory."""
        return cls(Path(directory).expanduser().absolute())

    def directory(self, binary: ServerBinary) -> Path:
        """Return the directory for this program's files."""
        return self.root / binary.release_series / self.name

    @property
    def lock_file(self) -> Path:
        """The lock to hold while deciding whether a server, of any release series, must be started on this data."""
        return self.root / f"{self.name or 'this'}.start.lock"

    def running(self) -> tuple[Path, ServerRecord] | None:
        """Return the directory and record of the server, of any series, that is running on this data, or ``None``."""
        for directory in self._directories():
            record = ServerRecord.read(directory)
            if record is not None and record.is_running():
                return directory, record
        return None

    def newer_directories(self, binary: ServerBinary) -> list[Path]:
        """Return directories of other release series with newer data than this program's, such as after an upgrade."""
        current = self.directory(binary)
        return [other for other in self._directories() if other != current and _last_use(other) > _last_use(current)]

    def _directories(self) -> list[Path]:
        return [series / self.name for series in sorted(self.root.glob("*-*")) if (series / self.name).is_dir()]


@dataclass(frozen=True)
class ServerRecord:
    """Content of ``server.json``; trusted only if the server itself reports the same.

    Attributes:
        run_id: 40 random hexadecimal digits, which identify one run of a server.
    """

    pid: int
    port: int
    run_id: str

    @property
    def url(self) -> str:
        """The URL for clients."""
        return f"redis://{HOST}:{self.port}/0"

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """Read the last record; ``None`` if it is missing or invalid."""
        try:
            stored = json.loads((directory / "server.json").read_bytes())
            record = cls(int(stored["pid"]), int(stored["port"]), str(stored["run_id"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return record if 0 < record.port < 65536 else None

    def write(self, directory: Path) -> None:
        """Write the record atomically, so that a reader never sees a partial record."""
        draft = directory / f"server.json.{os.getpid()}"
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(directory / "server.json")

    def is_running(self) -> bool:
        """Check the run id of the server on that port: another server, or a restarted server, has a different id."""
        try:
            # The timeout is for a busy server; a closed port fails immediately.
            if send_command(self.port, "PING", timeout=5.0) != "+PONG":
                return False
            return server_info(self.port, timeout=5.0).get("run_id") == self.run_id
        except OSError:
            return False


def _last_use(directory: Path) -> float:
    """Return when a server was last started in a directory; 0 if the directory has no data."""
    files = [directory / "appendonlydir", directory / "appendonly.aof"]  # the latter is Redis 6.2's
    if not any(file.exists() for file in files):
        return 0.0
    try:
        return (directory / "server.json").stat().st_mtime
    except OSError:
        return 1.0


_MARKERS: Final = ("pyproject.toml", "setup.py", "setup.cfg", "manage.py", ".git", ".hg")
"""Files and directories at the root of a project."""


def find_project(directory: Path | None = None) -> Path:
    """Return the root of the project that contains a directory (default: the current one): the nearest with a marker.

    Without markers, the project is the directory itself. Markers in the home directory, such as a repository of
    settings, and above it do not count, because they would turn all of the user's projects into one.
    """
    try:
        start = (Path.cwd() if directory is None else directory).resolve()
    except FileNotFoundError as exc:
        raise ConfigError(
            "embedded:// is the server of the project in the current directory, which has been removed: change to "
            "another directory, or name a server, as in embedded://shop"
        ) from exc
    try:
        home = Path.home().resolve()
    except RuntimeError:  # no home directory
        home = Path("/")
    for parent in (start, *start.parents):
        if parent == home or home.is_relative_to(parent):
            break
        if any((parent / marker).exists() for marker in _MARKERS):
            return parent
    return start


def server_name(project: Path) -> str:
    """Return the name of a project's server, such as ``shop-0f3a9b2c``: projects in two directories have two."""
    readable = re.sub(r"[^A-Za-z0-9_]+", "-", project.name).strip("-")[:40] or "project"
    return f"{readable}-{hashlib.sha256(os.fsencode(project)).hexdigest()[:8]}"


_LOCAL: Final = frozenset({"127.0.0.1", "localhost"})

_lock: Final = threading.Lock()
_server: tuple[int, EmbeddedServer] | None = None


def url_in_tests(broker_url: SecretUrl) -> SecretUrl:
    """Return the URL of the server to use instead of ``broker_url``, which is usually the development server.

    A server or proxy that this process has started is used as it is.
    """
    address = urlsplit(str(broker_url))
    if address.scheme == "redis" and address.hostname in _LOCAL and address.port in STARTED_HERE:
        return broker_url
    try:
        return SecretUrl(server_of_tests().url)
    except BrokerUnavailableError as exc:
        raise BrokerUnavailableError(
            f"tests send no jobs to {broker_url}, where a worker may run them, and the server for tests did not start: "
            f"{exc}. Alternatively, set task_always_eager in the settings of the tests, or call "
            "bulltask.testing.use_server(app, url), which empties the server at that URL"
        ) from exc


def server_of_tests() -> EmbeddedServer:
    """Return the server of this test process; start it if necessary. Parallel test processes have one each."""
    global _server  # noqa: PLW0603 # one server per process
    import tempfile  # noqa: PLC0415 # takes 10 ms, and only tests need it

    with _lock:
        if _server is None or _server[0] != os.getpid() or not _server[1].running:
            # Nothing is written to the directory after the start, so it need not outlive the process, which may be
            # killed, or end without calling atexit functions, as multiprocessing's do.
            with tempfile.TemporaryDirectory(prefix="bulltask-tests-") as directory:
                server = EmbeddedServer(directory, binary=find_binary(), appendonly=False, restricted=False)
                server.start()
            atexit.register(server.stop)
            _server = os.getpid(), server
        return _server[1]


def is_server_of_tests(url: SecretUrl) -> bool:
    """Return whether a URL is that of :func:`server_of_tests`, for which no worker runs."""
    return _server is not None and _server[0] == os.getpid() and url == SecretUrl(_server[1].url)
