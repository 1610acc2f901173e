"""The backend for Django's tasks: ``django.tasks``, or the package ``django-tasks``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import transaction
from django.test import override_settings

from bulltask import App
from bulltask.contrib.django.backend import BulltaskBackend, _find_task
from bulltask.contrib.django.project import api, task_backends
from bulltask.errors import BulltaskError
from bulltask.testing import InlineWorker, use_server
from bulltask.worker.run import default_queues
from tests.django import task_functions as tasks

pytestmark = pytest.mark.redis

READY, RUNNING, FAILED, SUCCESSFUL = api("base").TaskResultStatus
signals: Any = api("signals")
exceptions: Any = api("exceptions")


@pytest.fixture
def worker(project: App) -> Iterator[InlineWorker]:
    with InlineWorker(project) as worker:
        yield worker


@pytest.fixture
def sent() -> Iterator[list[tuple[str, Any, Any]]]:
    """The signals: name, status, and the sender."""
    found: list[tuple[str, Any, Any]] = []
    receivers = {}
    for name in ("task_enqueued", "task_started", "task_finished"):

        def receive(sender: Any, task_result: Any, *, name: str = name, **_: Any) -> None:
            found.append((name, task_result.status, sender))

        receivers[name] = receive
        getattr(signals, name).connect(receive)
    yield found
    for name, receive in receivers.items():
        getattr(signals, name).disconnect(receive)


@pytest.mark.parametrize("task", [tasks.add, tasks.add_async])
def test_a_task_runs_in_a_worker_and_its_result_is_read_from_redis(
    project: App, worker: InlineWorker, task: Any
) -> None:
    result = task.enqueue(1, b=2)
    assert (result.status, result.args, result.kwargs, result.attempts) == (READY, [1], {"b": 2}, 0)
    assert task.get_result(result.id) == result
    worker.run_jobs()
    done = task.get_result(result.id)
    assert (done.status, done.return_value, done.attempts, done.errors) == (SUCCESSFUL, 3, 1, [])
    assert (done.task, done.worker_ids) == (task, ["in-process"])
    assert done.enqueued_at <= done.started_at <= done.finished_at
    assert done.started_at == done.last_attempted_at
    result.refresh()
    assert result == done


async def test_async_code_enqueues_and_reads_results(project: App, worker: InlineWorker) -> None:
    result = await tasks.add_async.aenqueue(1)
    await worker.arun_jobs()
    await result.arefresh()
    assert (result.return_value, (await tasks.add_async.aget_result(result.id)).return_value) == (1, 1)


def test_a_job_has_the_path_of_its_task_as_its_name_and_the_plain_arguments(project: App) -> None:
    result = tasks.add.enqueue(1, b=2)
    job = project.queue("default").get_job(result.id)
    assert job is not None
    assert (job.name, job.data) == ("tests.django.task_functions.add", {"args": [1], "kwargs": {"b": 2}})


@pytest.mark.parametrize(("django", "bullmq"), [(100, 1), (0, 101), (-100, 201)])
def test_priorities_are_mapped_to_bullmqs_in_which_1_is_the_highest(project: App, django: int, bullmq: int) -> None:
    result = tasks.add.using(priority=django).enqueue(1)
    job = project.queue("default").get_job(result.id)
    assert job is not None
    assert (job.priority, tasks.add.get_result(result.id).task.priority) == (bullmq, django)


def test_jobs_run_in_the_order_of_their_priorities(project: App, worker: InlineWorker) -> None:
    tasks.CALLS.clear()
    for priority in (-5, 0, 100):
        tasks.note.using(priority=priority).enqueue(priority)
    worker.run_jobs()
    assert tasks.CALLS == [100, 0, -5]


def test_run_after_delays_a_job(project: App, worker: InlineWorker) -> None:
    due = datetime.fromtimestamp(project._now_ms() / 1000, UTC) + timedelta(minutes=5)
    result = tasks.add.using(run_after=due).enqueue(1)
    worker.run_for(timedelta(minutes=4))
    result.refresh()
    assert (result.status, result.task.run_after) == (READY, due)
    worker.run_for(timedelta(minutes=2))
    result.refresh()
    assert result.status == SUCCESSFUL


@override_settings(USE_TZ=False, TIME_ZONE="America/New_York")
def test_without_use_tz_times_are_those_of_the_projects_time_zone(project: App, worker: InlineWorker) -> None:
    result = tasks.add.using(run_after=datetime.now() + timedelta(minutes=5)).enqueue(1)  # noqa: DTZ005
    assert (result.enqueued_at.tzinfo, tasks.add.get_result(result.id).enqueued_at) == (None, result.enqueued_at)
    assert worker.run_jobs() == []
    worker.run_for(timedelta(minutes=6))
    assert tasks.add.get_result(result.id).status == SUCCESSFUL


def test_a_task_with_context_receives_its_result(project: App, worker: InlineWorker) -> None:
    result = tasks.describe.using(queue_name="mail", priority=7).enqueue()
    worker.run_jobs()
    assert tasks.describe.get_result(result.id).return_value == [result.id, 1, RUNNING, 7, "mail"]
    assert tasks.CALLS[-1].started_at is not None


@pytest.mark.parametrize(("kind", "error"), [("value", ValueError), ("exit", SystemExit)])
def test_a_failed_task_has_its_exception_and_traceback(
    project: App, worker: InlineWorker, kind: str, error: type[BaseException]
) -> None:
    result = tasks.fail.enqueue(kind)
    worker.run_jobs(propagate=False)
    result.refresh()
    assert (result.status, result.is_finished, result.attempts) == (FAILED, True, 1)
    assert result.errors[0].exception_class is error
    assert result.errors[0].traceback.endswith(f"{error.__name__}: no luck\n")
    assert "task_functions.py" in result.errors[0].traceback
    with pytest.raises(ValueError, match="Task failed"):
        _ = result.return_value


@pytest.mark.parametrize("task", [tasks.fail_first, tasks.fail_first_async])
def test_a_task_that_is_retried_is_ready_again_and_its_attempts_are_recorded(
    project: App, worker: InlineWorker, task: Any, sent: list[Any]
) -> None:
    result = task.enqueue()
    worker.run_jobs()
    result.refresh()
    first = result.started_at
    assert (result.status, result.attempts, result.finished_at) == (READY, 1, None)
    assert [error.exception_class for error in result.errors] == [ConnectionError]
    worker.run_for(60)
    result.refresh()
    assert (result.status, result.return_value, result.worker_ids) == (SUCCESSFUL, 2, ["in-process"] * 2)
    assert result.started_at == first < result.last_attempted_at
    assert [name for name, _, _ in sent] == ["task_enqueued", "task_started", "task_started", "task_finished"]


def test_options_of_the_backend_are_those_of_its_tasks(project: App, worker: InlineWorker) -> None:
    result = tasks.fail.using(backend="any").enqueue("connection")
    worker.run_jobs(propagate=False)
    result.refresh()
    assert (result.status, result.backend, result.task.backend) == (FAILED, "any", "any")


def test_without_queues_any_queue_can_be_used_and_its_results_are_found(project: App, worker: InlineWorker) -> None:
    result = tasks.add.using(backend="any", queue_name="elsewhere").enqueue(1)
    assert tasks.add.using(backend="any").get_result(result.id) == result


def test_a_return_value_that_is_not_json_fails_the_task(project: App, worker: InlineWorker) -> None:
    result = tasks.unserializable.enqueue()
    worker.run_jobs(propagate=False)
    result.refresh()
    assert result.errors[0].exception_class is TypeError


def test_arguments_that_are_not_json_are_rejected_before_anything_is_sent(project: App) -> None:
    with pytest.raises(TypeError, match="Unsupported type"):
        tasks.add.enqueue(object())
    assert project.queue("default").count() == 0


def test_signals_are_sent_in_the_processes_that_enqueue_and_run(
    project: App, worker: InlineWorker, sent: list[Any]
) -> None:
    tasks.add.enqueue(1)
    assert sent == [("task_enqueued", READY, BulltaskBackend)]
    worker.run_jobs()
    assert sent[1:] == [("task_started", RUNNING, BulltaskBackend), ("task_finished", SUCCESSFUL, BulltaskBackend)]
    tasks.fail.enqueue("value")
    worker.run_jobs(propagate=False)
    assert sent[-1] == ("task_finished", FAILED, BulltaskBackend)


def test_a_receiver_that_raises_changes_no_outcome(
    project: App, worker: InlineWorker, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(**_: Any) -> None:
        raise RuntimeError("no")

    for signal in (signals.task_enqueued, signals.task_started, signals.task_finished):
        signal.connect(refuse)
    try:
        with caplog.at_level(logging.CRITICAL):
            result = tasks.add.enqueue(1)
            worker.run_jobs()
    finally:
        for signal in (signals.task_enqueued, signals.task_started, signals.task_finished):
            signal.disconnect(refuse)
    assert tasks.add.get_result(result.id).return_value == 1


@pytest.mark.parametrize("result_id", ["123", "meta", "no such job"])
def test_a_result_that_does_not_exist_raises_djangos_error(project: App, result_id: str) -> None:
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        tasks.add.get_result(result_id)


def test_a_job_of_another_kind_of_task_has_no_django_result(project: App) -> None:
    foreign = project.queue("default").add("other.task", {"a": 1})
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        tasks.add.get_result(foreign.id)
    with pytest.raises(exceptions.TaskResultMismatch):
        tasks.fail.get_result(tasks.add.enqueue(1).id)


def test_only_tasks_of_installed_apps_are_imported_by_their_path() -> None:
    assert _find_task("antigravity.nothing") is None
    assert "antigravity" not in sys.modules
    assert _find_task("bulltask.contrib.django.backend.BulltaskBackend") is None
    assert _find_task("bulltask.contrib.django.nothing.nothing") is None


def test_workers_process_the_queues_of_the_backends(project: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "tests")
    project._load_tasks()
    assert {"default", "mail"} <= set(default_queues(project))


def test_a_call_in_a_transaction_is_sent_immediately_unless_on_commit_calls_it(project: App) -> None:
    with transaction.atomic():
        tasks.add.enqueue(1)
        transaction.on_commit(lambda: tasks.add.enqueue(2))
        assert project.queue("default").count() == 1
    assert project.queue("default").count() == 2


def test_checks_report_invalid_options_and_queue_names() -> None:
    assert list(task_backends()["default"].check()) == []
    for params in ({"OPTIONS": {"max_retires": 1}}, {"QUEUES": ["a:b"]}):
        (problem,) = BulltaskBackend("bad", params).check()
        assert (problem.id, problem.obj) == ("bulltask.E001", "bad")


def test_eager_mode_runs_tasks_but_keeps_no_results(project: App, broker_url: str) -> None:
    with use_server(project, broker_url, task_always_eager=True):
        tasks.CALLS.clear()
        result = tasks.note.enqueue("eager")
        assert tasks.CALLS == ["eager"]
        with pytest.raises(BulltaskError, match="ImmediateBackend"):
            result.refresh()
