"""Faults of servers, on each topology: what operators plan, and what they do not, while jobs are sent and run.

A round starts a worker, sends jobs to each queue one after another, injects one fault, and goes on sending. It then
counts the jobs that were sent and have never run, and the longest time without a start in each queue.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

import redis

from bulltask import App
from bulltask.embedded.server import Flavor
from bulltask.errors import BrokerError
from bulltask.testing.worker import RedisServer, wait_until
from tests.support.certificates import Certificates, TlsServer
from tests.support.redis_cluster import Cluster
from tests.support.sentinels import Sentinels
from tests.support.worker import Worker

__all__ = ["FAULTS", "Measured", "measure", "problems_of", "rows"]

LOCK_S: Final = 2
STILL_S: Final = 4.0
"""How long a primary stands still, at least: longer than a lock lasts, and until it is replaced if it has a replica."""

_BEFORE_S: Final = 0.7
_AFTER_S: Final = 2.0
_TIMEOUT_S: Final = 60.0
_SOURCE: Final = """
import time

@app.task(bind=True, name="work")
def work(self):
    line = f"{self.request.queue} {self.request.id} {time.monotonic()}\\n".encode()
    descriptor = os.open(os.environ["STARTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line)
    os.close(descriptor)
    time.sleep(0.001)
"""


class Servers(Protocol):
    """The servers of a topology, whose faults are the methods that `FAULTS` names."""

    url: str
    queues: Sequence[str]
    settings: dict[str, Any]


class _Single:
    queues, settings = ("jobs",), dict[str, Any]()

    def __init__(self, server: RedisServer, directory: Path) -> None:
        self.server, self.url, self._directory = server, server.url, directory

    def close_connections(self) -> None:
        _close_connections(self.server.port)

    def stand_still(self) -> None:
        _stand_still(self.server.pid)

    def kill(self) -> None:
        self.server.kill()
        self.server.restart()


class _Password(_Single):
    def __init__(self, server: RedisServer, directory: Path) -> None:
        super().__init__(server, directory)
        self.url = f"redis://jobs@127.0.0.1:{server.port}/0"
        self.settings = {"broker_credential_provider": f"file://{directory / 'password'}"}
        self._number = 0
        self._change()

    def _change(self) -> None:
        self._number += 1
        password = f"password-{self._number}"
        with redis.Redis(port=self.server.port) as plain:
            (self._directory / "password").write_text(password)
            plain.execute_command("ACL SETUSER", "jobs", "reset", "on", f">{password}", "~*", "&*", "+@all")

    def change_password(self) -> None:
        self._change()
        with redis.Redis(port=self.server.port) as plain:
            plain.execute_command("CLIENT", "KILL", "USER", "jobs")


class _Tls(_Single):
    def __init__(self, server: TlsServer, certificates: Certificates, directory: Path) -> None:
        super().__init__(server.plain, directory)
        self.url, self._certificates = server.url, certificates

    def change_certificates(self) -> None:
        self._certificates.renew()
        with redis.Redis(port=self.server.port) as plain:
            plain.config_set("tls-cert-file", str(self._certificates.file("server.pem")))
        _close_connections(self.server.port)


class _Sentinel:
    queues, settings = ("jobs",), dict[str, Any]()

    def __init__(self, sentinels: Sentinels) -> None:
        self.sentinels, self.url = sentinels, sentinels.url

    def close_connections(self) -> None:
        _close_connections(self.sentinels.primary.port)

    def fail_over(self) -> None:
        self.sentinels.fail_over()

    def stand_still(self) -> None:
        old = self.sentinels.primary
        _stand_still(old.pid, lambda: self.sentinels.primary is not old)

    def kill(self) -> None:
        old = self.sentinels.primary
        old.kill()
        self.sentinels.wait_for_failover(old)

    def repair(self) -> None:
        # The sentinels begin no other failover within twice the failover-timeout, unless they are told to.
        threading.Event().wait(7)
        self.sentinels.repair()


class _Cluster:
    def __init__(self, cluster: Cluster) -> None:
        self.settings: dict[str, Any] = {}
        self.cluster, self.url, self.queues = cluster, cluster.broker_url, cluster.queues()
        self._slot = cluster.slot(self.queues[0])
        self._neighbour = next(it for it in (self._slot - 1, self._slot + 1) if cluster.owner(it) == self._owner)

    @property
    def _owner(self) -> int:
        return self.cluster.owner(self._slot)

    @property
    def _home(self) -> int:
        """The node of the slots around this one, which are not moved."""
        return self.cluster.owner(self._neighbour)

    def close_connections(self) -> None:
        for server in self.cluster.servers:
            _close_connections(server.port)

    def _fail_over(self, *how: str) -> None:
        replica = self._replica()
        self.cluster.clients[replica].execute_command("CLUSTER FAILOVER", *how)
        self.cluster.wait_for_owner(self._slot, replica)

    def fail_over(self) -> None:
        self._fail_over()

    def fail_over_force(self) -> None:
        self._fail_over("FORCE")

    def fail_over_takeover(self) -> None:
        self._fail_over("TAKEOVER")

    def move_key_by_key(self) -> None:
        to = self._other()
        self.cluster.begin_move(self._slot, to)
        for _ in range(20):  # a slot with more keys takes longer
            self.cluster.move_keys(self._slot, to, 10)
            threading.Event().wait(0.1)
        while self.cluster.move_keys(self._slot, to):
            pass
        self.cluster.end_move(self._slot, to)
        self.cluster.wait_for_owner(self._slot, to)

    def move_at_once(self) -> None:
        self.cluster.move_atomically(self._slot, self._other())

    def stand_still(self) -> None:
        old = self._owner
        _stand_still(self.cluster.servers[old].pid, lambda: self._owner_of_others(old) != old)

    def kill(self) -> None:
        old = self._owner
        self.cluster.servers[old].kill()
        wait_until(lambda: self._owner_of_others(old) != old, 60, "another primary")
        self.cluster.servers[old].restart()

    def repair(self) -> None:
        if self._owner != self._home:  # otherwise, a fault of this node would affect another queue, too
            self.cluster.begin_move(self._slot, self._home)
            while self.cluster.move_keys(self._slot, self._home):
                pass
            self.cluster.end_move(self._slot, self._home)
            self.cluster.wait_for_owner(self._slot, self._home)
        wait_until(lambda: self._replica() >= 0, 60, "a replica")

    def _owner_of_others(self, dead: int) -> int:
        ranges: Any = self.cluster.clients[min({0, 1} - {dead})].execute_command("CLUSTER", "SLOTS")
        port = next(int(owner[1]) for first, last, owner, *_ in ranges if first <= self._slot <= last)
        return next(number for number, server in enumerate(self.cluster.servers) if server.port == port)

    def _other(self) -> int:
        primaries = {self.cluster.owner(self.cluster.slot(queue)) for queue in self.queues}
        return min(primaries - {self._owner})

    def _replica(self) -> int:
        """Return the number of a replica of the owner that has all its data, -1 if there is none."""
        owner = self.cluster.servers[self._owner].port
        for number, client in enumerate(self.cluster.clients):
            with suppress(redis.RedisError):
                info: Any = client.info("replication")
                if info["role"] == "slave" and info["master_port"] == owner and info["master_link_status"] == "up":
                    return number
        return -1


def _close_connections(port: int) -> None:
    with redis.Redis(port=port) as plain:
        for _ in range(3):
            plain.execute_command("CLIENT", "KILL", "TYPE", "normal")
            threading.Event().wait(0.2)


def _stand_still(pid: int, is_replaced: Callable[[], bool] = lambda: True) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        threading.Event().wait(STILL_S)
        wait_until(is_replaced, 60, "another primary")
    finally:
        os.kill(pid, signal.SIGCONT)


FAULTS: Final[dict[str, dict[str, tuple[str, bool]]]] = {
    "one server": {
        "connections closed": ("close_connections", True),
        "the server stands still and comes back": ("stand_still", True),
        "`kill -9` of the server, restarted": ("kill", True),
    },
    "one server, password": {"password changed": ("change_password", True)},
    "one server, TLS": {"certificates changed": ("change_certificates", True)},
    "Sentinel": {
        "connections closed": ("close_connections", True),
        "`SENTINEL FAILOVER`": ("fail_over", True),
        "the primary stands still and comes back": ("stand_still", True),
        "`kill -9` of the primary": ("kill", False),
    },
    "Cluster": {
        "connections closed": ("close_connections", True),
        "slot moved key by key": ("move_key_by_key", True),
        "slot moved at once": ("move_at_once", True),
        "`CLUSTER FAILOVER`": ("fail_over", True),
        "`CLUSTER FAILOVER FORCE`": ("fail_over_force", False),
        "`CLUSTER FAILOVER TAKEOVER`": ("fail_over_takeover", False),
        "a primary stands still and comes back": ("stand_still", False),
        "`kill -9` of a primary": ("kill", False),
    },
}
"""The faults of each topology: the method, and whether no job may be lost. If the old primary does not wait for its
replica, a failover may lose the last writes."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What happened in a round.

    Attributes:
        jobs: How many sends have returned.
        lost: How many of these jobs have neither run nor are still in Redis.
        repeated: How many attempts there were in addition to the first ones.
        pause_s: The longest time without a start of a job in the affected queue.
        others_s: The longest time without a start of a job in another queue; ``None`` if there is none.
        log: The worker's log.
    """

    topology: str
    fault: str
    jobs: int
    lost: int
    repeated: int
    pause_s: float
    others_s: float | None
    log: str = field(repr=False)


def measure(flavor: Flavor, only: str, repetitions: int, report: Callable[[str], object]) -> Iterator[Measured]:
    """Inject each fault ``repetitions`` times; yield what happened."""
    for topology, faults in FAULTS.items():
        chosen = {name: method for name, (method, _) in faults.items() if only in f"{topology}: {name}"}
        if not chosen:
            continue
        with tempfile.TemporaryDirectory(prefix="bulltask-topology-") as name, _started(topology, name, flavor) as it:
            for fault, method in chosen.items():
                if method == "move_at_once" and not it.cluster.moves_atomically:
                    report(f"{topology}: this server cannot move slots at once")
                    continue
                for number in range(repetitions):
                    if hasattr(it, "repair"):
                        it.repair()
                    yield _round(topology, fault, it, getattr(it, method), Path(name, f"{method}-{number}"))


@contextmanager
def _started(topology: str, name: str, flavor: Flavor) -> Iterator[Any]:
    directory = Path(name)
    with ExitStack() as stack:
        if topology == "Cluster":
            started = Cluster.started(directory / "cluster", flavor, replicas=1, node_timeout_ms=1_500)
            yield _Cluster(stack.enter_context(started))
        elif topology == "Sentinel":
            yield _Sentinel(stack.enter_context(Sentinels.started(directory / "sentinels", flavor, 1_000)))
        elif topology == "one server, TLS":
            certificates = Certificates(directory)
            server = TlsServer(directory / "server", certificates)
            stack.enter_context(server.plain)
            yield _Tls(server, certificates, directory)
        else:
            # As in production: so that nothing is lost when the server is killed.
            durable = ("--appendonly", "yes", "--appendfsync", "always")
            plain = stack.enter_context(RedisServer.start(directory / "server", flavor=flavor, extra=durable))
            yield (_Password if topology.endswith("password") else _Single)(plain, directory)


def _round(topology: str, fault: str, servers: Servers, inject: Callable[[], object], directory: Path) -> Measured:
    directory.mkdir()
    starts, settings = directory / "starts", {"broker_url": servers.url, **servers.settings}
    tuned = {"lock_duration": LOCK_S, "stalled_interval": 1, "max_stalled_count": 10, "worker_concurrency": 4}
    options = ["-Q", ",".join(servers.queues)]
    worker = Worker(directory, _SOURCE, options=options, settings=settings | tuned, environ={"STARTS": str(starts)})
    app, timer = App("sender", **settings), threading.Event()
    try:
        worker.wait_for_line("Worker started")
        with _sending(app, servers.queues) as ids:
            wait_until(lambda: {line[0] for line in _lines(starts)} == {*servers.queues}, _TIMEOUT_S, "jobs that run")
            timer.wait(_BEFORE_S)
            injected = time.monotonic()
            inject()
            timer.wait(_AFTER_S)
        ended = time.monotonic()
        _wait_until_run(app, servers.queues, starts, ids)
        lines = _lines(starts)
        pauses = [_pause(lines, queue, injected, ended) for queue in servers.queues]
        found = {line[1] for line in lines}
        lost = len({*ids} - found - _left(app, servers.queues))
        others = max(pauses[1:], default=None)
        return Measured(topology, fault, len(ids), lost, len(lines) - len(found), pauses[0], others, worker.log)
    finally:
        worker.close()
        for queue in servers.queues:
            with suppress(BrokerError), app.queue(queue) as opened:
                opened.obliterate(force=True)
        app.close()


@contextmanager
def _sending(app: App, queues: Sequence[str]) -> Iterator[list[str]]:
    """Send jobs to each queue inside the ``with`` block; yield the ids of those whose sends have returned."""
    sent, done = list[str](), threading.Event()

    def send(queue: str) -> None:
        while not done.wait(0.003):
            with suppress(BrokerError):  # nothing is promised
                sent.append(app.send_task("work", queue=queue).id)

    threads = [threading.Thread(target=send, args=(queue,)) for queue in queues]
    for thread in threads:
        thread.start()
    try:
        yield sent
    finally:
        done.set()
        for thread in threads:
            thread.join()


def _wait_until_run(app: App, queues: Sequence[str], starts: Path, ids: Sequence[str]) -> None:
    """Wait until all jobs have run, or no job is left that could still run."""
    missing = {*ids}

    def is_complete() -> bool:
        missing.difference_update(line[1] for line in _lines(starts))
        return not missing or not missing & _left(app, queues)

    with suppress(TimeoutError):
        wait_until(is_complete, _TIMEOUT_S)


def _left(app: App, queues: Sequence[str]) -> set[str]:
    """Return the jobs that have not ended."""
    found = set[str]()
    for name in queues:
        with app.queue(name) as queue:
            found |= {job.id for job in [*queue.get_waiting(), *queue.get_active(), *queue.get_delayed()]}
    return found


def _lines(starts: Path) -> list[list[str]]:
    """Return the queue, the id and the time of each start."""
    if not starts.exists():
        return []
    return [line.split() for line in starts.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _pause(lines: Sequence[Sequence[str]], queue: str, began: float, ended: float) -> float:
    times = sorted(time for _, _, text in (line for line in lines if line[0] == queue) if (time := float(text)) > began)
    bounds = [began, *times] if times and times[-1] >= ended else [began, *times, ended]
    return max(after - before for before, after in pairwise(bounds))


def problems_of(measured: Measured) -> list[str]:
    """Return what a fault must not do: lose a job although the topology can prevent it, or end a child."""
    where, problems = f"{measured.topology}: {measured.fault}", list[str]()
    if measured.lost and FAULTS[measured.topology][measured.fault][1]:
        problems.append(f"{where}: {measured.lost} of {measured.jobs} jobs were lost")
    if '"Child died"' in measured.log:
        problems.append(f"{where}: a child has died")
    return problems


def rows(found: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return a row of ``results.json`` for each topology and fault."""
    groups: dict[tuple[str, str], list[Measured]] = {}
    for measured in found:
        groups.setdefault((measured.topology, measured.fault), []).append(measured)
    return [
        {
            "topology": topology,
            "fault": fault,
            "faults": len(group),
            "jobs": sum(item.jobs for item in group),
            "lost": sum(item.lost for item in group),
            "repeated": sum(item.repeated for item in group),
            "pause_s": round(max(item.pause_s for item in group), 2),
            "others_s": max((round(it.others_s, 2) for it in group if it.others_s is not None), default=None),
        }
        for (topology, fault), group in groups.items()
    ]
