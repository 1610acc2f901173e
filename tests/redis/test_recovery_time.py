"""How long it takes until a killed worker's job is waiting again: what the page Configuration promises."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import pytest
import redis

from bulltask import App
from bulltask.events import Bus
from bulltask.transport.call import FetchedJob
from bulltask.transport.scripts.move import FetchOptions, move_to_active, renew_locks
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.locks import StalledCheck

pytestmark = pytest.mark.redis

NOISE_MS = 500
"""Real time that passes during a test also expires locks."""


class Simulation:
    """A killed worker, other workers, and a clock that the test advances: keys in Redis expire with it."""

    def __init__(self, url: str, client: redis.Redis, apps: ExitStack) -> None:
        self._url, self._client, self._apps = url, client, apps
        self.now_ms = 0
        self._timers: list[tuple[int, int, int, Callable[[], object]]] = []

    def app(self, lock_s: float, interval_s: float) -> App:
        app = App("tested", self._url, lock_duration=lock_s, stalled_interval=interval_s)
        self._apps.callback(app.close)
        return app

    def every(self, interval_ms: int, first_ms: int, until_ms: int, call: Callable[[], object]) -> None:
        """Call a function at this interval."""
        self._timers.append((first_ms, interval_ms, until_ms, call))

    def check_stalled(self, app: App, first_ms: int, until_ms: int = 10**9) -> None:
        """Start the stalled checks of a worker."""
        bus, client = Bus(), app._broker.client()
        self._apps.callback(client.close)
        backoff = ReconnectBackoff(bus, app._config)
        check = StalledCheck(app._broker, [app._broker.keys("default")], lambda _: True, client, bus, backoff)
        self.every(check.interval_ms, first_ms, until_ms, lambda: check.tick(0, 0))

    def run_until_waiting(self, limit_ms: int) -> int:
        """Advance the clock until no job is active; return the time."""
        while self._client.llen("bull:{default}:active"):
            self._timers.sort(key=lambda timer: timer[0])
            due_ms, interval_ms, until_ms, call = self._timers.pop(0)
            self._advance(due_ms - self.now_ms)
            assert self.now_ms < limit_ms, "not recovered"
            if due_ms < until_ms:
                call()
                self._timers.append((due_ms + interval_ms, interval_ms, until_ms, call))
        return self.now_ms

    def _advance(self, ms: int) -> None:
        self.now_ms += ms
        for key in self._client.scan_iter():
            left_ms = self._client.pttl(key)
            if left_ms > 0:
                self._client.pexpire(key, left_ms - ms)


@pytest.fixture
def simulate(broker_url: str, redis_client: redis.Redis) -> Iterator[Callable[[], Simulation]]:
    with ExitStack() as apps:

        def start() -> Simulation:
            redis_client.flushall()
            return Simulation(broker_url, redis_client, apps)

        yield start


@pytest.mark.parametrize(("lock_s", "interval_s"), [(30, 30), (3, 2), (5, 5), (20, 3), (2, 10), (60, 15)])
def test_the_job_of_a_killed_worker_waits_again_within_the_promised_time(
    simulate: Callable[[], Simulation],
    rng: random.Random,
    lock_s: int,
    interval_s: int,
) -> None:
    """Short workers of the queue, which may have another interval, come and go around the time of the kill."""
    for other_interval_s in (None, 30, 300):
        simulation = simulate()
        lock_ms, interval_ms, killed_ms = (
            lock_s * 1000,
            interval_s * 1000,
            2 * interval_s * 1000 + rng.randrange(lock_s * 1000),
        )
        app = simulation.app(lock_s, interval_s)
        app.send_task("work")
        client, keys = app._broker.client(), app._broker.keys("default")
        client.connect()
        lock = FetchOptions("t", lock_ms, "killed")
        fetched = client.run(move_to_active(keys, lock, app._broker.clock.now_ms()))
        assert isinstance(fetched, FetchedJob)
        renewal = renew_locks(keys, [("t", fetched.job_id)], lock_ms)
        simulation.every(lock_ms // 4, lock_ms // 4, killed_ms, partial(client.run, renewal))
        simulation.check_stalled(app, 0, killed_ms)
        simulation.check_stalled(app, rng.randrange(killed_ms - interval_ms, killed_ms + 1))
        if other_interval_s is not None:
            other = simulation.app(lock_s, other_interval_s)
            for started_ms in rng.sample(range(killed_ms - interval_ms, killed_ms + interval_ms), 4):
                simulation.check_stalled(other, started_ms, started_ms + 1)
        waited_ms = simulation.run_until_waiting(killed_ms + 400_000) - killed_ms
        client.close()
        assert lock_ms * 3 // 4 - NOISE_MS <= waited_ms <= max(3 * interval_ms, lock_ms + interval_ms)
