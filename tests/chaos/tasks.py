"""The app of a cell's worker or sender: its tasks, and what a sender sends."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any, Final

from bulltask import App, Context, group
from tests.chaos.points import reach, record

__all__ = ["SOURCE", "define_tasks", "send"]

SOURCE: Final = """
from tests.chaos import points, tasks

tasks.define_tasks(app)
points.install(os.environ["CHAOS_ROLE"])
if os.environ["CHAOS_ROLE"] == "sender":
    tasks.send(app)
"""
"""Added to the module of a cell's app."""

RETRY_S: Final = 0.05


def define_tasks(app: App) -> None:
    """Define the tasks. In the mode ``async``, they are coroutine functions."""
    is_async = os.environ["CHAOS_MODE"] == "async"
    for name, task in {"work": work_async if is_async else work, "flaky": flaky_async if is_async else flaky}.items():
        app.task(bind=True, name=name)(task)
    app.task(bind=True, name="body")(body)
    app.task(bind=True, name="crash")(crash)
    if database := os.environ["CHAOS_DATABASE"]:
        import sqlalchemy as sa  # noqa: PLC0415 - slow, and the other cells do not need it

        from bulltask.outbox.sqlalchemy import Outbox  # noqa: PLC0415

        Outbox(app, sa.create_engine(database), poll_interval=0.02)


def start(self: Context, expected: int = 1) -> None:
    """Record the start of an attempt; ``expected`` is the number of attempts that the job needs without a fault."""
    record("start", job=self.request.id, expected=expected)
    reach("run the task", "before")


def work(self: Context, seconds: float = 0.0) -> None:
    """Run for ``seconds``."""
    start(self)
    if seconds:
        threading.Event().wait(seconds)


async def work_async(self: Context, seconds: float = 0.0) -> None:
    """Run for ``seconds``."""
    start(self)
    await asyncio.sleep(seconds)


def flaky(self: Context) -> None:
    """Fail in the first attempt."""
    start(self, expected=2)
    if self.request.retries == 0:
        raise self.retry(countdown=RETRY_S)


async def flaky_async(self: Context) -> None:
    """Fail in the first attempt."""
    flaky(self)


def body(self: Context, results: list[None]) -> None:
    """Run after a group of `work`."""
    start(self)


def crash(self: Context) -> None:
    """Kill the child in the first attempt."""
    start(self, expected=2)
    if self.request.attempts_started == 1:
        os._exit(1)


def send(app: App) -> None:
    """Send jobs in every way, record which sends have returned, and exit."""
    queue = os.environ["CHAOS_QUEUE"]
    call = app.signature("work").set(queue=queue)
    canvas: Any = group([call, call, call]) | app.signature("body").set(queue=queue)
    ways: list[tuple[int, Any]] = [(1, call.delay), (2, lambda: app.send_many([call, call])), (4, canvas.delay)]
    if os.environ["CHAOS_MODE"] == "async":
        ways = [(1, lambda: asyncio.run(call.adelay())), (4, lambda: asyncio.run(canvas.adelay()))]
    for jobs, way in ways:
        record("sending", jobs=jobs)
        way()
        record("sent", jobs=jobs)
    os._exit(0)
