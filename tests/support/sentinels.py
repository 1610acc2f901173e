"""A primary, a replica and three sentinels: real servers on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import redis

from bulltask.embedded.server import Flavor, find_binary, pick_port
from bulltask.testing.worker import RedisServer, wait_until

__all__ = ["Sentinels"]

SERVICE = "shop.main"
_QUICK = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")
_PASSWORD = "sentinel-secret"


class Sentinels:
    """Two servers, one of which is the primary, and the sentinels that monitor it; see `Sentinels.started`.

    Args:
        servers: The servers.
        ports: The ports of the sentinels.
        processes: Their process ids.
    """

    def __init__(self, servers: Sequence[RedisServer], ports: Sequence[int], processes: Sequence[int]) -> None:
        self._servers, self._ports, self._processes = servers, ports, processes
        self._asked = [redis.Redis(port=port, password=_PASSWORD, decode_responses=True) for port in ports]

    @classmethod
    @contextmanager
    def started(cls, directory: Path, flavor: Flavor, down_after_ms: int = 500) -> Iterator[Self]:
        """Start the servers, wait until each sentinel knows the others and the replica, and stop them at the end.

        Args:
            directory: The directory for the files of the servers and sentinels.
            flavor: Redis or Valkey.
            down_after_ms: After this time without a reply, the sentinels replace the primary.
        """
        with ExitStack() as stack:
            primary = stack.enter_context(RedisServer.start(directory / "a", flavor=flavor, extra=_QUICK))
            follow = ("--replicaof", "127.0.0.1", str(primary.port))
            replica = stack.enter_context(RedisServer.start(directory / "b", flavor=flavor, extra=[*_QUICK, *follow]))
            stack.callback(cls._resume, [primary.pid, replica.pid])
            ports: list[int] = []
            while len(ports) < 3:
                if (port := pick_port()) not in ports:
                    ports.append(port)
            processes = []
            for port in ports:
                process = _start(directory / f"sentinel-{port}", port, primary.port, flavor, down_after_ms)
                processes.append(process.pid)
                stack.callback(process.wait)
                stack.callback(process.kill)
            sentinels = cls([primary, replica], ports, processes)
            stack.callback(sentinels.close)
            sentinels.wait_until_ready()
            yield sentinels

    @property
    def url(self) -> str:
        """The broker URL."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        return f"redis+sentinel://{hosts}/{SERVICE}?db=0&sentinel_password={_PASSWORD}"

    @property
    def pids(self) -> set[int]:
        """The ids of all processes."""
        return {*self._processes, *(server.pid for server in self._servers)}

    @property
    def primary(self) -> RedisServer:
        """The server that a majority of the sentinels report as the primary."""
        ports = sorted(self._primary_port(sentinel) for sentinel in self._asked)
        return next(server for server in self._servers if server.port == ports[1])

    def flush(self) -> None:
        """Delete all keys."""
        with redis.Redis(port=self.primary.port) as plain:
            plain.flushall()

    def fail_over(self) -> RedisServer:
        """Make the replica the primary while both servers work; return the new primary."""
        old = self.primary
        self._asked[0].execute_command("SENTINEL", "FAILOVER", SERVICE)
        return self.wait_for_failover(old)

    @contextmanager
    def events(self) -> Iterator[Sequence[tuple[float, str]]]:
        """Record the time and the name of each event of the sentinels inside the ``with`` block."""
        found: list[tuple[float, str]] = []
        with ExitStack() as stack:
            for sentinel in self._asked:
                events = stack.enter_context(sentinel.pubsub())
                # redis-py calls the handler on the thread
                events.psubscribe(**{"*": lambda event: found.append((time.time(), event["channel"]))})
                thread = events.run_in_thread(sleep_time=0.05)
                stack.callback(thread.join)
                stack.callback(thread.stop)
            yield found

    def set_user(self, name: str, *rules: str) -> None:
        """Create a user on each sentinel."""
        for sentinel in self._asked:
            sentinel.execute_command("ACL", "SETUSER", name, *rules)

    def wait_for_failover(self, old: RedisServer) -> RedisServer:
        """Wait until a majority of the sentinels report a primary other than ``old``; return it."""
        wait_until(lambda: self.primary is not old, 60.0, "another primary")
        return self.primary

    def stop_replying(self, server: RedisServer) -> None:
        """Suspend a server, as if the network no longer delivered its packets to anyone."""
        os.kill(server.pid, signal.SIGSTOP)

    def resume(self, server: RedisServer) -> None:
        """Continue a suspended server, which does not know what happened meanwhile."""
        os.kill(server.pid, signal.SIGCONT)

    def repair(self) -> None:
        """Restart a server that was killed, as a replica, and wait until another failover is possible.

        The sentinels would wait for eight seconds before they make a server a replica.
        """
        primary = self.primary
        for server in self._servers:
            if not server.running:
                server.restart()
            if server is not primary:
                with redis.Redis(port=server.port) as plain:
                    plain.execute_command("REPLICAOF", "127.0.0.1", primary.port)
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until a failover is possible."""
        wait_until(lambda: all(map(self._is_ready, self._asked)), 60.0, "the sentinels")
        with redis.Redis(port=self.primary.port) as plain:
            wait_until(lambda: _is_online(plain.info("replication")), 60.0, "the replica")
            plain.set("sentinels", "ready", px=1)  # WAIT covers only what its connection has written
            plain.wait(1, 10_000)

    def close(self) -> None:
        """Close the connections to the sentinels."""
        for sentinel in self._asked:
            sentinel.close()

    def _is_ready(self, sentinel: Any) -> bool:
        try:
            sentinel.execute_command("SENTINEL", "CKQUORUM", SERVICE)
            state = sentinel.sentinel_master(SERVICE)
            replicas = [replica["flags"] for replica in sentinel.sentinel_slaves(SERVICE)]
        except redis.RedisError:
            return False
        return (state["flags"], state["num-other-sentinels"], replicas) == ("master", 2, ["slave"])

    @staticmethod
    def _primary_port(sentinel: Any) -> int:
        return int(sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])

    @staticmethod
    def _resume(pids: Sequence[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _is_online(info: Any) -> bool:
    """Return whether a primary's only replica has all its data; one that still loads it is connected, too."""
    return bool(info["connected_slaves"] == 1 and info["slave0"]["state"] == "online")


def _start(
    directory: Path, port: int, primary_port: int, flavor: Flavor, down_after_ms: int
) -> subprocess.Popen[bytes]:
    directory.mkdir(parents=True)
    file = directory / "sentinel.conf"
    file.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {directory}\nrequirepass {_PASSWORD}\nsentinel sentinel-pass {_PASSWORD}\n"
        f"sentinel monitor {SERVICE} 127.0.0.1 {primary_port} 2\n"
        f"sentinel down-after-milliseconds {SERVICE} {down_after_ms}\nsentinel failover-timeout {SERVICE} 3000\n"
    )
    return subprocess.Popen([find_binary(flavor).path, file, "--sentinel"], stdout=subprocess.DEVNULL)
