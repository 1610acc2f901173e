"""The environment of a soak test: servers, proxy, workers and senders; and the idle times after a fault."""

from __future__ import annotations

import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import redis

from bulltask import App
from bulltask.testing.worker import RedisServer, wait_until
from bulltask.transport.call import QueueKeys
from tests.interop.node_bridge import NodeBridge
from tests.soak.fleet import Fleet, probe_queue
from tests.soak.journal import Journal, now_ms
from tests.soak.load import AcknowledgedJobs, NodeLoad, Producer
from tests.soak.tasks import QUEUES
from tests.support.flaky_proxy import FlakyProxy

__all__ = ["LOCK_S", "PASSWORD", "Idle", "SoakEnvironment"]

PASSWORD: Final = "soak"
LOCK_S: Final = 4
TIMEOUT_S: Final = 25.0
SETTINGS: Final[dict[str, Any]] = {
    "worker_concurrency": 2,
    "lock_duration": LOCK_S,
    "stalled_interval": LOCK_S,
    # A job that is affected by many faults must not fail.
    "max_stalled_count": 100,
    "max_crashes": 100,
    "task_retry_backoff": 0.2,
}


@dataclass(frozen=True, slots=True)
class Idle:
    """The times until the first job started after Redis responded again.

    Attributes:
        fault: The name of the fault.
        since_ms: The start of the fault, in epoch milliseconds.
        seconds: The idle time of each worker and of each shared queue.
    """

    fault: str
    since_ms: int
    seconds: dict[str, float]

    @property
    def longest(self) -> tuple[float, str]:
        """The longest idle time, and the worker or queue."""
        return max((seconds, target) for target, seconds in self.seconds.items())


class SoakEnvironment:
    """All processes of a soak test; a context manager that stops them.

    Args:
        directory: The directory for files.
        workers: The number of workers; the last one connects directly to Redis, the others through the proxy.
        rate: The number of calls per second.
        seed: The seed of all random generators.
        session_id: An id in the environment of the workers' processes.
    """

    def __init__(self, directory: Path, workers: int, rate: float, seed: int, session_id: str) -> None:
        self.rng = random.Random(seed)
        self._never, self._stack = threading.Event(), ExitStack()
        enter = self._stack.enter_context
        # No fsync: the kernel keeps acknowledged writes when the server process is killed.
        extra = ["--appendfsync", "no", "--enable-debug-command", "no"]
        started = RedisServer.start(
            directory / "redis", flavor="redis", appendonly=True, password=PASSWORD, extra=extra
        )
        self.server = enter(started)
        self.url = self.server.url
        journal = enter(RedisServer.start(directory / "journal"))
        self.proxy = enter(FlakyProxy("127.0.0.1", self.server.port, seed=seed))
        self.proxied_url = f"redis://:{PASSWORD}@127.0.0.1:{self.proxy.port}/0"
        self.redis = enter(redis.Redis.from_url(self.url, decode_responses=True, socket_timeout=10))
        self.journal = Journal(journal.url)
        self._stack.callback(self.journal.close)
        self.acknowledged, self.malformed, self.stopped_ms = AcknowledgedJobs(), dict[str, str](), 0
        self.direct, self._sender = App("direct", self.url, **SETTINGS), App("soak", self.proxied_url, **SETTINGS)
        self._stack.callback(self.direct.close)
        self._stack.callback(self._sender.close)
        self.direct.queue("narrow").set_global_concurrency(2)
        urls = [self.proxied_url] * (workers - 1) + [self.url]
        self.fleet = Fleet(directory, urls, journal.url, SETTINGS, session_id)
        self._stack.callback(self.fleet.close)
        rng, database = random.Random(seed + 1), directory / "outbox.db"
        self._producer = Producer(self._sender, self.acknowledged, rate, rng, database)
        self._node = NodeLoad(enter(NodeBridge.to(self.url)), self.acknowledged) if shutil.which("node") else None
        for queue in QUEUES:  # the audit reads all events
            self.redis.hset(self.keys(queue).meta, "opts.maxLenEvents", 5_000_000)

    def start(self) -> None:
        """Start the workers, the scheduler and the senders."""
        self.fleet.wait_until_ready()
        self.direct.queue("main").schedulers.upsert("soak", every=1, name="plain", data={"ms": 1})
        self._producer.start()
        if self._node is not None:
            self._node.start()

    def stop_sending(self) -> None:
        """Stop sending; jobs that were sent continue."""
        self.stopped_ms = now_ms()
        self._producer.stop()
        self._producer.send_remaining_rows()
        if self._node is not None:
            self._node.stop()
        self.direct.queue("main").schedulers.remove("soak")

    def pause(self, seconds: float) -> None:
        """Wait during a fault."""
        self._never.wait(seconds)

    def random_child(self) -> int:
        """Return the process id of a random child of a random worker."""
        children = [pid for worker in self.fleet.workers for pid in worker.children]
        return self.rng.choice(children)

    def keys(self, queue: str) -> QueueKeys:
        """Return the keys of a queue."""
        return QueueKeys("bull", f"{{{queue}}}", queue)

    def wait_until_redis_replies(self) -> int:
        """Wait until Redis accepts writes, directly and through the proxy; return the time in epoch milliseconds."""

        def replies() -> bool:
            for url in (self.url, self.proxied_url):
                with suppress(redis.RedisError), redis.Redis.from_url(url, socket_timeout=1, retry=None) as client:
                    client.ping()
                    client.set("soak:reply", 1)
                    continue
                return False
            return True

        wait_until(replies, 30, "a reply from Redis")
        return now_ms()

    def idle_after(self, fault: str, since_ms: int) -> Idle:
        """Send a job to every worker and every queue, and measure when the first one starts."""
        answered_ms = self.wait_until_redis_replies()
        probes = {}
        for index in range(len(self.fleet.workers)):
            probes[f"worker {index}"] = self.direct.send_task("plain", queue=probe_queue(index)).id
        for queue in QUEUES:
            self.direct.send_task("plain", queue=queue)
        with ThreadPoolExecutor(len(probes) + len(QUEUES)) as pool:
            pending = {
                target: pool.submit(self.journal.wait_for_start, job, TIMEOUT_S) for target, job in probes.items()
            }
            pending |= {
                f"queue {name}": pool.submit(self.journal.first_start, name, answered_ms, TIMEOUT_S)
                for name in QUEUES[:2]
            }
            at_ms = {target: found.result() for target, found in pending.items()}
        return Idle(
            fault,
            since_ms,
            {target: TIMEOUT_S if at is None else max(0, at - answered_ms) / 1000 for target, at in at_ms.items()},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
