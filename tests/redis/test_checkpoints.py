"""Checkpointed tasks: where a job continues, and what is stored in Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import pytest
import redis

from bulltask import App, Context, PermanentError, Request
from bulltask.errors import (
    BrokerUnavailableError,
    ConfigError,
    EncodeError,
    InvalidJobError,
    JobNotFoundError,
    LockMismatchError,
    ReleaseJob,
)
from bulltask.registry.context import Checkpoints
from bulltask.testing import InlineWorker, use_server
from bulltask.transport.scripts.move import CRASHES, store_checkpoint
from tests.support.server_clients import client_of

pytestmark = pytest.mark.redis

T = TypeVar("T")
FIELD = "bulltask:checkpoint"
NUMBERS = list(range(10))


@pytest.fixture
def app(broker_url: str) -> Iterator[App]:
    app = App("checkpointed", "redis://unreachable.invalid:1")
    with use_server(app, broker_url):
        yield app


@pytest.fixture
def plain(broker_url: str) -> Iterator[redis.Redis]:
    with client_of(broker_url, decode_responses=True) as client:
        yield client


class Items:
    """Records the items of a loop, and fails once at some of them."""

    def __init__(self, *fail_at: Any) -> None:
        self.seen: list[Any] = []
        self._fail_at = list(fail_at)

    def __call__(self, item: Any) -> None:
        self.seen.append(item)
        if item in self._fail_at:
            self._fail_at.remove(item)
            raise ConnectionError


def after(cursor: int | None) -> list[int]:
    """Return up to four numbers after a cursor, as a query with a limit does."""
    return [number for number in NUMBERS if cursor is None or number > cursor][:4]


async def aafter(cursor: int | None) -> list[int]:
    await asyncio.sleep(0)
    return after(cursor)


async def stream_after(cursor: int | None) -> AsyncIterator[int]:
    for number in after(cursor):
        await asyncio.sleep(0)
        yield number


async def stream() -> AsyncIterator[int]:
    for number in NUMBERS:
        yield number


def pages(token: str | None) -> list[dict[str, Any]]:
    """Return one page of an API: the last page has no token."""
    start = int(token or 0)
    return [{"items": NUMBERS[start : start + 4], "next": str(start + 4) if start < 8 else None}]


def run(app: App, worker: InlineWorker, task: Callable[..., Any], **options: Any) -> Any:
    """Run a task's job with its retries, and return its result."""
    added = app.task(bind=True, checkpoint=True, name="loop", **options)(task)
    return added.delay().get(timeout=600)


def checkpoint_of(plain: redis.Redis, job_id: str) -> Any:
    stored: Any = plain.hget(f"bull:{{default}}:{job_id}", FIELD)
    return json.loads(stored) if stored else stored


# ---- where a job continues -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loop",
    [
        lambda self: self.iterate(NUMBERS),
        lambda self: self.iterate(range(10)),
        lambda self: self.iterate(number for number in NUMBERS),
        lambda self: self.iterate(after, cursor=lambda number: number),
        lambda self: self.iterate(lambda start: range(start or 0, 10), cursor=lambda number: number + 1),
    ],
    ids=["list", "range", "generator", "pages", "rest"],
)
def test_a_retry_begins_with_the_item_that_failed(
    app: App, worker: InlineWorker, loop: Callable[[Context], Iterable[int]]
) -> None:
    items = Items(0, 5)

    def task(self: Context) -> int:
        for number in loop(self):
            items(number)
        return len(items.seen)

    assert run(app, worker, task) == 12
    assert items.seen == [0, *range(6), *range(5, 10)]


@pytest.mark.parametrize(
    "loop",
    [
        lambda self: self.iterate(NUMBERS),
        lambda self: self.iterate(stream()),
        lambda self: self.iterate(after, cursor=lambda number: number),
        lambda self: self.iterate(aafter, cursor=lambda number: number),
        lambda self: self.iterate(stream_after, cursor=lambda number: number),
    ],
    ids=["list", "stream", "pages", "awaited-pages", "stream-of-pages"],
)
def test_an_async_task_continues_in_the_same_way(
    app: App, worker: InlineWorker, loop: Callable[[Context], AsyncIterator[int]]
) -> None:
    items = Items(5)

    async def task(self: Context) -> int:
        async for number in loop(self):
            items(number)
        return len(items.seen)

    assert run(app, worker, task) == 11
    assert items.seen == [*range(6), *range(5, 10)]


