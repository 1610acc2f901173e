"""``delay_on_commit``: a call is sent when the Django transaction commits, or not at all."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections, transaction
from django.test import TestCase

from bulltask import App, AsyncResult, JobState, Task
from bulltask.errors import BrokerUnavailableError, EncodeError, MissingExtraError
from bulltask.testing import InlineWorker, use_server

pytestmark = pytest.mark.redis


@pytest.fixture
def double(app: App) -> Task[[int], int]:
    @app.task(name="double")
    def double(number: int) -> int:
        return 2 * number

    return double


def count(app: App) -> int:
    """Return the number of jobs that wait."""
    return app.queue("default").count()


def test_a_call_is_sent_at_the_commit_and_its_id_is_known_before(
    app: App, worker: InlineWorker, double: Task[[int], int]
) -> None:
    with transaction.atomic():
        result = double.delay_on_commit(21)
        assert isinstance(result, AsyncResult)
        assert (count(app), result.state) == (0, JobState.UNKNOWN)
    assert (count(app), result.state) == (1, JobState.WAITING)
    assert result.get(timeout=10) == 42


def test_an_overridden_apply_async_receives_the_call(app: App, worker: InlineWorker) -> None:
    class Doubled(Task[[int], int]):
        def apply_async(self, args: Any = (), kwargs: Any = None, **options: Any) -> AsyncResult[int]:
            return super().apply_async([2 * number for number in args], kwargs, **options)

    same = app.task(name="same", base=Doubled)(lambda number: number)
    with transaction.atomic():
        result = same.delay_on_commit(21)
        assert (count(app), result.state) == (0, JobState.UNKNOWN)
    assert result.get(timeout=10) == 42


def test_nothing_is_sent_after_a_rollback(app: App, double: Task[[int], int]) -> None:
    with transaction.atomic():
        result = double.delay_on_commit(21)
        transaction.set_rollback(True)
    assert (count(app), result.state) == (0, JobState.UNKNOWN)


def test_a_call_of_an_inner_block_is_sent_at_the_commit_of_the_outer_one(app: App, double: Task[[int], int]) -> None:
    with transaction.atomic():
        with transaction.atomic():
            double.delay_on_commit(1)
        with transaction.atomic():
            double.delay_on_commit(2)
            transaction.set_rollback(True)
        assert count(app) == 0
    assert [job.data for job in app.queue("default").get_jobs()] == [{"number": 1}]


def test_a_call_outside_of_a_transaction_is_sent_immediately(app: App, double: Task[[int], int]) -> None:
    double.delay_on_commit(1)
    assert count(app) == 1


def test_options_are_those_of_apply_async(app: App, double: Task[[int], int]) -> None:
    with transaction.atomic():
        result = double.apply_async_on_commit((21,), countdown=60, job_id="an-order")
    assert (result.id, result.state) == ("an-order", JobState.DELAYED)


def test_using_selects_the_database_whose_commit_sends_the_call(app: App, double: Task[[int], int]) -> None:
    with transaction.atomic(using="other"):
        double.apply_async_on_commit((1,))
        assert count(app) == 1
        double.apply_async_on_commit((2,), using="other")
        assert count(app) == 1
    assert count(app) == 2


@pytest.mark.parametrize(
    ("args", "options", "error"),
    [
        ((), {}, TypeError),
        ((1, 2), {}, TypeError),
        ((object(),), {}, EncodeError),
        ((1,), {"cuontdown": 5}, TypeError),
        ((1,), {"link": None}, TypeError),
    ],
)
def test_a_bad_call_raises_where_it_is_made(
    app: App, double: Task[[int], int], args: tuple[Any, ...], options: dict[str, Any], error: type[Exception]
) -> None:
    with transaction.atomic():
        with pytest.raises(error):
            double.apply_async_on_commit(args, **options)
        assert connections["default"].run_on_commit == []


def test_a_duplicate_has_the_id_of_the_existing_job_after_the_commit(app: App, double: Task[[int], int]) -> None:
    first = double.apply_async((1,), deduplication="once")
    with transaction.atomic():
        second = double.apply_async_on_commit((2,), deduplication="once")
        assert second != first
    assert second == first


@transaction.atomic
def store_and_send(task: Task[[int], int]) -> None:
    """Do what a view does."""
    task.delay_on_commit(1)
    with connections["default"].cursor() as cursor:
        cursor.execute("INSERT INTO stored VALUES (1)")


def test_a_failed_send_raises_after_the_commit_unless_it_is_robust(caplog: pytest.LogCaptureFixture) -> None:
    app = App("alone", "redis://127.0.0.1:1", broker_publish_timeout=0.1)
    task = app.task(name="double")(lambda number: 2 * number)
    with connections["default"].cursor() as cursor:
        cursor.execute("CREATE TABLE stored (id integer)")
    with pytest.raises(BrokerUnavailableError):
        store_and_send(task)
    after = list[str]()
    with caplog.at_level(logging.ERROR), transaction.atomic():
        result = task.apply_async_on_commit((1,), robust=True)
        transaction.on_commit(lambda: after.append("ran"))
    assert after == ["ran"]
    assert f"the send of job {result.id} of task double" in caplog.text
    with connections["default"].cursor() as cursor:
        assert cursor.execute("SELECT count(*) FROM stored").fetchone() == (1,)
        cursor.execute("DROP TABLE stored")
    app.close()


def test_eager_mode_runs_the_call_at_the_commit(broker_url: str) -> None:
    app, ran = App("eager"), list[int]()
    task = app.task(name="note")(ran.append)
    with use_server(app, broker_url, task_always_eager=True):
        with transaction.atomic():
            task.delay_on_commit(1)
            assert ran == []
        assert ran == [1]


def test_djangos_test_case_can_execute_the_callbacks(app: App, double: Task[[int], int]) -> None:
    with transaction.atomic():
        with TestCase.captureOnCommitCallbacks(execute=True) as callbacks:
            double.delay_on_commit(1)
            assert count(app) == 0
        assert (len(callbacks), count(app)) == (1, 1)
        connections["default"].run_on_commit.clear()


async def test_async_code_has_no_transactions_and_django_says_so(app: App, double: Task[[int], int]) -> None:
    with pytest.raises(SynchronousOnlyOperation):
        double.delay_on_commit(1)


def test_without_django_the_error_names_the_extra(
    app: App, double: Task[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "django.db.transaction", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'bulltask\[django\]'"):
        double.delay_on_commit(1)
