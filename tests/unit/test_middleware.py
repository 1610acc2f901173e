"""Middleware: what an app accepts, and which of its methods are called."""

from __future__ import annotations

from typing import Any, cast

import pytest

from bulltask import App, ConfigError, Middleware, Request
from bulltask.hooks import OutgoingJob
from bulltask.jobs.job import RunningJob, StoredOptions
from bulltask.signals import task_postrun, task_prerun
from bulltask.worker.outcomes import ReleasedOutcome
from bulltask.worker.run_hooks import RunHooks


class AsyncBeforeSend(Middleware):
    async def before_send(self, job: OutgoingJob) -> None:  # type: ignore[override]
        ...


class PlainABeforeRun(Middleware):
    def abefore_run(self, request: Request) -> None:  # type: ignore[override]
        ...


@pytest.mark.parametrize(
    ("middleware", "problem"),
    [
        (Middleware, r"must be an instance of bulltask.Middleware, not <class"),
        (AsyncBeforeSend(), r"AsyncBeforeSend.before_send is an async def: name it abefore_send"),
        (PlainABeforeRun(), r"PlainABeforeRun.abefore_run is not an async def: make it an async def"),
    ],
)
def test_unsuitable_middleware_is_rejected(middleware: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        App("tested").add_middleware(middleware)


def test_middleware_is_called_only_for_what_it_overrides() -> None:
    class Sends(Middleware):
        def before_send(self, job: OutgoingJob) -> None: ...

    class Runs(Middleware):
        async def aafter_run(self, request: Request, result: Any, exception: BaseException | None) -> None: ...

    app = App("tested")
    task = app.task(name="tested")(lambda: None)
    assert not RunHooks(app).has_hooks(task)
    sends, runs = Sends(), Runs()
    app.add_middleware(sends)
    assert not RunHooks(app).has_hooks(task)
    app.add_middleware(runs)
    assert RunHooks(app).has_hooks(task)
    assert (app._middleware.sending, app._middleware.running) == ((sends,), (runs,))


@pytest.mark.parametrize(("outcome", "state"), [(None, "IGNORED"), (ReleasedOutcome(), "RETRY")])
def test_task_postrun_follows_each_task_prerun_even_if_the_lock_was_lost(outcome: Any, state: str) -> None:
    app, states = App("tested"), list[str]()
    task = app.task(name="double")(lambda number: 2 * number)
    job = RunningJob("default", "7", "double", b"{}", StoredOptions(), 0, 0, 0, 1, "", "", None)

    def prerun(**_: Any) -> None:
        states.append("started")

    def postrun(state: str, **_: Any) -> None:
        states.append(state)

    task_prerun.connect(prerun)
    task_postrun.connect(postrun)
    hooks = RunHooks(app)
    hooks.start(job, cast("Any", task), Request.of(job, (2,), {}), None).call(2)
    hooks.finished(job, outcome)
    assert states == ["started", state]
    hooks.finished(job, outcome)
    assert states == ["started", state], "a job whose task was not called has no task_postrun"


def test_hooks_are_called_in_eager_mode() -> None:
    app, seen = App("tested", task_always_eager=True), list[Any]()

    class PassesOn(Middleware):
        def before_send(self, job: OutgoingJob) -> None:
            job.headers["tenant"] = "t-1"

        def before_run(self, request: Request) -> None:
            seen.append(request.headers)

    def postrun(state: str, retval: Any, **_: Any) -> None:
        seen.append((state, retval))

    task_postrun.connect(postrun)
    app.add_middleware(PassesOn())
    double = app.task(name="double")(lambda number: 2 * number)
    assert double.delay(2).get() == 4
    (double.s(1) | double.s()).delay()
    assert seen == [
        {"tenant": "t-1"},
        ("SUCCESS", 4),
        {"tenant": "t-1"},
        ("SUCCESS", 2),
        {"tenant": "t-1"},
        ("SUCCESS", 4),
    ]
