"""A Redis that is there and answers with errors: its workers wait, say so once, and can be stopped meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bulltask.testing.server import RedisServer
from bulltask.testing.wait import wait_until
from tests.support.pace import at_this_pace
from tests.support.stage import Stage

pytestmark = pytest.mark.process

METHODS = pytest.mark.parametrize("method", ["fork", "spawn"])
BOTH = ["-Q", "broken,default"]


def break_queue(stage: Stage, queue: str) -> str:
    """Put something else where a list of the queue belongs; its key."""
    key = stage.keys_of(queue).wait
    stage.redis.set(key, "not a list")
    return key


@METHODS
def test_a_queue_whose_keys_are_broken_holds_up_no_other_and_is_told_once_and_found_again(
    stage: Stage, method: str
) -> None:
    key = break_queue(stage, "broken")
    settings = {"worker_start_method": method, "run_retry_delay": 0.2, "broker_reconnect_delay": 0.01}
    worker = stage.worker(children=1, options=BOTH, settings=settings)
    worker.wait_for_line("Redis refused", queue="broken")
    for _ in range(5):  # more than one pause, and turns of both queues
        assert stage.app.send_task("quick", countdown=0.2).get(timeout=60) is None
    assert len(worker.logged("Redis refused")) == 1
    assert "WRONGTYPE" in worker.logged("Redis refused")[0]["error"]
    assert worker.logged("Redis disconnected") == []
    stage.redis.delete(key)
    assert stage.app.send_task("quick", queue="broken").get(timeout=60) is None
    assert worker.wait_for_line("Redis recovered", queue="broken")[0]["attempt"] >= 2
    assert worker.stop() == 0


def test_a_worker_that_leaves_a_queue_alone_for_long_asks_no_more_and_stops_at_once(stage: Stage) -> None:
    break_queue(stage, "broken")
    settings = {"run_retry_delay": 300, "broker_reconnect_delay": 60, "broker_reconnect_delay_max": 60}
    worker = stage.worker(children=2, options=["-Q", "broken"], settings={**settings, "stalled_interval": 600})
    worker.wait_for_line("Redis refused", count=2, queue="broken")
    before = stage.redis.info("commandstats")["cmdstat_evalsha"]["calls"]
    stage.worker(children=1, options=["-Q", "default"])
    assert stage.app.send_task("quick", countdown=1).get(timeout=60) is None
    assert stage.redis.info("commandstats")["cmdstat_evalsha"]["calls"] - before < 20, "it does not spin"
    assert worker.stop(timeout=30) == 0


def test_a_full_redis_is_told_once_and_its_jobs_run_when_there_is_room(
    stage_on: Callable[[str], Stage], server_factory: Callable[..., RedisServer]
) -> None:
    server = server_factory()
    stage = stage_on(server.url)
    settings = {"run_retry_delay": 0.3, "stalled_interval": 600}
    worker = stage.worker(children=1, settings=settings)
    stage.wait_until_idle(1)
    job = stage.app.send_task("quick", countdown=1)
    stage.redis.config_set("maxmemory", "1")
    refused = worker.wait_for_line("Redis refused")[0]
    assert "maxmemory" in refused["error"]
    assert "queue" not in refused or refused["queue"] is None
    errors = stage.redis.info("commandstats")["cmdstat_evalsha"]
    wait_until(lambda: tries(stage) >= errors["calls"] + 5, 60, "five more tries")
    assert len(worker.logged("Redis refused")) == 1
    stage.redis.config_set("maxmemory", "0")
    assert job.get(timeout=60) is None
    worker.wait_for_line("Redis recovered")
    assert worker.logged("Redis disconnected") == worker.logged("Redis reconnecting") == []
    assert worker.stop() == 0


def test_a_connection_that_breaks_after_error_replies_is_made_again_at_once(stage: Stage) -> None:
    proxy = stage.proxy()
    worker = stage.worker(via=proxy, children=1, settings={"broker_reconnect_delay": 1})
    stage.wait_until_idle(1)
    proxy.inject_error("READONLY You can't write against a read only replica.", None, match="lockDuration")
    job = stage.app.send_task("quick")
    proxy.wait_for(lambda seen: seen.injected >= 4, 60)  # a second between each two
    proxy.pass_all()
    proxy.reset()
    stage.started(job, timeout=at_this_pace(5))
    assert worker.stop() == 0


def tries(stage: Stage) -> int:
    calls: int = stage.redis.info("commandstats")["cmdstat_evalsha"]["calls"]
    return calls


def test_a_worker_that_waits_for_a_full_redis_stops_at_once(
    stage_on: Callable[[str], Stage], server_factory: Callable[..., RedisServer]
) -> None:
    server = server_factory()
    stage = stage_on(server.url)
    settings = {"run_retry_delay": 300, "broker_reconnect_delay": 60, "broker_reconnect_delay_max": 60}
    worker = stage.worker(children=2, settings={**settings, "stalled_interval": 600})
    stage.wait_until_idle(2)
    stage.app.send_task("quick", countdown=0.5)
    stage.redis.config_set("maxmemory", "1")
    worker.wait_for_line("Redis refused")
    assert worker.stop(timeout=30) == 0


ERROR_PAGE = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"


def test_a_worker_outlives_answers_that_are_not_redis_protocol(stage: Stage) -> None:
    proxy = stage.proxy()
    proxy.inject_reply(ERROR_PAGE, None)
    worker = stage.worker(via=proxy, children=2, settings={"broker_reconnect_delay": 0.05})
    assert "does not speak Redis' protocol" in worker.wait_for_line("Redis disconnected")[0]["error"]
    proxy.pass_all()
    stage.wait_until_idle(2)
    children = worker.children
    held = stage.hold()
    stage.started(held)
    proxy.inject_reply(ERROR_PAGE, None)
    stage.open_gate()
    following = stage.app.send_task("quick")
    tries = proxy.injected
    proxy.wait_for(lambda seen: seen.injected >= tries + 10, 60)
    proxy.pass_all()
    assert held.get(timeout=60) == "gate"
    assert following.get(timeout=60) is None
    assert (stage.starts(held), stage.starts(following)) == (1, 1)
    assert worker.children == children
    assert "Traceback" not in worker.log
    assert worker.stop() == 0