def test_a_source_whose_cursor_is_none_after_the_last_item_is_not_called_again(app: App, worker: InlineWorker) -> None:
    items, calls = Items(8), list[Any]()

    def task(self: Context) -> None:
        def fetch(token: str | None) -> list[dict[str, Any]]:
            calls.append(token)
            return pages(token)

        for page in self.iterate(fetch, cursor=lambda page: page["next"]):
            items(page["items"][0])
        if self.request.retries < 2:
            raise ConnectionError

    run(app, worker, task, max_retries=5)
    assert items.seen == [0, 4, 8, 8]  # and not again after the failure after the loop
    assert calls == [None, "4", "8", "8"]


def test_a_released_or_delayed_job_continues_at_its_cursor(app: App, worker: InlineWorker) -> None:
    seen: list[int] = []

    def task(self: Context) -> tuple[int, int]:
        for number in self.iterate(NUMBERS):
            seen.append(number)
            if len(seen) == 3:
                self.move_to_wait()
            if len(seen) == 6:
                self.move_to_delayed(5)
            if len(seen) == 9:
                self.rate_limit(1)
        return self.request.attempts_started, self.request.retries

    assert run(app, worker, task) == (4, 0)
    assert seen == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 9]


@pytest.mark.every_topology
def test_self_checkpoint_moves_the_cursor(app: App, worker: InlineWorker) -> None:
    items = Items(2, 5)

    def task(self: Context) -> Any:
        while (self.cursor or 0) < 8:
            items(self.cursor or 0)
            self.checkpoint((self.cursor or 0) + 1)
        return self.cursor

    assert run(app, worker, task) == 8
    assert items.seen == [0, 1, 2, 2, 3, 4, 5, 5, 6, 7]


def test_self_acheckpoint_moves_the_cursor_in_an_async_task(app: App, worker: InlineWorker) -> None:
    items = Items(2)

    async def task(self: Context) -> Any:
        for number in range(self.cursor or 0, 4):
            items(number)
            await self.acheckpoint(number + 1)

    run(app, worker, task)
    assert items.seen == [0, 1, 2, 2, 3]


def test_a_task_that_is_called_directly_or_eagerly_loops_over_all_items(app: App) -> None:
    items = Items(5)

    @app.task(bind=True, checkpoint=True)
    def task(self: Context) -> Any:
        for number in self.iterate(NUMBERS, total=10):
            items(number)
        return self.cursor

    result = task.apply()
    assert (result.get(), result.progress) == (10, 100)
    assert items.seen == [*range(6), *range(5, 10)]
    assert task() == 10


def test_the_source_receives_the_cursor_as_decoded_json(app: App, worker: InlineWorker) -> None:
    cursors: list[Any] = []

    def task(self: Context) -> None:
        def fetch(cursor: Any) -> list[int]:
            cursors.append(cursor)
            return after(None if cursor is None else cursor[1])

        for _ in self.iterate(fetch, cursor=lambda number: ("at", number)):
            pass

    run(app, worker, task)
    assert cursors == [None, ["at", 3], ["at", 7], ["at", 9]]


def test_the_cursor_is_computed_before_the_loop_changes_the_item(app: App, worker: InlineWorker) -> None:
    def task(self: Context) -> Any:
        for row in self.iterate(lambda last: [{"id": found} for found in after(last)], cursor=lambda row: row["id"]):
            row.clear()
        return self.cursor

    assert run(app, worker, task) == 9


# ---- what is stored --------------------------------------------------------------------------------------------------


def test_each_item_is_stored_with_an_interval_of_zero_and_none_within_a_long_one(
    app: App, worker: InlineWorker, plain: redis.Redis
) -> None:
    stored: dict[float, list[Any]] = {0: [], 60: []}

    def loop(self: Context, seconds: float) -> None:
        for _ in self.iterate(NUMBERS[:3]):
            stored[seconds].append(checkpoint_of(plain, self.request.id))
        stored[seconds].append(checkpoint_of(plain, self.request.id))

    for seconds in stored:
        task = app.task(bind=True, checkpoint=True, checkpoint_interval=seconds, name=f"every-{seconds}")(loop)
        task.delay(seconds).get(timeout=10)
    at = [{"cursor": n, "items": n, "started": 1, "done": False} for n in (1, 2)]
    end = {"cursor": 3, "items": 3, "started": 1, "done": True}
    assert stored == {0: [None, *at, end], 60: [None, None, None, end]}


