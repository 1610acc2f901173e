"""The base class of the outboxes: everything except access to the database."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import structlog

from bulltask.app import App
from bulltask.clock import Duration, to_ms
from bulltask.errors import ConfigError
from bulltask.jobs.flow import PlannedJob
from bulltask.outbox.relay import Relay
from bulltask.outbox.results import OutboxResults
from bulltask.outbox.sending import RowSender
from bulltask.outbox.store import Backlog, Store
from bulltask.outbox.stored import VERSION, StoredCall
from bulltask.ports import ResultReader
from bulltask.registry.ancestry import origin_of_jobs_sent_by, sent_by
from bulltask.registry.canvas import Canvas, check_canvas
from bulltask.registry.canvas_plan import plan_canvas
from bulltask.registry.current_job import current_job
from bulltask.registry.overrides import check_overrides_passed
from bulltask.registry.task import AnyTask

__all__ = ["NewRow", "OutboxBase", "check_task"]


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row to insert.

    Attributes:
        version: The version of the stored form.
        created_ms: The time of the call, in epoch milliseconds.
        payload: The stored form.
    """

    version: int
    created_ms: int
    payload: str


class OutboxBase:
    """An app's outbox in one database.

    Args:
        app: The app. Its workers send the rows.
        store: Accesses the rows.
        poll_interval: Seconds or ``timedelta`` between two reads of the table while it is empty.
        idempotency_ttl: Seconds or ``timedelta`` for which Redis remembers the ids of sent jobs. If a relay is killed
            before it has deleted a row, the row is sent again. During this time, that adds no job twice.

    Raises:
        ConfigError: A duration is invalid.
    """

    def __init__(self, app: App, store: Store, *, poll_interval: Duration, idempotency_ttl: Duration) -> None:
        self.app, self._store = app, store
        poll_ms, ttl_ms = to_ms(poll_interval, "poll_interval"), to_ms(idempotency_ttl, "idempotency_ttl")
        if poll_ms < 1 or ttl_ms < 1:
            raise ConfigError("poll_interval and idempotency_ttl of an outbox must be 0.001 s or more")
        self._poll_s, self._sender = poll_ms / 1000, RowSender(app, ttl_ms)
        app.outboxes.append(self)

    def backlog(self) -> Backlog:
        """Return how many rows are waiting, the age of the oldest, and how many rows have failed."""
        return self._store.backlog(self.app.now_ms())

    def run_relay(self, wait: Callable[[float], bool], logger: Any) -> None:
        """Send rows until ``wait`` returns true; call this in a separate thread."""
        self._relay(logger).run(wait)

    def after_fork(self) -> None:
        """Drop the database connections that this process has inherited."""
        self._store.after_fork()

    def _relay_all(self) -> int:
        relay, count = self._relay(structlog.get_logger("bulltask.outbox")), 0
        while (sent := relay.send_batch()).done or sent.failed:
            count += len(sent.done)
        return count

    def _relay(self, logger: Any) -> Relay:
        return Relay(self._store, self._sender, self._poll_s, self.app.now_ms, logger)

    def _write(self, call: Canvas[Any, Any], insert: Callable[[NewRow], object]) -> Any:
        """Insert the row of a call with ``insert``, and return the call's result handle."""
        check_canvas(call)
        call = check_overrides_passed(call)
        plan, now_ms = plan_canvas(call, self.app.config, origin_of_jobs_sent_by(current_job())), self.app.now_ms()
        self.app.send_planned(plan.roots, lambda roots: _ignore(insert(_row(roots, now_ms))))
        return plan.result(self._results(), now_ms)

    async def _awrite(self, call: Canvas[Any, Any], insert: Callable[[NewRow], Awaitable[object]]) -> Any:
        """:meth:`_write` for asyncio."""
        check_canvas(call)
        call = check_overrides_passed(call)
        plan, now_ms = plan_canvas(call, self.app.config, origin_of_jobs_sent_by(current_job())), self.app.now_ms()

        async def write(roots: Sequence[PlannedJob]) -> None:
            await insert(_row(roots, now_ms))

        await self.app.asend_planned(plan.roots, write)
        return plan.result(self._results(), now_ms)

    def _results(self) -> ResultReader:
        return cast("ResultReader", OutboxResults(self.app.results))


def check_task(task: object) -> None:
    """Check the task in ``outbox.delay(task, …)``.

    Raises:
        TypeError: It is not a task.
    """
    if not isinstance(task, AnyTask):
        raise TypeError(
            f"outbox.delay needs a task and its arguments, not {type(task).__qualname__}; outbox.send takes signatures "
            "such as task.s(…), and other canvases. Nothing was written"
        )


def _ignore(_: object) -> None:
    """Return nothing."""


def _row(roots: Sequence[PlannedJob], now_ms: int) -> NewRow:
    call = StoredCall.from_jobs(roots, now_ms)
    if call.single is not None and (job := current_job()) is not None:
        (roots[0].job,) = sent_by(job, [call.single])
    return NewRow(VERSION, now_ms, call.encode())
