"""Redis sends error replies: workers wait, log the error once, and can be stopped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from click.testing import CliRunner

from bulltask.cli.main import main
from bulltask.testing.worker import RedisServer, wait_until
from tests.support.machine_load import scale_to_load
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

METHODS = pytest.mark.parametrize("method", ["fork", "spawn"])
BOTH_QUEUES = ["-Q", "broken,default"]


def break_queue(harness: WorkerHarness, queue: str) -> str:
    """Store a string in the key of the queue's list of waiting jobs; return the key."""
    key = harness.keys_of(queue).wait
    harness.redis.set(key, "not a list")
    return key


@METHODS
def test_a_broken_queue_is_logged_once_and_does_not_block_another_queue(harness: WorkerHarness, method: str) -> None:
    key = break_queue(harness, "broken")
    settings = {"worker_start_method": method, "run_retry_delay": 0.2, "broker_reconnect_delay": 0.01}
    worker = harness.worker(children=1, options=BOTH_QUEUES, settings=settings)
    worker.wait_for_line("Redis error reply", queue="broken")
    for _ in range(5):  # longer than one backoff, and several fetches from both queues
        assert harness.app.send_task("quick", countdown=0.2).get(timeout=60) is None
    assert len(worker.logged("Redis error reply")) == 1
    assert "WRONGTYPE" in worker.logged("Redis error reply")[0]["error"]
    assert worker.logged("Redis disconnected") == []
    harness.redis.delete(key)
    assert harness.app.send_task("quick", queue="broken").get(timeout=60) is None
    assert worker.wait_for_line("Redis recovered", queue="broken")[0]["attempt"] >= 2
    assert worker.stop() == 0


def test_a_worker_in_a_long_queue_backoff_sends_no_commands_and_stops(harness: WorkerHarness) -> None:
    break_queue(harness, "broken")
    settings = {"run_retry_delay": 300, "broker_reconnect_delay": 60, "broker_reconnect_delay_max": 60}
    worker = harness.worker(children=2, options=["-Q", "broken"], settings={**settings, "stalled_interval": 600})
    worker.wait_for_line("Redis error reply", count=2, queue="broken")
    before = harness.redis.info("commandstats")["cmdstat_evalsha"]["calls"]
    harness.worker(children=1, options=["-Q", "default"])
    assert harness.app.send_task("quick", countdown=1).get(timeout=60) is None
    assert harness.redis.info("commandstats")["cmdstat_evalsha"]["calls"] - before < 20, "the worker does not spin"
    assert worker.stop(timeout=30) == 0


OFTEN_WRITTEN = """
from bulltask.worker import fleet
fleet._WRITE_MS, fleet._STATE_TTL_MS = 200, 400
"""


def test_a_redis_out_of_memory_is_logged_once_by_each_process_and_jobs_run_when_it_has_memory_again(
    harness_on: Callable[[str], WorkerHarness], server_factory: Callable[..., RedisServer]
) -> None:
    server = server_factory()
    harness = harness_on(server.url)
    settings = {"run_retry_delay": 0.3, "stalled_interval": 600}
    worker = harness.worker(OFTEN_WRITTEN, children=1, settings=settings)
    harness.wait_until_idle(1)
    job = harness.app.send_task("quick", countdown=1)
    harness.redis.config_set("maxmemory", "1")
    for line in worker.wait_for_line("Redis error reply", count=2):  # of the supervisor, and of the child
        assert "maxmemory" in line["error"]
        assert "queue" not in line or line["queue"] is None

    def health() -> str:
        return CliRunner().invoke(main, ["health", "--pid", str(worker.pid)]).output

    wait_until(lambda: "not ready: Redis does not serve it" in health(), 60, "a worker that is not ready")
    errors = harness.redis.info("commandstats")["cmdstat_evalsha"]
    wait_until(lambda: script_calls(harness) >= errors["calls"] + 5, 60, "five more calls")
    assert len(worker.logged("Redis error reply")) == 2
    harness.redis.config_set("maxmemory", "0")
    assert job.get(timeout=60) is None
    worker.wait_for_line("Redis recovered")
    wait_until(lambda: health().endswith("  ready\n"), 60, "a worker that is ready")
    assert worker.logged("Redis disconnected") == worker.logged("Redis reconnecting") == []
    assert worker.stop() == 0


def test_a_connection_that_breaks_after_error_replies_is_restored_immediately(harness: WorkerHarness) -> None:
    proxy = harness.proxy()
    worker = harness.worker(via=proxy, children=1, settings={"broker_reconnect_delay": 1})
    harness.wait_until_idle(1)
    proxy.inject_error("READONLY You can't write against a read only replica.", None, match="lockDuration")
    job = harness.app.send_task("quick")
    proxy.wait_for(lambda proxy: proxy.injected >= 4, 60)  # with a second between them
    proxy.pass_all()
    proxy.reset()
    harness.wait_for_start(job, timeout=scale_to_load(5))
    assert worker.stop() == 0


def script_calls(harness: WorkerHarness) -> int:
    calls: int = harness.redis.info("commandstats")["cmdstat_evalsha"]["calls"]
    return calls


def test_a_worker_that_waits_while_redis_is_out_of_memory_stops_immediately(
    harness_on: Callable[[str], WorkerHarness], server_factory: Callable[..., RedisServer]
) -> None:
    server = server_factory()
    harness = harness_on(server.url)
    settings = {"run_retry_delay": 300, "broker_reconnect_delay": 60, "broker_reconnect_delay_max": 60}
    worker = harness.worker(children=2, settings={**settings, "stalled_interval": 600})
    harness.wait_until_idle(2)
    harness.app.send_task("quick", countdown=0.5)
    harness.redis.config_set("maxmemory", "1")
    worker.wait_for_line("Redis error reply")
    assert worker.stop(timeout=30) == 0


ERROR_PAGE = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"


def test_a_worker_survives_replies_that_are_not_redis_protocol(harness: WorkerHarness) -> None:
    proxy = harness.proxy()
    proxy.inject_reply(ERROR_PAGE, None)
    worker = harness.worker(via=proxy, children=2, settings={"broker_reconnect_delay": 0.05})
    assert "does not use the Redis protocol" in worker.wait_for_line("Redis disconnected")[0]["error"]
    proxy.pass_all()
    harness.wait_until_idle(2)
    children = worker.children
    held = harness.hold()
    harness.wait_for_start(held)
    proxy.inject_reply(ERROR_PAGE, None)
    harness.open_gate()
    following = harness.app.send_task("quick")
    injected = proxy.injected
    proxy.wait_for(lambda proxy: proxy.injected >= injected + 10, 60)
    proxy.pass_all()
    assert held.get(timeout=60) == "gate"
    assert following.get(timeout=60) is None
    assert (harness.start_count(held), harness.start_count(following)) == (1, 1)
    assert worker.children == children
    assert "Traceback" not in worker.log
    assert worker.stop() == 0
