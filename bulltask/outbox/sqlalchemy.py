"""An outbox for SQLAlchemy 2, with ``Session`` and ``AsyncSession``."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar, cast, overload

from bulltask.app import App
from bulltask.jobs.clock import Duration
from bulltask.jobs.errors import BulltaskError, ConfigError, MissingExtraError
from bulltask.outbox.outbox import (
    ERRORS_SHOWN,
    TABLE,
    VERSION,
    Backlog,
    NewRow,
    OutboxBase,
    Row,
    TransferOutcome,
    check_task,
)
from bulltask.registry.canvas import Canvas, Group, GroupChain
from bulltask.registry.results import AsyncResult, GroupResult
from bulltask.registry.task import AnyTask

try:
    import sqlalchemy as sa
    from sqlalchemy import orm
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session
    from sqlalchemy.util import greenlet_spawn
except ModuleNotFoundError as exc:
    raise MissingExtraError(f"{__name__} needs {exc.name}: pip install 'bulltask[sqlalchemy]'") from exc

__all__ = ["Outbox"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_SKIPS_LOCKED: Final = frozenset({"postgresql"})
"""Dialects in which a relay locks the rows that it sends, so that other relays skip them."""

Engine = sa.Engine | AsyncEngine
SyncSession = orm.Session | orm.scoped_session[Any]
AnyAsyncSession = AsyncSession | async_scoped_session[Any]


class Outbox(OutboxBase):
    """An outbox in a database that SQLAlchemy connects to.

    ::

        outbox = Outbox(app, engine, metadata=Base.metadata)

        with Session(engine) as session, session.begin():
            session.add(order)
            outbox.delay(session, send_invoice, order.id)

    Args:
        app: The app. Its workers send the rows.
        engine: The ``Engine`` or ``AsyncEngine`` from which relays get their connections, or a function that returns
            one.
        metadata: The ``MetaData`` to which the table ``bulltask_outbox`` is added; default: a new one.
        poll_interval: Seconds or ``timedelta`` between two reads of the table while it is empty.
        idempotency_ttl: Seconds or ``timedelta`` for which Redis remembers the ids of sent jobs (default: a day). If a
            relay is killed before it has deleted a row, the row is sent again. During this time, that adds no job
            twice.

    Attributes:
        metadata: Contains the table, for ``metadata.create_all(engine)`` or Alembic.
        table: The table.

    Raises:
        ConfigError: A duration is invalid.
        TypeError: ``engine`` is none of these, but for example a connection or a session.
    """

    def __init__(
        self,
        app: App,
        engine: Engine | Callable[[], Engine],
        *,
        metadata: sa.MetaData | None = None,
        poll_interval: Duration = 0.2,
        idempotency_ttl: Duration = 86_400,
    ) -> None:
        if not callable(engine):
            _check_engine(engine)
        self.metadata = sa.MetaData() if metadata is None else metadata
        self.table = _table(self.metadata)
        self._rows = _Rows(self.table, engine)
        super().__init__(app, self._rows, poll_interval=poll_interval, idempotency_ttl=idempotency_ttl)

    def delay(self, session: SyncSession, task: AnyTask[P, R], /, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """Write a call of a task to the outbox, in the session's transaction.

        Returns:
            The result handle. The job does not exist until the transaction has committed and a relay has sent the job;
            until then, ``get()`` waits.

        Raises:
            TypeError: The arguments do not match the function, or ``session`` is not a ``Session``: an ``AsyncSession``
                needs :meth:`adelay`. Nothing was written.
            EncodeError, PayloadTooLargeError: The arguments cannot be stored. Nothing was written.
            ConfigError: The session and the relays are connected to different databases. Nothing was written.
        """
        actual = _sync_session(session)
        check_task(task)
        return self.send(actual, task.s(*args, **kwargs))

    async def adelay(
        self, session: AnyAsyncSession, task: AnyTask[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncResult[R]:
        """:meth:`delay` for an ``AsyncSession``."""
        actual = _async_session(session)
        check_task(task)
        return await self.asend(actual, task.s(*args, **kwargs))

    @overload
    def send(self, session: SyncSession, call: Group[Any, R] | GroupChain[Any, R]) -> GroupResult[R]: ...  # type: ignore[overload-overlap]
    @overload
    def send(self, session: SyncSession, call: Canvas[Any, R]) -> AsyncResult[R]: ...

    def send(self, session: SyncSession, call: Canvas[Any, Any]) -> Any:
        """Write a signature, chain, group or chord to the outbox, in the session's transaction.

        ::

            outbox.send(session, send_invoice.s(order.id).set(countdown=60))

        ``countdown`` and ``expires`` count from this call. Return value and errors are those of :meth:`delay`.
        """
        actual = _sync_session(session)
        self._check(actual)
        return self._write(call, lambda row: actual.execute(self._insert(row)))

    @overload
    async def asend(self, session: AnyAsyncSession, call: Group[Any, R] | GroupChain[Any, R]) -> GroupResult[R]: ...  # type: ignore[overload-overlap]
    @overload
    async def asend(self, session: AnyAsyncSession, call: Canvas[Any, R]) -> AsyncResult[R]: ...

    async def asend(self, session: AnyAsyncSession, call: Canvas[Any, Any]) -> Any:
        """:meth:`send` for an ``AsyncSession``."""
        actual = _async_session(session)
        self._check(actual.sync_session)
        return await self._awrite(call, lambda row: actual.execute(self._insert(row)))

    def relay(self) -> int:
        """Send all committed rows now, for tests and scripts; return their number.

        Raises:
            BrokerError: Redis cannot store them.
            BulltaskError: The engine is an ``AsyncEngine``: use :meth:`arelay`.
        """
        if self._rows.is_async:
            raise BulltaskError("the outbox has an AsyncEngine: use `await outbox.arelay()`")
        return self._relay_all()

    async def arelay(self) -> int:
        """:meth:`relay` for an ``AsyncEngine``; it blocks the event loop while it sends."""
        if not self._rows.is_async:
            return await asyncio.to_thread(self._relay_all)
        return await greenlet_spawn(self._relay_all)

    def backlog(self) -> Backlog:
        """Return how many rows are waiting, the age of the oldest, and how many rows have failed."""
        return self._rows.blocking(super().backlog)

    def run_relay(self, wait: Callable[[float], bool], logger: Any) -> None:
        """Send rows until ``wait`` returns true; call this in a separate thread."""
        self._rows.blocking(partial(super().run_relay, wait, logger))

    def _insert(self, row: NewRow) -> sa.Insert:
        return sa.insert(self.table).values(version=row.version, created_ms=row.created_ms, payload=row.payload)

    def _check(self, session: orm.Session) -> None:
        """Raise ``ConfigError`` if the relays would never see the rows."""
        url, own = session.get_bind(clause=sa.insert(self.table)).engine.url, self._rows.engine.url
        if (url.host, url.port, url.database) != (own.host, own.port, own.database):
            raise ConfigError(
                f"the session is connected to {url!r}, but this outbox is in {own!r}; use an Outbox that was created "
                "with the session's engine"
            )


def _sync_session(given: object) -> orm.Session:
    """Return the ``Session`` that :meth:`Outbox.delay` was called with.

    Without this check, the coroutine of an ``AsyncSession`` would never be awaited, so no row would be written.
    """
    found = given() if isinstance(given, orm.scoped_session) else given
    if isinstance(found, orm.Session):
        return found
    if isinstance(found, AsyncSession | async_scoped_session):
        raise TypeError(
            "an AsyncSession needs the async methods of the outbox: `await outbox.adelay(session, …)` or "
            "`await outbox.asend(session, …)`. Nothing was written"
        )
    raise _wrong_session(found)


def _async_session(given: object) -> AsyncSession:
    """Return the ``AsyncSession`` that :meth:`Outbox.adelay` was called with."""
    found = given() if isinstance(given, async_scoped_session) else given
    if isinstance(found, AsyncSession):
        return found
    if isinstance(found, orm.Session | orm.scoped_session):
        raise TypeError(
            "a Session needs the sync methods of the outbox: outbox.delay(session, …) or outbox.send(session, …). "
            "Nothing was written"
        )
    raise _wrong_session(found)


def _wrong_session(found: object) -> TypeError:
    return TypeError(
        "the first argument of the outbox's methods is the Session or AsyncSession in whose transaction the call is "
        f"written, not {type(found).__qualname__}. Nothing was written"
    )


def _check_engine(found: object) -> None:
    if not isinstance(found, sa.Engine | AsyncEngine):
        raise TypeError(
            "an Outbox needs the Engine or AsyncEngine from which its relays get connections, or a function that "
            f"returns one, not {type(found).__qualname__}"
        )


def _table(metadata: sa.MetaData) -> sa.Table:
    return sa.Table(
        TABLE,
        metadata,
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("payload", sa.Text, nullable=False),
        sa.Column("error", sa.Text),
        # Otherwise, SQLite would reuse the key of a deleted row, and a slow relay could delete the wrong row.
        sqlite_autoincrement=True,
    )


class _Rows:
    """Implements :class:`bulltask.outbox.outbox.Store`.

    With an ``AsyncEngine``, its methods must be called in a greenlet of SQLAlchemy (:meth:`blocking`).
    """

    def __init__(self, table: sa.Table, engine: Engine | Callable[[], Engine]) -> None:
        self._table = table
        self._given = engine

    @property
    def _any_engine(self) -> Engine:
        if not isinstance(self._given, sa.Engine | AsyncEngine):
            found = self._given()
            if inspect.iscoroutine(found):
                found.close()  # it is never awaited; the error says so
            _check_engine(found)
            self._given = found
        return self._given

    @property
    def is_async(self) -> bool:
        return isinstance(self._any_engine, AsyncEngine)

    @property
    def engine(self) -> sa.Engine:
        engine = self._any_engine
        return engine.sync_engine if isinstance(engine, AsyncEngine) else engine

    def blocking(self, work: Callable[[], T]) -> T:
        """Call a function that uses the rows; if the engine is async, in a new event loop."""
        if not self.is_async:
            return work()

        async def run() -> T:
            try:
                return await greenlet_spawn(work)
            finally:
                await cast(AsyncEngine, self._any_engine).dispose()  # its connections belong to this loop

        return asyncio.run(run())

    def send_waiting(self, limit: int, send: Callable[[Sequence[Row]], TransferOutcome]) -> TransferOutcome:
        if self.engine.dialect.name in _SKIPS_LOCKED:
            with self.engine.begin() as connection:
                return self._finish(connection, send(self._read(connection, limit)))
        with self.engine.connect() as connection:
            rows = self._read(connection, limit)
        sent = send(rows)
        if not rows:
            return sent
        with self.engine.begin() as connection:
            return self._finish(connection, sent)

    def _read(self, connection: sa.Connection, limit: int) -> list[Row]:
        table = self._table.c
        waiting = sa.select(table.id, table.payload).where(table.error.is_(None), table.version <= VERSION)
        query = waiting.order_by(table.id).limit(limit)
        if self.engine.dialect.name in _SKIPS_LOCKED:
            query = query.with_for_update(skip_locked=True)
        return [Row(row_id, payload) for row_id, payload in connection.execute(query)]

    def _finish(self, connection: sa.Connection, sent: TransferOutcome) -> TransferOutcome:
        if sent.done:
            connection.execute(sa.delete(self._table).where(self._table.c.id.in_(sent.done)))
        for row_id, error in sent.failed.items():
            connection.execute(sa.update(self._table).where(self._table.c.id == row_id).values(error=error))
        return sent

    def backlog(self, now_ms: int) -> Backlog:
        table, count = self._table.c, sa.func.count()
        query = sa.select(table.error.is_not(None), count, sa.func.min(table.created_ms)).group_by(
            table.error.is_not(None)
        )
        with self.engine.connect() as connection:
            found = {bool(failed): (rows, oldest_ms) for failed, rows, oldest_ms in connection.execute(query)}
            errors: dict[str, str] = {}
            if failed := found.get(True, (0, 0))[0]:
                first = sa.select(table.id, table.error).where(table.error.is_not(None)).order_by(table.id)
                errors = {str(row_id): error for row_id, error in connection.execute(first.limit(ERRORS_SHOWN))}
        waiting, oldest_ms = found.get(False, (0, now_ms))
        return Backlog(waiting, max(0, now_ms - oldest_ms) / 1000, failed, errors, self._table.fullname)

    def after_fork(self) -> None:
        self.engine.dispose(close=False)

    def close(self) -> None:
        """Do nothing: the engine's pool replaces broken connections."""
