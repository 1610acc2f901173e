"""What the soak runs on: servers, the proxy, workers, senders; and how long a worker takes to go on after a fault."""

from __future__ import annotations

import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import redis

from bulltask import App
from bulltask.testing.flaky import FlakyProxy
from bulltask.testing.server import RedisServer
from bulltask.testing.wait import wait_until
from bulltask.transport.keys import QueueKeys
from tests.interop.node_bridge import NodeBridge
from tests.soak.fleet import Fleet, probe_queue
from tests.soak.journal import Journal, now_ms
from tests.soak.load import Ledger, NodeLoad, Producer
from tests.soak.tasks import QUEUES

__all__ = ["LOCK_S", "PASSWORD", "Idle", "Scene"]

PASSWORD: Final = "soak"
LOCK_S: Final = 4
PATIENCE_S: Final = 25.0
SETTINGS: Final = {
    "worker_concurrency": 2,
    "lock_duration": LOCK_S,
    "stalled_interval": LOCK_S,
    # A job that was innocently in the way of many faults is not to fail for that.
    "max_stalled_count": 100,
    "max_crashes": 100,
    "task_retry_backoff": 0.2,
}


@dataclass(frozen=True, slots=True)
class Idle:
    """How long it took until the first job began after Redis answered.

    Attributes:
        fault: after which fault.
        since_ms: when that fault began, epoch milliseconds.
        seconds: by what was waited for: a worker, or a queue of all workers.
    """

    fault: str
    since_ms: int
    seconds: dict[str, float]

    @property
    def longest(self) -> tuple[float, str]:
        """The longest of them, and whose it is."""
        return max((seconds, who) for who, seconds in self.seconds.items())


class Scene:
    """Responsible for everything that runs; a context manager.

    Args:
        directory: for files.
        workers: how many; the last one goes straight to Redis, the others through the proxy.
        rate: calls in a second.
        seed: of all chance.
        mark: in the environment of the workers' processes.
    """

    def __init__(self, directory: Path, workers: int, rate: float, seed: int, mark: str) -> None:
        self.rng = random.Random(seed)
        self._never, self._stack = threading.Event(), ExitStack()
        enter = self._stack.enter_context
        # Never held back for a sync: what was acknowledged is in the kernel's hands when the server is killed.
        extra = ["--appendfsync", "no", "--enable-debug-command", "no"]
        started = RedisServer.start(
            directory / "redis", flavour="redis", appendonly=True, password=PASSWORD, extra=extra
        )
        self.server = enter(started)
        self.url = self.server.url
        journal = enter(RedisServer.start(directory / "journal"))
        self.proxy = enter(FlakyProxy("127.0.0.1", self.server.port, seed=seed))
        self.proxied_url = f"redis://:{PASSWORD}@127.0.0.1:{self.proxy.port}/0"
        self.redis = enter(redis.Redis.from_url(self.url, decode_responses=True, socket_timeout=10))
        self.journal = Journal(journal.url)
        self._stack.callback(self.journal.close)
        self.ledger, self.malformed, self.stopped_ms = Ledger(), dict[str, str](), 0
        self.direct, self._sender = App("direct", self.url, **SETTINGS), App("soak", self.proxied_url, **SETTINGS)
        self._stack.callback(self.direct.close)
        self._stack.callback(self._sender.close)
        self.direct.queue("narrow").set_global_concurrency(2)
        urls = [self.proxied_url] * (workers - 1) + [self.url]
        self.fleet = Fleet(directory, urls, journal.url, SETTINGS, mark)
        self._stack.callback(self.fleet.close)
        self._producer = Producer(self._sender, self.ledger, rate, random.Random(seed + 1))
        self._node = NodeLoad(enter(NodeBridge.to(self.url)), self.ledger) if shutil.which("node") else None
        for queue in QUEUES:  # all events are read in the end
            self.redis.hset(self.keys(queue).meta, "opts.maxLenEvents", 5_000_000)

    def start(self) -> None:
        """Let everything run."""
        self.fleet.wait_until_ready()
        self.direct.queue("main").schedulers.upsert("soak", every=1, name="plain", data={"ms": 1})
        self._producer.start()
        if self._node is not None:
            self._node.start()

    def stop_sending(self) -> None:
        """End what is sent; what was sent goes on."""
        self.stopped_ms = now_ms()
        self._producer.stop()
        if self._node is not None:
            self._node.stop()
        self.direct.queue("main").schedulers.remove("soak")

    def pause(self, seconds: float) -> None:
        """Let a fault last."""
        self._never.wait(seconds)

    def some_child(self) -> int:
        """Process id of any child of any worker."""
        children = [pid for worker in self.fleet.workers for pid in worker.children]
        return self.rng.choice(children)

    def keys(self, queue: str) -> QueueKeys:
        """The keys of a queue."""
        return QueueKeys("bull", f"{{{queue}}}", queue)

    def wait_until_redis_answers(self) -> int:
        """Wait until Redis takes writes, straight and through the proxy; return when it did, epoch milliseconds."""

        def answers() -> bool:
            for url in (self.url, self.proxied_url):
                with suppress(redis.RedisError), redis.Redis.from_url(url, socket_timeout=1, retry=None) as client:
                    client.ping()
                    client.set("soak:answered", 1)
                    continue
                return False
            return True

        wait_until(answers, 30, "an answer of Redis")
        return now_ms()

    def idle_after(self, fault: str, since_ms: int) -> Idle:
        """Give every worker and every queue a job, and see when the first one begins."""
        answered_ms = self.wait_until_redis_answers()
        probes = {}
        for index in range(len(self.fleet.workers)):
            probes[f"worker {index}"] = self.direct.send_task("plain", queue=probe_queue(index)).id
        for queue in QUEUES:
            self.direct.send_task("plain", queue=queue)
        with ThreadPoolExecutor(len(probes) + len(QUEUES)) as pool:
            begun = {who: pool.submit(self.journal.wait_for_start, job, PATIENCE_S) for who, job in probes.items()}
            begun |= {
                f"queue {name}": pool.submit(self.journal.first_start, name, answered_ms, PATIENCE_S)
                for name in QUEUES[:2]
            }
            at_ms = {who: found.result() for who, found in begun.items()}
        return Idle(
            fault,
            since_ms,
            {who: PATIENCE_S if at is None else max(0, at - answered_ms) / 1000 for who, at in at_ms.items()},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
