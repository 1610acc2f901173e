"""No call removes, moves or checks more than about a thousand jobs, however many have piled up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, pairwise, product
from typing import Any
from unittest.mock import patch

import pytest

from bulltask import App
from bulltask.events import Bus
from bulltask.jobs.names import Revocation
from bulltask.lua.loader import Script, sha1
from bulltask.queue import (
    FlowJob,
    Queue,
    manual,
    schedulers,
)
from bulltask.queue import (
    fields as bulk,
)
from bulltask.queue import (
    fields as read,
)
from bulltask.queue import (
    schedulers as repeatables,
)
from bulltask.queue.context import QueueContext
from bulltask.transport.call import QueueKeys, SyncClient, command, script_call
from bulltask.transport.operation import Operation, run_sync
from bulltask.transport.scripts.job import revocation_requests
from bulltask.transport.scripts.move import FetchOptions, collect_batch, fetch_ahead
from bulltask.transport.scripts.queue import PageCursor, get_ranges, page_after
from bulltask.worker.beat import reconcile
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.locks import StalledCheck
from tests.support.piled_up import OLD_MS, pile_up, pile_up_schedulers
from tools import blocking

pytestmark = pytest.mark.redis

COUNT = 2_300
PER_CALL = 100
CHECKED_PER_CALL = 500  # by a stalled check
STATES = ("wait", "paused", "delayed", "prioritized", "active", "completed", "failed")


@pytest.fixture
def queue(app: App) -> Iterator[Queue]:
    """A queue; the async form makes the same calls."""
    with app.queue("mail") as queue:
        yield queue


@pytest.fixture
def keys(queue: Queue) -> QueueKeys:
    return queue._context.keys


@pytest.fixture
def context(queue: Queue) -> QueueContext:
    return queue._context


def sizes(redis_client: Any, keys: QueueKeys) -> dict[str, int]:
    """Return how many jobs are in each state."""
    return {
        state: redis_client.llen(keys.base + state)
        if state in {"wait", "paused", "active"}
        else redis_client.zcard(keys.base + state)
        for state in STATES
    }


def drive(operation: Operation[Any], client: SyncClient, inspect: Callable[[list[Any]], None]) -> Any:
    """Run an operation, and inspect the replies of each round trip; return its result."""
    try:
        calls = next(operation)
        while True:
            replies = [client.run(call) for call in calls]
            inspect(replies)
            calls = operation.send(replies)
    except StopIteration as end:
        return end.value


def largest_change(operation: Operation[Any], client: SyncClient, size: Callable[[], dict[str, int]]) -> int:
    """Run an operation; return how many jobs the round trip that moved or removed the most of them has changed."""
    sizes = [size()]
    drive(operation, client, lambda _: sizes.append(size()))
    return max(abs(after[state] - before[state]) for before, after in pairwise(sizes) for state in after)


@pytest.mark.parametrize("state", ["active", "delayed", "failed", "wait"])
def test_no_call_that_removes_large_jobs_keeps_redis_busy_for_more_than_5_ms(
    queue: Queue, keys: QueueKeys, redis_client: Any, state: str
) -> None:
    pid = redis_client.info("server")["process_id"]

    def longest_ms() -> float:
        pile_up(redis_client, keys, state, 1_000, skipped=0, data=blocking.DATA, **blocking.FAILURE)
        meter = blocking.Meter(pid)
        with meter.measure():
            assert len(queue.clean(0, state=state)) == 1_000
        return max(meter.longest.values())

    # A busy machine makes calls slower, up to threefold for seconds, but none faster.
    assert any(longest_ms() <= blocking.MAX_MS for _ in range(10))


def test_a_call_that_reads_ids_returns_a_bounded_number_for_all_states_together(
    context: QueueContext, client: SyncClient, keys: QueueKeys, redis_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "_IDS_PER_CALL", 50)
    for number, state in enumerate(STATES):
        pile_up(redis_client, keys, state, 20, skipped=20 * number)
    lengths: list[int] = []
    found = drive(
        read.get_job_ids(context, (), 0, -1, asc=True),
        client,
        lambda replies: lengths.append(sum(map(len, replies[0]))),
    )
    assert max(lengths) <= 50
    assert set(found) == {f"j{number}" for number in range(1, 20 * len(STATES) + 1)}


def test_revoking_the_next_of_many_waiting_jobs_does_not_search_the_whole_list(
    queue: Queue, keys: QueueKeys, redis_client: Any
) -> None:
    pile_up(redis_client, keys, "wait", blocking.REPETITIONS)
    for first in range(0, 500_000, 50_000):
        redis_client.lpush(keys.wait, *range(first, first + 50_000))
    meter = blocking.Meter(redis_client.info("server")["process_id"])

    def longest_ms(job_id: str) -> float:
        meter.longest.clear()
        with meter.measure():
            assert queue.revoke(job_id) is Revocation.REVOKED
        return max(meter.longest.values())

    assert any(longest_ms(f"j{number + 1}") <= 1 for number in range(blocking.REPETITIONS))


@pytest.mark.slow
@pytest.mark.parametrize("asc", [True, False])
def test_a_page_whose_jobs_are_gone_is_not_searched_for_in_the_whole_list(
    client: SyncClient, keys: QueueKeys, redis_client: Any, asc: bool
) -> None:
    for first in range(0, 600_000, 50_000):
        redis_client.lpush(keys.wait, *range(first, first + 50_000))
    cursor = PageCursor(distance=10, ids=tuple(f"gone{number}" for number in range(10)))

    def longest_ms() -> float:
        meter = blocking.Meter(redis_client.info("server")["process_id"])
        with meter.measure():
            client.run(page_after(keys, "wait", cursor, 10, asc=asc))
        return max(meter.longest.values())

    assert any(longest_ms() <= blocking.MAX_MS for _ in range(blocking.REPETITIONS))


def test_the_meter_finds_the_one_script_that_is_slow_among_many_that_are_sent_together(
    client: SyncClient, redis_client: Any
) -> None:
    slow = Script("slow", 0, source := b"for i = 1, ARGV[1] do redis.call('TIME') end", sha1(source))
    meter = blocking.Meter(redis_client.info("server")["process_id"])
    with meter.measure():
        client.run_many([script_call(slow, (), (50_000 * (number == 7),)) for number in range(20)])
        client.run_many([command("PING")] * 3)
    assert meter.longest["slow"] > blocking.MAX_MS
    assert meter.longest["PING…"] < meter.longest["slow"] / 2


@pytest.mark.parametrize("asc", [False, True])
def test_ids_are_read_a_page_at_a_time_with_the_same_result(
    context: QueueContext, client: SyncClient, keys: QueueKeys, redis_client: Any, *, asc: bool
) -> None:
    for state, count in zip(STATES, (0, 1, 9, 10, 11, 20, 26), strict=True):
        pile_up(redis_client, keys, state, count)
        for number in range(1, count + 1):  # each job is in one state
            member = f"{state}{number}"
            if state in {"wait", "paused", "active"}:
                redis_client.lset(keys.base + state, count - number, member)
            else:
                redis_client.zadd(keys.base + state, {member: redis_client.zscore(keys.base + state, f"j{number}")})
                redis_client.zrem(keys.base + state, f"j{number}")
    names = ["active", "completed", "delayed", "failed", "paused", "prioritized", "wait", "waiting-children"]
    with patch.object(read, "_IDS_PER_CALL", 10):
        for start, end in product((0, 1, 9, 10, 19, 30, -3, -1), (0, 5, 9, 10, 19, 20, 1_000, -1, -2, -12)):
            expected = chain(*client.run(get_ranges(keys, names, start, end, asc=asc)))
            assert run_sync(client, read.get_job_ids(context, (), start, end, asc=asc)) == [*expected], (start, end)


def test_a_call_returns_a_bounded_number_of_ids_and_misses_none_if_jobs_leave(
    context: QueueContext, client: SyncClient, keys: QueueKeys, redis_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "_IDS_PER_CALL", 50)
    pile_up(redis_client, keys, "wait", 101)
    lengths: list[int] = []

    def acquire_jobs(replies: list[Any]) -> None:
        lengths.extend(map(len, replies[0]))
        redis_client.rpop(keys.wait, 5)

    found = drive(read.get_job_ids(context, "wait", 0, -1, asc=True), client, acquire_jobs)
    assert lengths == [50, 46]
    assert found == [f"j{number}" for number in range(6, 102)]


@pytest.mark.parametrize("state", ["wait", "paused", "delayed", "prioritized"])
def test_drain_removes_a_bounded_number_of_jobs_per_call(
    context: QueueContext, client: SyncClient, keys: QueueKeys, redis_client: Any, state: str
) -> None:
    pile_up(redis_client, keys, state, COUNT)
    assert largest_change(bulk.drain(context, delayed=True), client, lambda: sizes(redis_client, keys)) == PER_CALL
    assert list(redis_client.scan_iter(f"*{keys.name}*")) == []


@pytest.mark.parametrize("state", ["wait", "paused", "delayed", "prioritized", "completed", "failed", "active"])
def test_clean_removes_a_bounded_number_of_jobs_per_call(
    context: QueueContext, client: SyncClient, keys: QueueKeys, redis_client: Any, state: str
) -> None:
    pile_up(redis_client, keys, state, COUNT)
    clean = bulk.clean(context, 0, 0, state)
    assert largest_change(clean, client, lambda: sizes(redis_client, keys)) == PER_CALL
    assert list(redis_client.scan_iter(f"*{keys.name}*")) == [keys.events]
    assert [fields for _, fields in redis_client.xrange(keys.events)] == [{"event": "cleaned", "count": str(COUNT)}]


@pytest.mark.parametrize("state", ["wait", "paused", "delayed", "prioritized", "active"])
def test_clean_finds_old_jobs_behind_thousands_that_stay(
    queue: Queue, keys: QueueKeys, redis_client: Any, state: str
) -> None:
    pile_up(redis_client, keys, state, COUNT)
    old = {f"j{number}" for number in (1, 2, 500, 1_000, 1_001, 1_777, COUNT)}
    with redis_client.pipeline() as pipe:
        for job in {f"j{number}" for number in range(1, COUNT + 1)} - old:
            pipe.hset(keys.job(job), "timestamp", queue._context.now_ms())
        pipe.execute()
    assert set(queue.clean(60, state=state)) == old
    assert sizes(redis_client, keys)[state] == COUNT - len(old)
    ids = redis_client.lrange if state in {"wait", "paused", "active"} else redis_client.zrange
    expected = [f"j{number}" for number in range(1, COUNT + 1) if f"j{number}" not in old]
    assert ids(keys.base + state, 0, -1) == (expected if ids == redis_client.zrange else expected[::-1])


def test_drain_keeps_the_next_iterations_of_thousands_of_schedulers(
    queue: Queue, keys: QueueKeys, redis_client: Any
) -> None:
    pile_up(redis_client, keys, "wait", COUNT)
    with redis_client.pipeline() as pipe:
        for number in range(1_500):
            pipe.zadd(keys.repeat, {f"s{number}": OLD_MS})
            pipe.hset(keys.job(f"repeat:s{number}:{OLD_MS}"), mapping={"name": "n", "rjk": f"s{number}"})
            pipe.rpush(keys.wait, f"repeat:s{number}:{OLD_MS}")
        pipe.execute()
    queue.add("n")
    queue.drain()
    assert redis_client.lrange(keys.wait, 0, -1) == [f"repeat:s{number}:{OLD_MS}" for number in range(1_500)]


def test_drain_removes_delayed_jobs_between_thousands_of_iterations_that_are_due_at_the_same_time(
    queue: Queue, keys: QueueKeys, redis_client: Any
) -> None:
    pile_up_schedulers(redis_client, keys, 1_500)
    iterations = redis_client.zrange(keys.delayed, 0, -1)
    score = redis_client.zscore(keys.delayed, iterations[0])
    with redis_client.pipeline() as pipe:
        for number in range(700):  # some have the same score and come before, between or after the iterations
            prefix = ("a", "repeat:s1", "z")[number % 3]
            pipe.hset(keys.job(f"{prefix}{number}"), mapping={"name": "n", "data": "{}", "opts": "{}"})
            pipe.zadd(keys.delayed, {f"{prefix}{number}": score - number % 2 + number % 5 // 4})
        pipe.execute()
    queue.drain(delayed=True)
    assert redis_client.zrange(keys.delayed, 0, -1) == iterations


@pytest.mark.parametrize("reader", ["list", "list of repeatable jobs", "beat"])
def test_no_reply_contains_all_of_thousands_of_schedulers(
    app: App, context: QueueContext, client: SyncClient, keys: QueueKeys, redis_client: Any, reader: str
) -> None:
    pile_up_schedulers(redis_client, keys, COUNT)
    operations: dict[str, Operation[Any]] = {
        "list": schedulers.list_all_schedulers(keys, 0, -1, asc=True),
        "list of repeatable jobs": repeatables.list_repeatables(keys),
        "beat": reconcile(keys, [], app.name, context.now_ms()),
    }
    lengths: list[int] = []

    def inspect(replies: list[Any]) -> None:
        rows = [reply[1] if isinstance(reply, tuple) else reply for reply in replies]
        lengths.extend(len(row) for row in rows if isinstance(row, list))

    result = drive(operations[reader], client, inspect)
    if reader == "list":
        assert [scheduler.id for scheduler in result] == redis_client.zrange(keys.repeat, 0, -1)
    assert 0 < max(lengths) < COUNT / 2


@pytest.mark.slow
@pytest.mark.parametrize("asc", [True, False])
@pytest.mark.parametrize("state", ["wait", "delayed"])
def test_an_iteration_whose_last_page_is_gone_does_not_read_all_jobs(
    client: SyncClient, keys: QueueKeys, redis_client: Any, state: str, asc: bool
) -> None:
    def commands() -> int:
        stats = redis_client.info("commandstats")
        names = ("lrange", "zrange", "zrevrange")
        return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in names)

    if state == "wait":
        pile_up(redis_client, keys, state, 40_000)
        cursor = PageCursor(distance=10, ids=tuple(f"gone{number}" for number in range(10)))
        expected = redis_client.lrange(keys.wait, *((-10, -1) if asc else (0, 9)))[:: -1 if asc else 1]
    else:
        pile_up_schedulers(redis_client, keys, 40_000)
        member, *expected = (redis_client.zrange if asc else redis_client.zrevrange)(keys.delayed, 20_000, 20_010)
        cursor = PageCursor(score=str(int(redis_client.zscore(keys.delayed, member))), ids=(member,))
        redis_client.zrem(keys.delayed, member)
    before = commands()
    ids, _ = client.run(page_after(keys, state, cursor, 10, asc=asc))
    assert ids == expected
    assert commands() - before <= 20


def test_an_iteration_continues_after_thousands_of_jobs_have_been_added(
    client: SyncClient, keys: QueueKeys, redis_client: Any
) -> None:
    pile_up(redis_client, keys, "wait", COUNT)
    for asc, push in ((True, redis_client.rpush), (False, redis_client.lpush)):
        _, cursor = client.run(page_after(keys, "wait", PageCursor(), 10, asc=asc))
        push(keys.wait, *(f"{asc}{number}" for number in range(5_000)))
        redis_client.lrem(keys.wait, 1, cursor.ids[0])  # the page's last job
        ids, _ = client.run(page_after(keys, "wait", cursor, 20, asc=asc))
        left = redis_client.lrange(keys.wait, 0, -1)[:: -1 if asc else 1]
        first = left.index(cursor.ids[1]) + 1
        assert ids == left[first : first + 20]


@pytest.mark.parametrize("state", ["failed", "completed", "delayed"])
def test_retry_and_promotion_move_a_bounded_number_of_jobs_per_call(
    context: QueueContext, client: SyncClient, keys: QueueKeys, redis_client: Any, state: str
) -> None:
    pile_up(redis_client, keys, state, COUNT)
    move = bulk.move_to_wait(context, state, 10**9, None)
    assert largest_change(move, client, lambda: sizes(redis_client, keys)) == PER_CALL
    assert sizes(redis_client, keys)["wait"] == COUNT


def test_obliterate_removes_a_bounded_number_of_jobs_per_call(
    context: QueueContext, client: SyncClient, keys: QueueKeys, redis_client: Any
) -> None:
    pile_up(redis_client, keys, "completed", COUNT)
    pile_up(redis_client, keys, "active", COUNT)
    obliterate = bulk.obliterate(context, 10**9, force=True)
    assert largest_change(obliterate, client, lambda: sizes(redis_client, keys)) == PER_CALL
    assert list(redis_client.scan_iter(f"*{keys.name}*")) == []


@pytest.mark.parametrize("keep", [{"age": 60}, {"count": 10}, {"age": 60, "count": 10}])
def test_a_job_that_finishes_removes_at_most_a_hundred_old_jobs(
    queue: Queue, keys: QueueKeys, redis_client: Any, keep: dict[str, int]
) -> None:
    pile_up(redis_client, keys, "completed", 250)
    left = []
    for number in range(4):
        queue.add("n", remove_on_complete=keep)
        job = queue.get_next_job(f"token{number}")
        assert job is not None
        job.move_to_completed(None)
        left.append(redis_client.zcard(keys.completed))
    assert left == [151, 52, *([3, 4] if "age" in keep else [10, 10])]
    stored = {key.removeprefix(keys.base) for key in redis_client.scan_iter(f"{keys.base}j*")}
    assert stored == {job for job in redis_client.zrange(keys.completed, 0, -1) if job.startswith("j")}


def fail_one(queue: Queue, **options: Any) -> str:
    """Add a job and fail it; return its id."""
    job_id = queue.add("n", attempts=1, **options).id
    job = queue.get_next_job("token")
    assert job is not None
    assert job.id == job_id
    job.move_to_failed("no")
    return job_id


def test_failed_jobs_are_removed_after_a_week_unless_a_setting_keeps_them(
    app: App, broker_url: str, keys: QueueKeys, redis_client: Any
) -> None:
    day_ms, now_ms = 86_400_000, app._now_ms()
    pile_up(redis_client, keys, "failed", 3)
    redis_client.zadd(keys.failed, {"j2": now_ms - 7 * day_ms + 60_000, "j3": now_ms - 7 * day_ms - 60_000})
    with Queue("mail", broker_url, remove_on_fail=False) as keeping:
        kept = fail_one(keeping)
    assert redis_client.zrange(keys.failed, 0, -1) == ["j1", "j3", "j2", kept]
    with Queue("mail", broker_url) as queue:
        assert queue._context.broker.config.keep_failed == {"age": 7 * 86_400, "count": 100_000}
        last = fail_one(queue)
    assert redis_client.zrange(keys.failed, 0, -1) == ["j2", kept, last]
    assert [redis_client.exists(keys.job(job)) for job in ("j1", "j3", "j2")] == [0, 0, 1]


@pytest.mark.parametrize("keep", [{"age": 60}, {"count": 2}, {"age": 60, "count": 2}])
def test_a_failed_child_is_kept_while_its_parent_waits_for_it(
    app: App, queue: Queue, keys: QueueKeys, redis_client: Any, keep: dict[str, int]
) -> None:
    with app.flows() as flows:
        parent = flows.add(FlowJob("n", "mail", children=[FlowJob("n", "mail", {}, {"attempts": 1})])).job
    child = queue.get_next_job("token")
    assert child is not None
    child.move_to_failed("no")
    redis_client.zadd(keys.failed, {child.id: OLD_MS - 1})
    pile_up(redis_client, keys, "failed", 150)
    for _ in range(2):
        fail_one(queue, remove_on_fail=keep)
    assert redis_client.exists(keys.job(child.id)) == 1
    assert parent.get_state() == "waiting-children"
    failed = redis_client.zrange(keys.failed, 0, -1)
    assert child.id in failed
    assert not {f"j{number}" for number in range(1, 150)} & set(failed)
    redis_client.srem(keys.dependencies(parent.id), keys.job(child.id))  # the parent no longer waits for it
    redis_client.zadd(keys.failed, {child.id: OLD_MS})
    fail_one(queue, remove_on_fail=keep)
    assert redis_client.exists(keys.job(child.id)) == 0


def stalled_check(app: App, keys: QueueKeys, client: SyncClient) -> StalledCheck:
    bus = Bus()
    return StalledCheck(app._broker, [keys], lambda _index: True, client, bus, ReconnectBackoff(bus, app._config))


def test_a_stalled_check_of_thousands_of_active_jobs_takes_several_calls(
    context: QueueContext, client: SyncClient, keys: QueueKeys, redis_client: Any
) -> None:
    pile_up(redis_client, keys, "active", COUNT)
    locked = {f"j{number}" for number in range(1, COUNT + 1, 7)}
    for job in locked:
        redis_client.set(keys.lock(job), "token")
    assert largest_change(manual.check_stalled(context, 1), client, lambda: sizes(redis_client, keys)) == 0
    before = redis_client.lrange(keys.active, 0, -1)
    assert redis_client.scard(keys.stalled) == COUNT
    assert largest_change(manual.check_stalled(context, 1), client, lambda: sizes(redis_client, keys)) == 0  # throttled
    redis_client.delete(keys.stalled_check)
    changed = largest_change(manual.check_stalled(context, 1), client, lambda: sizes(redis_client, keys))
    assert CHECKED_PER_CALL / 2 < changed <= CHECKED_PER_CALL
    assert redis_client.lrange(keys.active, 0, -1) == [job for job in before if job in locked]
    assert set(redis_client.lrange(keys.wait, 0, -1)) == set(before) - locked
    assert redis_client.smembers(keys.stalled) == locked
    assert list(redis_client.scan_iter(f"{keys.bulltask_base}*")) == []


def test_a_supervisor_interrupts_a_long_stalled_check_for_its_other_services(
    app: App, client: SyncClient, keys: QueueKeys, redis_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bulltask.worker.locks._MAX_TICK_MS", 0)
    pile_up(redis_client, keys, "active", COUNT)
    check = stalled_check(app, keys, client)
    usual_ms, ticks = check.interval_ms, 0
    while ticks == 0 or (ticks < 9 and check.interval_ms < usual_ms):
        check.tick(0, 0)
        redis_client.delete(keys.stalled_check)  # it expires if a check takes longer than the interval
        ticks += 1
    assert ticks == 5
    assert redis_client.scard(keys.stalled) == COUNT


def test_jobs_that_finish_and_begin_during_a_stalled_check_are_not_taken_for_stalled(
    app: App, client: SyncClient, keys: QueueKeys, redis_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bulltask.worker.locks._MAX_TICK_MS", 0)
    pile_up(redis_client, keys, "active", COUNT)
    check = stalled_check(app, keys, client)
    check.tick(0, 0)
    for number in range(501, 1_400):  # jobs that this check has not examined yet
        redis_client.lrem(keys.active, -1, f"j{number}")
    for number in range(899):  # not locked yet: the check must not find them a second time
        redis_client.lpush(keys.active, f"new{number}")
    for _ in range(5):
        check.tick(0, 0)
    assert redis_client.llen(keys.active) == COUNT
    assert redis_client.llen(keys.wait) == 0


@pytest.mark.parametrize("bulk_fetch", ["prefetch", "batch"])
def test_several_jobs_are_not_acquired_at_once_while_thousands_of_delayed_jobs_are_due(
    app: App, client: SyncClient, keys: QueueKeys, redis_client: Any, bulk_fetch: str
) -> None:
    pile_up(redis_client, keys, "delayed", COUNT)
    options = [FetchOptions(f"token{number}", 30_000, "") for number in range(4)]
    now_ms = app._now_ms()
    call = fetch_ahead(keys, options, now_ms) if bulk_fetch == "prefetch" else collect_batch(keys, options, "n", now_ms)
    redis_client.lpush(keys.wait, "j1")
    acquired = []
    while redis_client.zcard(keys.delayed):
        acquired.append(len(client.run(call)))
    assert acquired == [1, 1, 4]


def test_obsolete_revocation_requests_are_removed_in_parts(
    client: SyncClient, keys: QueueKeys, redis_client: Any, app: App
) -> None:
    for first in range(0, 25_000, 5_000):
        redis_client.zadd(keys.revoked, {f"j{number}": 1 for number in range(first, first + 5_000)})
    left = []
    while redis_client.exists(keys.revoked):
        client.run(revocation_requests(keys, app._now_ms()))
        left.append(redis_client.zcard(keys.revoked))
    assert all(before - after <= 11_000 for before, after in zip([25_000, *left], left, strict=False))