def test_a_job_that_completes_has_no_cursor_so_that_a_retry_from_a_dashboard_starts_over(
    app: App, worker: InlineWorker, plain: redis.Redis
) -> None:
    items = Items(5, 7)

    @app.task(bind=True, checkpoint=True, max_retries=0)
    def task(self: Context) -> None:
        for number in self.iterate(NUMBERS):
            items(number)

    job_id = task.delay().id
    for cursor in (5, 7):
        worker.run_jobs(propagate=False)
        assert checkpoint_of(plain, job_id)["cursor"] == cursor
        app.queue("default").get_job(job_id).retry()  # type: ignore[union-attr]
    worker.run_jobs()
    assert items.seen == [*range(6), 5, 6, 7, 7, 8, 9]
    assert plain.hget(f"bull:{{default}}:{job_id}", FIELD) == ""
    app.queue("default").get_job(job_id).retry("completed")  # type: ignore[union-attr]
    worker.run_jobs()
    assert items.seen[12:] == NUMBERS


def test_a_job_without_a_stored_cursor_has_no_additional_field(
    app: App, worker: InlineWorker, plain: redis.Redis
) -> None:
    @app.task(bind=True, checkpoint=True)
    def task(self: Context) -> None:
        pass

    result = task.delay()
    result.get(timeout=10)
    assert not plain.hexists(f"bull:{{default}}:{result.id}", FIELD)


