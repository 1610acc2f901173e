"""``Ignore`` after ``update_state``: the job ends with the state that its task has set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bulltask import App, Context, JobState, Task, TaskError, TaskRevokedError, current_task
from bulltask.errors import Ignore
from bulltask.events import JobFailed
from bulltask.testing import InlineWorker, use_server

pytestmark = pytest.mark.redis


class Refused(Exception):
    """An error of the project."""


@pytest.fixture
def app(broker_url: str) -> Iterator[App]:
    app = App("ignored", "redis://unreachable.invalid:1", task_max_retries=5)

    @app.task(name="ends", bind=True, autoretry_for=(BaseException,))
    def ends(self: Context, state: str, meta: Any = None) -> None:
        self.update_state(state=state, meta=meta)
        raise Ignore

    with use_server(app, broker_url):
        yield app


@pytest.mark.parametrize(
    ("meta", "kind", "reason"),
    [
        ("no such customer", TaskError, "no such customer"),
        ({"exc_type": "ValueError", "exc_message": "no such customer"}, ValueError, "no such customer"),
        ({"exc_type": "ValueError", "exc_message": ["line 1", "line 2"], "more": 1}, ValueError, "line 1\nline 2"),
        ({"exc_type": "Refused", "exc_module": __name__, "exc_message": "no"}, Refused, "no"),
        ({"exc_type": "Missing", "exc_module": "nowhere", "exc_message": "no"}, TaskError, "no"),
        ({"exc_type": "ValueError"}, ValueError, "ValueError"),
        ({"step": 3}, TaskError, '{"step": 3}'),
        (None, TaskError, "the task has set the state FAILURE"),
    ],
)
def test_ignore_after_the_state_failure_fails_the_job_with_the_reason_in_meta(
    app: App, worker: InlineWorker, meta: Any, kind: type[Exception], reason: str
) -> None:
    handle = app.tasks["ends"].delay("FAILURE", meta)
    (failure,) = [event for event in worker.run_jobs(propagate=False) if isinstance(event, JobFailed)]
    assert (failure.error, failure.attempts_made, failure.expected) == (reason, 1, True)
    snapshot = handle.snapshot()
    assert (snapshot.state, snapshot.failed_reason, handle.status) == (JobState.FAILED, reason, "FAILURE")
    assert snapshot.progress == {"state": "FAILURE", "meta": meta}
    with pytest.raises(kind) as caught:
        handle.get()
    assert type(caught.value) is kind
    assert type(handle.info) is kind
    assert kind is TaskError or str(caught.value) == reason or caught.value.args == ()


def test_ignore_after_other_states_revokes_or_completes_the_job(app: App, worker: InlineWorker) -> None:
    ends = app.tasks["ends"]
    revoked, succeeded, other = ends.delay("REVOKED"), ends.delay("SUCCESS", {"rows": 3}), ends.delay("SKIPPED", 1)
    worker.run_jobs(propagate=False)
    with pytest.raises(TaskRevokedError):
        revoked.get()
    assert (revoked.status, succeeded.status, other.status) == ("REVOKED", "SUCCESS", "SUCCESS")
    results: list[Any] = [succeeded.get(), other.get()]
    assert results == [{"rows": 3}, None]


def test_only_the_last_state_of_the_attempt_that_ends_with_ignore_counts(app: App, worker: InlineWorker) -> None:
    @app.task(name="changes", bind=True)
    def changes(self: Context, how: str) -> str:
        self.update_state(state="FAILURE", meta="no")
        if how == "returns":
            return "done"
        if how == "retries" and not self.request.retries:
            self.retry(countdown=0)
        if how == "retries":
            raise Ignore
        self.update_state(state="PROGRESS", meta=1)
        raise Ignore

    # The second attempt also sets FAILURE before it ends.
    returns, retries, goes_on = (changes.delay(how) for how in ("returns", "retries", "goes on"))
    worker.run_jobs(propagate=False)
    results: list[str | None] = [returns.get(), goes_on.get()]
    assert results == ["done", None]
    assert (retries.status, retries.snapshot().failed_reason) == ("FAILURE", "no")


def test_the_state_may_be_set_in_async_tasks_task_classes_and_functions_that_a_task_calls(
    app: App, worker: InlineWorker
) -> None:
    failures: list[str] = []

    class Base(Task):
        def on_failure(self, exc: BaseException, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
            failures.append(str(exc))

    @app.task(name="awaits", bind=True)
    async def awaits(self: Context) -> None:
        await self.aupdate_state(state="FAILURE", meta="async")
        raise Ignore

    @app.task(name="unbound")
    def unbound() -> None:
        current_task.update_state(state="FAILURE", meta="unbound")
        raise Ignore

    @app.task(name="based", base=Base, bind=True)
    def based(self: Any) -> None:
        self.update_state(state="FAILURE", meta="based")
        raise Ignore

    handles = [task.delay() for task in (awaits, unbound, based)]
    worker.run_jobs(propagate=False)
    assert [handle.snapshot().failed_reason for handle in handles] == ["async", "unbound", "based"]
    assert failures == ["based"]  # the job has failed, so the handlers for failures are called
    assert unbound.apply(throw=False).failed()
