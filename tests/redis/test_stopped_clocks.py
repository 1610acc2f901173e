"""No wait depends on a clock that a test library can stop: freezegun stops ``time.monotonic()``, too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import time_machine
from freezegun import freeze_time

from bulltask import App, ResultSet
from bulltask.embedded.server import lock
from bulltask.errors import BrokerUnavailableError, ResultTimeoutError
from bulltask.jobs import clock
from bulltask.jobs.clock import mono_s
from bulltask.testing import InlineWorker, RedisServer, wait_until
from bulltask.testing.worker import use_server
from tests.support.flaky_proxy import FlakyProxy

# Without a limit, a test that fails would wait for ever.
pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]

Stop = Callable[[], AbstractContextManager[Any]]

MOMENT = datetime(2031, 5, 5, 12, tzinfo=UTC)
STOPS: dict[str, Stop] = {
    "freezegun": lambda: freeze_time(MOMENT),
    "freezegun, in the past": lambda: freeze_time(datetime(1970, 1, 1, tzinfo=UTC)),
    "time-machine": lambda: time_machine.travel(MOMENT, tick=False),
}


@pytest.fixture(params=list(STOPS.values()), ids=list(STOPS))
def stop(request: pytest.FixtureRequest) -> Stop:
    """Return a context manager that stops the clock."""
    made: Stop = request.param
    return made


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[FlakyProxy]:
    with FlakyProxy("127.0.0.1", redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def flaky_app(proxy: FlakyProxy) -> Iterator[App]:
    """An app whose connection the test can break."""
    url = f"redis://127.0.0.1:{proxy.port}/0"
    app = App("sender", url, broker_publish_timeout=0.3, broker_connection_timeout=0.3)
    yield app
    app.close()


def test_the_clocks_of_python_are_stopped(stop: Stop) -> None:
    with stop():
        assert time.time() == time.time()
        assert datetime.now(UTC).year in {1970, 2031}
        before = mono_s()
        wait_until(lambda: mono_s() > before)


WAITS: dict[str, tuple[type[Exception], Callable[[App], object]]] = {
    "get": (ResultTimeoutError, lambda app: app.send_task("never").get(0.05)),
    "result set": (ResultTimeoutError, lambda app: ResultSet([app.send_task("never")]).join(0.05)),
    "events": (TimeoutError, lambda app: wait_until(lambda: app.send_task("never").ready(), 0.05)),
}


@pytest.mark.parametrize(("error", "wait"), WAITS.values(), ids=WAITS)
def test_waits_for_jobs_time_out(app: App, stop: Stop, error: type[Exception], wait: Callable[[App], object]) -> None:
    with stop(), pytest.raises(error):
        wait(app)


AWAITS: dict[str, Callable[[App], Awaitable[object]]] = {
    "aget": lambda app: app.send_task("never").aget(0.05),
    "result set": lambda app: ResultSet([app.send_task("never")]).aget(0.05),
}


@pytest.mark.parametrize("wait", AWAITS.values(), ids=AWAITS)
async def test_waits_for_jobs_time_out_on_an_event_loop(
    app: App, stop: Stop, wait: Callable[[App], Awaitable[object]]
) -> None:
    with stop(), pytest.raises(ResultTimeoutError):
        await wait(app)


async def test_a_wait_that_began_earlier_takes_its_time_when_the_clock_is_moved(app: App, stop: Stop) -> None:
    result = await app.asend_task("never")  # which connects: connecting would time out while the clock is moved
    waiting = asyncio.ensure_future(result.aget(0.3))
    await asyncio.sleep(0.01)
    started = mono_s()
    with stop(), pytest.raises(ResultTimeoutError):
        await waiting
    assert mono_s() - started > 0.2


async def test_a_wait_that_began_while_the_clock_was_stopped_ends_after_it_runs_again(stop: Stop) -> None:
    with stop():
        waiting = asyncio.ensure_future(clock.sleep(0.05))
        await asyncio.sleep(0)
    await waiting


def test_a_send_gives_up_if_redis_does_not_reply(flaky_app: App, proxy: FlakyProxy, stop: Stop) -> None:
    flaky_app.send_task("connects")
    proxy.blackhole()
    with stop(), pytest.raises(BrokerUnavailableError):
        flaky_app.send_task("never")


@pytest.mark.parametrize("connected", [True, False])
async def test_a_send_on_an_event_loop_gives_up_if_redis_does_not_reply(
    flaky_app: App, proxy: FlakyProxy, stop: Stop, *, connected: bool
) -> None:
    if connected:
        await flaky_app.asend_task("connects")
    proxy.blackhole()
    with stop(), pytest.raises(BrokerUnavailableError):
        await flaky_app.asend_task("never")


def test_the_embedded_servers_start_and_stop(tmp_path: Path, stop: Stop) -> None:
    with stop():
        with RedisServer.start(tmp_path / "server") as server:
            assert server.running
        with (tmp_path / "lock").open("w") as held, (tmp_path / "lock").open("w") as other:
            assert lock(held.fileno(), 2, 0)
            assert not lock(other.fileno(), 2, 0.01)


async def test_the_fixtures_clock_follows_the_stopped_clock(app: App, broker_url: str, stop: Stop) -> None:
    ran: list[float] = []
    app.task(name="note")(lambda: ran.append(time.time()))
    with use_server(app, broker_url), InlineWorker(app) as worker, stop():
        result = app.send_task("note", countdown=3600)
        await worker.arun_jobs()
        assert result.state == "delayed"
        with pytest.raises(ResultTimeoutError):
            await result.aget(60)
        await worker.arun_for(3600)
        assert result.ready()
        assert ran == [time.time()]
