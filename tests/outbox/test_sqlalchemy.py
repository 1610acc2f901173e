"""The outbox of SQLAlchemy: what is written, what reaches Redis, and when."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import redis
import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)

from bulltask import App, group
from bulltask.errors import BrokerUnavailableError, BulltaskError, ConfigError, EncodeError, ResultTimeoutError
from bulltask.jobs.clock import to_epoch_ms
from bulltask.outbox.sqlalchemy import Outbox
from bulltask.testing import InlineWorker, use_server
from tests.conftest import ServerFactory

Ran = list[Any]


def _options(client: redis.Redis, key: str) -> Any:
    stored: Any = client.hget(key, "opts")
    return json.loads(stored)


@pytest.fixture
def ran(app: App) -> Ran:
    """The calls that have run; their jobs are removed at once, so that Redis does not know their ids."""
    calls: Ran = []

    @app.task(name="add", result_expires=0, result_failure_expires=0)
    def add(x: int, y: int = 0) -> int:
        calls.append((x, y))
        return x + y

    @app.task(name="total", result_expires=0)
    def total(numbers: list[int]) -> int:
        calls.append(("total", sum(numbers)))
        return sum(numbers)

    return calls


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(database_url)
    yield engine
    engine.dispose()


@pytest.fixture
def outbox(app: App, engine: sa.Engine) -> Outbox:
    outbox = Outbox(app, engine, poll_interval=0.01)
    outbox.metadata.create_all(engine)
    return outbox


@pytest.fixture
def session(engine: sa.Engine) -> Iterator[orm.Session]:
    with orm.Session(engine) as session:
        yield session


@pytest.fixture
def inline(app: App, broker_url: str) -> Iterator[InlineWorker]:
    with use_server(app, broker_url), InlineWorker(app) as worker:
        yield worker


def test_a_committed_call_runs_once_and_its_row_is_deleted(
    app: App, ran: Ran, outbox: Outbox, session: orm.Session, inline: InlineWorker
) -> None:
    with session.begin():
        result = outbox.delay(session, app.tasks["add"], 1, y=2)
    assert outbox.backlog().waiting == 1
    assert outbox.relay() == 1
    assert result.get(timeout=5) == 3
    assert outbox.backlog().waiting == 0
    assert ran == [(1, 2)]


def test_a_call_that_is_rolled_back_never_runs(
    app: App, ran: Ran, outbox: Outbox, session: orm.Session, inline: InlineWorker
) -> None:
    add = app.tasks["add"]
    outbox.delay(session, add, 1)
    session.rollback()
    with session.begin():
        outbox.delay(session, add, 2)
        with session.begin_nested() as savepoint:
            outbox.delay(session, add, 3)
            savepoint.rollback()
    assert outbox.relay() == 1
    inline.run_jobs()
    assert ran == [(2, 0)]


def test_a_call_is_not_sent_before_the_commit(app: App, ran: Ran, outbox: Outbox, session: orm.Session) -> None:
    outbox.delay(session, app.tasks["add"], 1)
    assert outbox.relay() == 0
    session.commit()
    assert outbox.relay() == 1


def test_arguments_are_checked_when_the_call_is_written(
    app: App, ran: Ran, outbox: Outbox, session: orm.Session
) -> None:
    with pytest.raises(TypeError, match="unexpected"):
        outbox.delay(session, app.tasks["add"], unexpected=1)
    with pytest.raises(EncodeError):
        outbox.delay(session, app.tasks["add"], object())
    session.commit()
    assert outbox.backlog().waiting == 0


def test_rows_are_sent_in_insertion_order(
    app: App, ran: Ran, outbox: Outbox, session: orm.Session, inline: InlineWorker
) -> None:
    add = app.tasks["add"]
    with session.begin():
        for number in range(30):
            outbox.delay(session, add, number)
    assert outbox.relay() == 30
    inline.run_jobs()
    assert ran == [(number, 0) for number in range(30)]


def test_a_canvas_is_stored_and_sent_as_a_whole(
    app: App, ran: Ran, outbox: Outbox, session: orm.Session, inline: InlineWorker
) -> None:
    add, total = app.tasks["add"], app.tasks["total"]
    with session.begin():
        chord = outbox.send(session, group(add.s(1, 1), add.s(2, 2)) | total.s() | add.s(10))
        several = outbox.send(session, group(add.s(3), add.s(4)))
    assert outbox.relay() == 2
    assert chord.get(timeout=5) == 16
    assert several.get(timeout=5) == [3, 4]


def test_options_reach_the_job_and_times_count_from_the_call(
    app: App, ran: Ran, outbox: Outbox, session: orm.Session, redis_client: redis.Redis
) -> None:
    add = app.tasks["add"]
    options: dict[str, Any] = {
        "priority": 3,
        "headers": {"tenant": "é\x00"},
        "max_retries": 7,
        "time_limit": 9,
        "backoff": 4,
    }
    before_ms = app._now_ms()
    expires = datetime.now(UTC) + timedelta(days=1)
    with session.begin():
        result = outbox.send(session, add.s(1).set(countdown=3600, expires=7200, queue="mail", **options))
        due = outbox.send(session, add.s(1).set(countdown=0.001, expires=expires))
        sent = add.s(1).set(countdown=3600, queue="mail", **options).apply_async()
    threading.Event().wait(0.01)
    outbox.relay()
    job, direct = (_options(redis_client, f"bull:{{mail}}:{one.id}") for one in (result, sent))
    expires_ms, due_ms = job["bulltask"].pop("expires"), before_ms + 3_600_000
    assert before_ms + 7_200_000 <= expires_ms <= app._now_ms() + 7_200_000
    score = redis_client.zscore("bull:{mail}:delayed", result.id)
    assert score is not None
    assert due_ms <= score / 4096 <= due_ms + 1000, "not from the moment when the relay sends it"
    assert abs(job.pop("delay") - direct.pop("delay")) < 1000
    assert job == direct
    assert due.state == "waiting", "its countdown has passed"
    due_job = _options(redis_client, f"bull:{{default}}:{due.id}")
    assert due_job["bulltask"]["expires"] == to_epoch_ms(expires)


def test_get_waits_until_a_relay_has_sent_the_job(
    app: App, ran: Ran, outbox: Outbox, session: orm.Session, inline: InlineWorker
) -> None:
    with session.begin():
        result = outbox.delay(session, app.tasks["add"], 1)
    with pytest.raises(ResultTimeoutError, match="no relay has sent it"):
        result.get(timeout=0.01)
    relay = threading.Timer(0.05, outbox.relay)
    relay.start()
    assert result.get(timeout=20) == 1
    relay.join()


def _send_without_deleting(outbox: Outbox) -> None:
    """Send all rows like a relay that is killed before it deletes them."""

    class KilledError(Exception):
        pass

    def send_and_die(rows: Sequence[Any]) -> Any:
        outbox._sender.send(rows)
        raise KilledError

    with pytest.raises(KilledError):
        outbox._store.send_waiting(100, send_and_die)


def test_a_row_that_is_sent_again_adds_nothing_even_if_its_job_has_run_and_was_removed(
    app: App, ran: Ran, outbox: Outbox, session: orm.Session, inline: InlineWorker, redis_client: redis.Redis
) -> None:
    add, total = app.tasks["add"], app.tasks["total"]
    with session.begin():
        outbox.delay(session, add, 1)
        outbox.send(session, add.s(2).set(job_id="mine"))
        outbox.send(session, group(add.s(3), add.s(4)) | total.s())
        outbox.delay(session, add, 5)
    for _ in range(3):
        _send_without_deleting(outbox)
        inline.run_jobs()
    assert not redis_client.keys("bull:{default}:*-*-*")
    assert outbox.relay() == 4
    inline.run_jobs()
    assert sorted(ran, key=str) == sorted([(1, 0), (2, 0), (3, 0), (4, 0), ("total", 7), (5, 0)], key=str)


def test_a_job_id_can_be_used_again_after_its_job_was_removed(
    app: App, ran: Ran, outbox: Outbox, session: orm.Session, inline: InlineWorker
) -> None:
    for _ in range(2):
        with session.begin():
            outbox.send(session, app.tasks["add"].s(1).set(job_id="mine"))
        outbox.relay()
        inline.run_jobs()
    assert ran == [(1, 0), (1, 0)]


def test_a_row_that_cannot_be_sent_fails_with_its_error_and_does_not_block_others(
    app: App, ran: Ran, outbox: Outbox, session: orm.Session, engine: sa.Engine, inline: InlineWorker
) -> None:
    add = app.tasks["add"]
    with session.begin():
        outbox.delay(session, add, 1)
        session.execute(sa.insert(outbox.table).values(version=1, created_ms=0, payload="{}"))
        outbox.send(session, add.s(2).set(parent={"id": "no-such-job", "queue": "bull:{default}"}))
        outbox.send(session, (add.s(3) | add.s(4)))
        session.execute(sa.insert(outbox.table).values(version=2, created_ms=0, payload="of a newer version"))
    assert outbox.relay() == 2
    inline.run_jobs()
    assert ran == [(1, 0), (3, 0), (3, 4)]
    with engine.connect() as connection:
        errors = connection.scalars(sa.select(outbox.table.c.error).order_by(outbox.table.c.id)).all()
    assert [error and error.partition(":")[0] for error in errors] == ["DecodeError", "ParentNotFoundError", None]
    backlog = outbox.backlog()
    assert (backlog.waiting, backlog.failed) == (1, 2)
    with engine.begin() as connection:
        connection.execute(sa.update(outbox.table).values(error=None))
    assert outbox.relay() == 0, "they are tried again, and fail again"
    assert outbox.backlog().failed == 2


def test_rows_stay_while_redis_is_down_and_are_sent_when_it_is_back(
    app: App, ran: Ran, engine: sa.Engine, session: orm.Session, inline: InlineWorker
) -> None:
    down = App("down", "redis://127.0.0.1:1", broker_publish_timeout=0.05)
    outbox = Outbox(down, engine)
    outbox.metadata.create_all(engine)
    with session.begin():
        outbox.send(session, down.signature("add", kwargs={"x": 1}, job_id="one"))
    with pytest.raises(BrokerUnavailableError):
        outbox.relay()
    assert outbox.backlog().waiting == 1
    assert Outbox(app, engine).relay() == 1
    inline.run_jobs()
    assert ran == [(1, 0)]


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def warning(self, event: str, **fields: Any) -> None:
        self.lines.append(("warning", event))

    info = error = warning


def test_a_relay_continues_after_an_outage_of_the_database(
    app: App, ran: Ran, outbox: Outbox, session: orm.Session, engine: sa.Engine, inline: InlineWorker
) -> None:
    log, pauses = Log(), list[float]()

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        if len(pauses) == 2:
            outbox.metadata.create_all(engine)
            with session.begin():
                outbox.delay(session, app.tasks["add"], 1)
        return len(pauses) == 4

    outbox.metadata.drop_all(engine)
    outbox.run_relay(wait, log)
    assert pauses[0] == 0
    assert pauses[1] >= 0.08, "the relay waits before it tries again"
    assert pauses[2:] == [0.01] * 2, "then it reads every `poll_interval`"
    assert [event for _, event in log.lines] == ["Outbox rows could not be sent", "Outbox relay recovered"]
    inline.run_jobs()
    assert ran == [(1, 0)]


def test_a_relay_continues_after_an_outage_of_redis(
    ran: Ran, engine: sa.Engine, session: orm.Session, server_factory: ServerFactory
) -> None:
    server = server_factory()
    app = App("survivor", server.url, broker_publish_timeout=0.05)
    outbox = Outbox(app, engine, poll_interval=0.01)
    outbox.metadata.create_all(engine)
    log, rounds, result = Log(), 0, None

    def wait(_: float) -> bool:
        nonlocal rounds, result
        rounds += 1
        if rounds == 2:
            server.stop()
            with session.begin():
                result = outbox.send(session, app.signature("add", kwargs={"x": 1}))
        if rounds == 4:
            server_factory(port=server.port)
        return rounds == 5

    outbox.run_relay(wait, log)
    assert [event for _, event in log.lines] == ["Outbox rows could not be sent"] * 2 + ["Outbox relay recovered"]
    assert result is not None
    assert result.state == "waiting"
    assert outbox.backlog().waiting == 0
    app.close()


@pytest.mark.slow
def test_many_relays_at_the_same_time_add_each_job_once(
    app: App, ran: Ran, outbox: Outbox, session: orm.Session, inline: InlineWorker
) -> None:
    add, rows = app.tasks["add"], 300
    with session.begin():
        for number in range(rows):
            outbox.send(session, add.s(number) if number % 10 else add.s(number) | app.tasks["add"].si(-1))
    stop = threading.Event()
    threads = [threading.Thread(target=outbox.run_relay, args=(stop.wait, Log())) for _ in range(4)]
    for thread in threads:
        thread.start()
    while outbox.backlog().waiting:
        inline.run_jobs()
    stop.set()
    for thread in threads:
        thread.join()
    inline.run_jobs()
    assert sorted(x for x, _ in ran) == [-1] * (rows // 10) + list(range(rows))


async def test_an_async_session_writes_and_an_async_engine_relays(
    app: App, ran: Ran, database_url: str, async_url: Callable[[str], str], broker_url: str
) -> None:
    engine = create_async_engine(async_url(database_url))
    outbox = Outbox(app, engine)
    async with engine.begin() as connection:
        await connection.run_sync(outbox.metadata.create_all)
    add = app.tasks["add"]
    async with AsyncSession(engine) as session, session.begin():
        result = await outbox.adelay(session, add, 1, 2)
        both = await outbox.asend(session, group(add.s(3), add.s(4)))
    async with AsyncSession(engine) as session:
        await outbox.adelay(session, add, 5)  # is rolled back
    with pytest.raises(BulltaskError, match="arelay"):
        outbox.relay()
    assert await outbox.arelay() == 2
    assert await outbox.arelay() == 0
    await engine.dispose()
    assert (result.state, [one.state for one in both.results]) == ("waiting", ["waiting", "waiting"])


def test_the_relay_of_an_async_engine_has_an_event_loop(
    app: App, ran: Ran, outbox: Outbox, session: orm.Session, database_url: str, async_url: Callable[[str], str]
) -> None:
    with session.begin():
        result = outbox.delay(session, app.tasks["add"], 1)
    engine = create_async_engine(async_url(database_url))
    stops = iter([False, False, True])
    Outbox(app, engine).run_relay(lambda seconds: next(stops), Log())
    assert result.state == "waiting"


def _async(engine: sa.Engine) -> AsyncEngine:
    return create_async_engine(str(engine.url).replace("sqlite:", "sqlite+aiosqlite:"))


def _async_scoped(engine: sa.Engine) -> Any:
    return async_scoped_session(_async_maker(engine), scopefunc=lambda: 0)


def _async_maker(engine: sa.Engine) -> Any:
    return async_sessionmaker(_async(engine))


WRONG: dict[str, tuple[str, Callable[[sa.Engine], Any], str]] = {
    "AsyncSession in delay": ("sync", lambda engine: AsyncSession(_async(engine)), "adelay"),
    "async_scoped_session in delay": ("sync", _async_scoped, "adelay"),
    "scoped AsyncSession in delay": ("sync", lambda engine: orm.scoped_session(_async_maker(engine)), "adelay"),
    "Session in adelay": ("async", orm.Session, r"outbox\.delay"),
    "scoped_session in adelay": ("async", lambda engine: orm.scoped_session(orm.sessionmaker(engine)), "delay"),
    "Connection in delay": ("sync", sa.Connection, "not Connection"),
    "Connection in adelay": ("async", sa.Connection, "not Connection"),
    "AsyncConnection in delay": ("sync", lambda engine: AsyncConnection(_async(engine)), "not AsyncConnection"),
    "AsyncConnection in adelay": ("async", lambda engine: AsyncConnection(_async(engine)), "not AsyncConnection"),
    "sessionmaker in delay": ("sync", orm.sessionmaker, "not sessionmaker"),
    "nothing in adelay": ("async", lambda _: None, "not NoneType"),
}


@pytest.mark.filterwarnings("ignore:Using `scoped_session` with asyncio is deprecated")
@pytest.mark.parametrize("case", WRONG)
async def test_a_method_refuses_a_session_that_it_cannot_write_with(
    app: App, ran: Ran, tmp_path: Path, case: str
) -> None:
    kind, make, message = WRONG[case]
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'test.db'}")
    outbox, add = Outbox(app, engine), app.tasks["add"]
    outbox.metadata.create_all(engine)
    for call in ("delay", "send"):
        method, argument = getattr(outbox, call if kind == "sync" else f"a{call}"), add if call == "delay" else add.s(1)
        with pytest.raises(TypeError, match=f"{message}.* Nothing was written"):
            _ = method(make(engine), argument) if kind == "sync" else await method(make(engine), argument)
    assert outbox.backlog().waiting == 0
    engine.dispose()


def test_an_outbox_refuses_what_is_not_an_engine_a_task_or_a_canvas(app: App, ran: Ran) -> None:
    engine = sa.create_engine("sqlite://")

    async def connect() -> sa.Engine:
        return engine

    for wrong in ("sqlite://", orm.Session(engine), AsyncSession(_async(engine)), None):
        with pytest.raises(TypeError, match=f"not {type(wrong).__name__}"):
            Outbox(app, cast(Any, wrong))
    for function in (orm.sessionmaker(engine), connect):
        with pytest.raises(TypeError, match="needs the Engine"):
            Outbox(app, cast(Any, function)).backlog()
    outbox, session, add = Outbox(app, engine), orm.Session(engine), app.tasks["add"]
    with pytest.raises(TypeError, match=r"outbox\.send takes signatures"):
        outbox.delay(session, cast(Any, add.s(1)))
    coroutine = add.adelay(1)
    for call in (add, coroutine):
        with pytest.raises(TypeError, match="a canvas consists of signatures"):
            outbox.send(session, cast(Any, call))
    coroutine.close()


def test_a_session_of_another_database_is_rejected(app: App, ran: Ran, outbox: Outbox) -> None:
    with orm.Session(sa.create_engine("sqlite://")) as session, pytest.raises(ConfigError, match="this outbox is in"):
        outbox.delay(session, app.tasks["add"], 1)


def test_a_scoped_session_and_a_function_that_returns_the_engine(app: App, ran: Ran, engine: sa.Engine) -> None:
    outbox = Outbox(app, lambda: engine, metadata=(metadata := sa.MetaData()))
    metadata.create_all(engine)
    session = orm.scoped_session(orm.sessionmaker(engine))
    outbox.delay(session, app.tasks["add"], 1)
    session.commit()
    session.remove()
    assert outbox.relay() == 1


def test_middleware_sees_the_call_when_it_is_written(
    app: App, ran: Ran, outbox: Outbox, session: orm.Session, redis_client: redis.Redis
) -> None:
    from bulltask.signals import before_task_publish  # noqa: PLC0415

    def add_header(headers: dict[str, Any], **_: Any) -> None:
        headers["tenant"] = threading.current_thread().name

    before_task_publish.connect(add_header)
    with session.begin():
        result = outbox.delay(session, app.tasks["add"], 1)
    before_task_publish.disconnect(add_header)
    relay = threading.Thread(target=outbox.relay)
    relay.start()
    relay.join()
    stored = _options(redis_client, f"bull:{{default}}:{result.id}")
    assert json.loads(stored["bulltask"]["headers"]) == {"tenant": threading.current_thread().name}


def test_in_eager_mode_the_relay_runs_the_jobs(engine: sa.Engine, session: orm.Session) -> None:
    app, calls = App("eager", task_always_eager=True), list[int]()

    @app.task
    def task(number: int) -> None:
        calls.append(number)

    outbox = Outbox(app, engine)
    outbox.metadata.create_all(engine)
    with session.begin():
        outbox.delay(session, task, 1)
    assert calls == []
    assert outbox.relay() == 1
    assert calls == [1]
