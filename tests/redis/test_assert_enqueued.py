"""``assert_enqueued`` finds the jobs that a program has sent, and says what it has sent instead."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from bulltask import App
from bulltask.testing import InlineWorker, assert_enqueued, enqueued_jobs, use_server
from bulltask.testing.inline import FakeClock

pytestmark = pytest.mark.redis


@pytest.fixture
def app(broker_url: str) -> Iterator[App]:
    app = App("tested")
    with use_server(app, broker_url):
        yield app


@pytest.fixture
def mail(app: App) -> Any:
    @app.task(name="mail")
    def mail(to: str, text: str = "", *more: str) -> None:
        """Do nothing."""

    return mail


def test_a_job_is_found_by_some_of_its_arguments(app: App, mail: Any) -> None:
    mail.delay("ann", text="hello")
    assert [job.data for job in assert_enqueued(app, mail)] == [{"to": "ann", "text": "hello"}]
    assert_enqueued(app, mail, ("ann",))
    assert_enqueued(app, mail, kwargs={"text": "hello"})
    assert_enqueued(app, "mail", kwargs={"to": "ann"})
    with pytest.raises(AssertionError):
        assert_enqueued(app, mail, ("bob",))
    with pytest.raises(TypeError, match=r"mail\(\) got an unexpected keyword argument 'recipient'"):
        assert_enqueued(app, mail, kwargs={"recipient": "ann"})


def test_arguments_are_compared_in_their_json_form(app: App, mail: Any) -> None:
    mail.delay("ann", ("a", "b"), "c")
    assert_enqueued(app, mail, ("ann", ("a", "b"), "c"))


def test_a_job_is_found_by_its_options(app: App, mail: Any) -> None:
    mail.apply_async(("ann",), queue="letters", priority=7, countdown=60, max_retries=4)
    assert_enqueued(app, mail, queue="letters", priority=7, countdown=60, attempts=5)
    assert_enqueued(app, mail, countdown=timedelta(minutes=1))
    others: dict[str, Any] = {"queue": "default", "priority": 1, "countdown": 0}
    for field, value in others.items():
        with pytest.raises(AssertionError, match=f"{field}="):
            assert_enqueued(app, mail, **{field: value})
    with pytest.raises(TypeError, match="a job has no attribute 'lifo'"):
        assert_enqueued(app, mail, lifo=True)


def test_a_job_is_found_by_the_time_when_it_is_due(app: App, mail: Any) -> None:
    clock = app._broker.clock
    assert isinstance(clock, FakeClock)
    clock.advance(86_400)
    tomorrow = clock.now() + timedelta(days=1)
    mail.apply_async(("ann",), eta=tomorrow)
    assert_enqueued(app, mail, eta=tomorrow)
    with pytest.raises(AssertionError):
        assert_enqueued(app, mail, eta=tomorrow + timedelta(seconds=5))


def test_the_number_of_jobs_can_be_given(app: App, mail: Any) -> None:
    assert_enqueued(app, mail, count=0)
    mail.delay("ann")
    mail.delay("bob")
    assert [job.data["to"] for job in assert_enqueued(app, mail, count=2)] == ["ann", "bob"]
    with pytest.raises(AssertionError, match="2 instead of 1 jobs are enqueued for mail"):
        assert_enqueued(app, mail, count=1)


def test_the_message_lists_what_is_enqueued(app: App, mail: Any) -> None:
    with pytest.raises(AssertionError, match=r"no job is enqueued for mail \{\}; enqueued: nothing"):
        assert_enqueued(app, mail)
    mail.apply_async(("bob",), queue="letters", priority=3, countdown=90)
    with pytest.raises(AssertionError) as failure:
        assert_enqueued(app, mail, ("ann",), queue="letters")
    assert str(failure.value) == (
        "no job is enqueued for mail {'to': 'ann'}, queue='letters'; enqueued:\n"
        '  mail {"to":"bob"} in queue letters, delayed by 90 s, priority 3'
    )


def test_jobs_that_have_run_are_not_enqueued(app: App, mail: Any) -> None:
    mail.delay("ann")
    assert len(enqueued_jobs(app)) == 1
    with InlineWorker(app) as worker:
        worker.run_jobs()
    assert enqueued_jobs(app) == []
    assert_enqueued(app, mail, count=0)