def test_a_loop_with_a_total_stores_the_progress_in_percent(app: App, worker: InlineWorker) -> None:
    @app.task(bind=True, checkpoint=True, checkpoint_interval=0)
    def task(self: Context) -> Any:
        return [app.AsyncResult(self.request.id).progress for _ in self.iterate(NUMBERS, total=10)]

    result = task.delay()
    assert result.get(timeout=10)[1:] == [10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert result.progress == 100


def test_a_worker_that_has_lost_its_lock_does_not_move_the_cursor_and_stops(
    app: App, worker: InlineWorker, plain: redis.Redis
) -> None:
    seen: list[int] = []

    @app.task(bind=True, checkpoint=True, checkpoint_interval=0)
    def task(self: Context) -> None:
        for number in self.iterate(NUMBERS):
            seen.append(number)
            if number == 3:
                plain.set(f"bull:{{default}}:{self.request.id}:lock", "another worker")

    job_id = task.delay().id
    with pytest.raises(LockMismatchError):
        worker.run_jobs()
    assert seen == [0, 1, 2, 3]
    assert checkpoint_of(plain, job_id)["cursor"] == 3


def test_a_checkpoint_rejected_because_of_an_expired_lock_is_stored_by_the_next_write(
    app: App, worker: InlineWorker, plain: redis.Redis
) -> None:
    at: list[Any] = []

    @app.task(bind=True, checkpoint=True, checkpoint_interval=0)
    def task(self: Context) -> None:
        lock = f"bull:{{default}}:{self.request.id}:lock"
        token = str(plain.get(lock))
        for number in self.iterate(NUMBERS[:4]):
            at.append((checkpoint_of(plain, self.request.id) or {}).get("cursor"))
            if number == 1:
                plain.delete(lock)
            if number == 2:
                plain.set(lock, token)

    task.delay().get(timeout=10)
    assert at == [None, 1, 1, 3]


def test_a_job_that_makes_progress_is_not_a_poison_pill(app: App, worker: InlineWorker, plain: redis.Redis) -> None:
    @app.task(bind=True, checkpoint=True, checkpoint_interval=0)
    def task(self: Context) -> Any:
        key = f"bull:{{default}}:{self.request.id}"
        plain.hset(key, mapping={"stc": 1, CRASHES: 1, "bulltask:crashTokens": "token"})
        return [plain.hmget(key, "stc", CRASHES, "bulltask:crashTokens") for _ in self.iterate(range(2))]

    assert task.delay().get(timeout=10) == [["1", "1", "token"], [None, None, None]]


def test_the_limit_of_started_attempts_counts_from_the_last_checkpoint(broker_url: str) -> None:
    app, seen = App("deployed", broker_url, max_started_attempts=2), list[int]()

    @app.task(bind=True, checkpoint=True, name="moves")
    def moves(self: Context) -> None:
        for number in self.iterate(range(8)):
            seen.append(number)
            if len(seen) % 2 == 0:
                self.move_to_wait()

    @app.task(bind=True, checkpoint=True, name="stays")
    def stays(self: Context) -> None:
        for _ in self.iterate(range(8)):
            self.move_to_wait()

    with use_server(app, broker_url), InlineWorker(app) as worker:
        moves.delay()
        worker.run_jobs()
        assert max(seen) == 7
        stays.delay()
        with pytest.raises(PermanentError, match="started more than allowable limit"):
            worker.run_jobs()


def test_a_checkpoint_is_stored_even_if_redis_is_out_of_memory(
    app: App, worker: InlineWorker, plain: redis.Redis
) -> None:
    cursors: list[Any] = []

    @app.task(bind=True, checkpoint=True, checkpoint_interval=0)
    def task(self: Context) -> None:
        for number in self.iterate(range(3)):
            if number == 1:  # the server knows the script now
                plain.config_set("maxmemory", 1)
            if number == 2:
                cursors.append(checkpoint_of(plain, self.request.id)["cursor"])
                plain.config_set("maxmemory", 0)

    try:
        task.delay()
        worker.run_jobs()
    finally:
        plain.config_set("maxmemory", 0)
    assert cursors == [2]


@pytest.mark.every_topology
def test_a_step_of_a_chain_continues_at_its_cursor(app: App, worker: InlineWorker) -> None:
    items = Items(2)

    @app.task(bind=True, checkpoint=True)
    def task(self: Context, count: int) -> int:
        for number in self.iterate(range(count)):
            items(number)
        return count + 1

    assert (task.s(3) | task.s()).delay().get(timeout=600) == 5
    assert items.seen == [0, 1, 2, 2, *range(4)]


# ---- stopping, and Redis unavailable ---------------------------------------------------------------------------------


class Store:
    """Stores checkpoints in memory, except while it is down."""

    def __init__(self) -> None:
        self.stored: list[Any] = []
        self.is_down = False

    def store_checkpoint(self, token: str, checkpoint: str, progress: bytes | None) -> bool:
        assert (token, progress) == ("token", None)
        if self.is_down:
            raise BrokerUnavailableError("down")
        self.stored.append(json.loads(checkpoint)["cursor"])
        return True

    async def astore_checkpoint(self, token: str, checkpoint: str, progress: bytes | None) -> bool:
        return self.store_checkpoint(token, checkpoint, progress)


def context_of(
    store: Store, is_stopping: Callable[[], bool], interval_ms: int = 0, *, is_async: bool = False
) -> Context:
    checkpoints = Checkpoints("", "1", 1, interval_ms, store)
    checkpoints.start("token", is_stopping, is_async=is_async)
    return Context(Request(id="1", task="loop"), checkpoints=checkpoints)


def test_a_stopping_worker_ends_the_loop_before_the_next_item() -> None:
    seen: list[int] = []
    context = context_of(Store(), lambda: len(seen) == 3, 60_000)
    with pytest.raises(ReleaseJob) as raised:
        seen.extend(context.iterate(NUMBERS))
    assert "stopping" in raised.value.reason
    assert seen == [0, 1, 2]
    assert context._checkpoints is not None
    assert json.loads(context._checkpoints.last(completed=False) or "")["cursor"] == 3


def test_a_stopping_worker_ends_an_async_loop_and_a_task_that_uses_self_checkpoint() -> None:
    async def loop() -> list[int]:
        return [number async for number in context_of(Store(), lambda: True, is_async=True).iterate(NUMBERS)]

    with pytest.raises(ReleaseJob):
        asyncio.run(loop())
    with pytest.raises(ReleaseJob):
        asyncio.run(context_of(Store(), lambda: True, is_async=True).acheckpoint(1))
    with pytest.raises(ReleaseJob):
        context_of(Store(), lambda: True).checkpoint(1)


def test_a_loop_continues_while_redis_is_unavailable_and_stores_its_cursor_afterwards() -> None:
    store = Store()
    context = context_of(store, lambda: False)
    for number in context.iterate(range(6)):
        store.is_down = number in {2, 3}
    assert store.stored == [1, 2, 5, 6, 6]


# ---- mistakes --------------------------------------------------------------------------------------------------------


def _twice(self: Context) -> None:
    for _ in self.iterate([1]):
        pass
    for _ in self.iterate([1]):
        pass


def _both(self: Context) -> None:
    for _ in self.iterate([1]):
        self.checkpoint(1)


def _loop(*arguments: Any, **named: Any) -> Callable[[Context], None]:
    def loop(self: Context) -> None:
        for _ in self.iterate(*arguments, **named):
            pass

    return loop


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        (_twice, ConfigError, "calls self.iterate\\(\\) twice"),
        (_both, ConfigError, "moves the cursor itself"),
        (_loop(after), TypeError, "requires cursor="),
        (_loop(NUMBERS, cursor=int), TypeError, "requires cursor="),
        (_loop(aafter, cursor=int), TypeError, "async for"),
        (_loop(stream()), TypeError, "async for"),
        (_loop(lambda _: [1, 2, 3], cursor=int), PermanentError, "makes no progress"),
        (_loop(lambda at: range(at or 0, 5), cursor=int), PermanentError, "makes no progress"),
        (_loop(after, cursor=lambda _: {1, 2}), EncodeError, "the cursor of job"),
        (lambda self: self.checkpoint(object()), EncodeError, "the cursor of job"),
    ],
    ids=lambda value: "",
)
def test_a_mistake_in_a_loop_fails_the_job(
    app: App, worker: InlineWorker, task: Callable[[Context], None], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(app, worker, task, checkpoint_interval=0)


def test_an_async_task_needs_async_for(app: App, worker: InlineWorker) -> None:
    async def task(self: Context) -> None:
        for _ in self.iterate(NUMBERS):
            pass

    with pytest.raises(TypeError, match="use 'async for'"):
        run(app, worker, task)


def test_a_loop_needs_checkpoint_and_bind(app: App, worker: InlineWorker) -> None:
    @app.task(bind=True)
    def task(self: Context) -> None:
        self.iterate([1])

    with pytest.raises(ConfigError, match="add checkpoint=True"):
        task.delay().get(timeout=10)
    with pytest.raises(ConfigError, match="add bind=True"):
        app.task(checkpoint=True, name="unbound")(lambda: None)
    with pytest.raises(ConfigError, match="checkpoint must be True or False"):
        app.task(bind=True, checkpoint=cast(Any, 5), name="five")(lambda self: None)


@pytest.mark.parametrize("stored", ["nonsense", "[]", '{"cursor":1}', '{"cursor":1,"items":"x","started":1,"done":0}'])
def test_a_malformed_checkpoint_fails_only_its_job(
    app: App, worker: InlineWorker, plain: redis.Redis, stored: str
) -> None:
    @app.task(bind=True, checkpoint=True)
    def task(self: Context) -> int:
        return len(list(self.iterate(NUMBERS)))

    broken, good = task.delay(), task.delay()
    plain.hset(f"bull:{{default}}:{broken.id}", FIELD, stored)
    with pytest.raises(PermanentError, match=FIELD):
        broken.get(timeout=10)
    assert good.get(timeout=10) == 10


def test_a_cursor_of_another_kind_of_source_fails_the_job(app: App, worker: InlineWorker, plain: redis.Redis) -> None:
    @app.task(bind=True, checkpoint=True)
    def task(self: Context) -> int:
        return len(list(self.iterate(NUMBERS)))

    result = task.delay()
    checkpoint = {"cursor": "id-7", "items": 7, "started": 1, "done": False}
    plain.hset(f"bull:{{default}}:{result.id}", FIELD, json.dumps(checkpoint))
    with pytest.raises(InvalidJobError, match="has the source of its task's loop changed"):
        result.get(timeout=10)


def test_the_checkpoint_of_a_removed_job_is_not_stored(app: App) -> None:
    keys = app._broker.keys("default")
    with pytest.raises(JobNotFoundError):
        app._broker.pool.run(store_checkpoint(keys, "removed", "token", "{}"))
