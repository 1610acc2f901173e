"""Helpers to start a server: arguments, a free port, its directory, and the wait until it is ready."""

from __future__ import annotations

import hashlib
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from bulltask.clock import mono_s
from bulltask.embedded.binary import ServerBinary
from bulltask.embedded.probe import HOST, send_command, server_info
from bulltask.errors import BrokerUnavailableError
from bulltask.process import CHILD_MARK

if sys.platform != "win32":
    import fcntl

__all__ = [
    "ADVICE",
    "MAX_PORT_ATTEMPTS",
    "PortTakenError",
    "ServerLog",
    "lock",
    "lock_directory",
    "open_lock",
    "pick_port",
    "restrict_clients",
    "server_command",
    "server_environment",
    "wait_for_exit",
    "wait_until_ready",
]

MAX_PORT_ATTEMPTS = 10  # another process may bind a port between pick_port() and the server's bind

_CLIENT_RULES = (
    "on nopass ~* &* +@all -@admin -migrate +acl|whoami +client +config|get +lastsave +latency +monitor +role +slowlog"
)
"""What clients without a password may do: everything with the data, nothing with the server. New administrative
commands of future servers are forbidden, too."""

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortTakenError(BrokerUnavailableError):
    """Another process is listening on the port."""


def server_command(
    binary: ServerBinary, data_dir: Path, port: int, *, appendonly: bool = True, extra: Sequence[str] = ()
) -> list[str]:
    """Return the command line of a server: loopback only, no eviction, every write in the append-only file.

    The paths are absolute, because the server changes into its directory before it opens its log.

    Args:
        binary: The program.
        data_dir: Absolute path of the directory, which exists.
        port: TCP port on 127.0.0.1.
        appendonly: False keeps everything in memory only.
        extra: Further arguments; they come last, so they take precedence.
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

    Args:
        data_dir: The directory, for whose server the caller holds the lock. ``admin.password`` in it is replaced.

    Raises:
        BrokerUnavailableError: The file cannot be written.
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

    Raises:
        BrokerUnavailableError: No port is free.
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
    """Open a lock file; create it and its directory, for their owner only, if missing.

    Raises:
        BrokerUnavailableError: The directory cannot be created or written, or it belongs to another user.
    """
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
    a crash. Two servers on one append-only file would corrupt it.

    Args:
        data_dir: The directory.
        timeout: Seconds to wait for a server that is stopping.

    Raises:
        BrokerUnavailableError: A running server is using the directory, or it cannot be written.
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
    """Wait until the process ``pid`` replies to ``PING`` with ``PONG``, and return its run id.

    Args:
        port: TCP port on 127.0.0.1.
        pid: Process id of the server; another server on that port may also reply ``PONG``.
        ended: Waits up to the given number of seconds for the server to exit, and returns whether it has.
        password: The server's password.
        timeout: Seconds; a large append-only file takes a while to load.

    Returns:
        The 40 hexadecimal digits of ``run_id``; empty if the server has exited.

    Raises:
        BrokerUnavailableError: The server neither replied nor exited in time.
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
