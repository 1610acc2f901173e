"""Small parts of Celery's API: requests, handles as results, exceptions with arguments, attributes of ``self``."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from pydantic import BaseModel

from bulltask import App, AsyncResult, Context, Request, ResultSet, chain, chord, crontab, current_task, group
from bulltask.errors import ConfigError, JobExpiredError, Reject, TaskError, TaskRejectedError, TaskRevokedError
from bulltask.exceptions import TimeoutError as CeleryTimeoutError
from bulltask.jobs.fields import ARGUMENTS_CHARS, arguments_for, storable_arguments
from bulltask.signals import after_task_publish, before_task_publish
from bulltask.testing import InlineWorker, use_server

pytestmark = pytest.mark.redis

KEY = f"k1:{base64.b64encode(bytes(range(32))).decode()}"


class Order(BaseModel):
    """A model."""

    number: int


class Refused(Exception):
    """With two arguments, of which the message shows one."""

    def __str__(self) -> str:
        return f"refused: {self.args[0]}"


@pytest.fixture(params=["plain", "encrypted"])
def app(request: pytest.FixtureRequest, broker_url: str) -> Iterator[App]:
    settings: dict[str, Any] = {"payload_encryption_keys": {"*": KEY}} if request.param == "encrypted" else {}
    app = App("details", "redis://unreachable.invalid:1", task_max_retries=0, **settings)
    with use_server(app, broker_url):
        yield app


# ---- the request -----------------------------------------------------------------------------------------------------


def test_headers_are_attributes_of_the_request(app: App, worker: InlineWorker) -> None:
    @app.task(name="look", bind=True)
    def look(self: Any) -> list[Any]:
        request = self.request
        return [
            request.get("tenant"),
            request.tenant,
            request.get("id") == request.id,
            request.get("missing", 5),
            hasattr(request, "missing"),
            request.callbacks,
            request.ignore_result,
        ]

    sent = look.apply_async(headers={"tenant": "a", "id": "not this"})
    assert sent.get(timeout=5) == ["a", "a", True, 5, False, None, False]


def test_outside_a_job_the_request_has_no_id(app: App) -> None:
    @app.task(name="bare", bind=True)
    def bare(self: Any) -> list[Any]:
        return [self.request.id, self.request.called_directly, self.request.correlation_id]

    assert bare() == [None, True, None]
    assert bare.request.id is None
    assert Request().get("id", 3) is None
    with pytest.raises(ConfigError, match="task bare, which is not running in a job, cannot set the state of job 1"):
        Context(bare.request).update_state("1", "DONE")


def test_an_error_callback_receives_a_request_with_attributes(app: App, worker: InlineWorker) -> None:
    seen: list[Any] = []

    @app.task(name="fails")
    def fails(x: int, y: int = 2) -> None:
        raise ValueError(x, y)

    def note(request: Any, error: str, traceback: str) -> None:
        seen.append([request.id, request.task, request.queue, request["id"], request.kwargs, request.args])
        seen.append([request.chain, hasattr(request, "other"), error])

    def variable(*args: Any) -> None:
        seen.append(args[0].id)

    note_it: Any
    note_it, note_id = app.task(name="note")(note), app.task(name="variable")(variable)
    result = fails.apply_async((1,), link_error=[note_it.s(), note_id.s()])
    worker.run_jobs(propagate=False)
    assert seen[0] == [result.id, "fails", "default", result.id, {"x": 1}, []]
    assert seen[1:] == [[None, False, "(1, 2)"], result.id]
    seen.clear()
    fails.s(1).on_error(note_it.s()).apply(throw=False)
    assert seen[0][1] == "fails"


@pytest.mark.parametrize("way", ["chord", "body's own", "chain with a group", "body of two", "body that fails"])
def test_an_error_callback_of_a_chord_describes_the_body_if_a_member_fails(
    app: App, worker: InlineWorker, way: str
) -> None:
    seen: list[Any] = []

    @app.task(name="fails")
    def fails(*_: Any) -> None:
        raise ValueError("no")

    @app.task(name="body")
    def body(*_: Any) -> None: ...

    @app.task(name="note")
    def note(request: Any, error: str, traceback: str) -> None:
        seen.append((request.id, request.task, error))

    @app.task(name="note-id")
    def note_id(job_id: str) -> None:
        seen.append(job_id)

    failing = fails.si()
    member, header = failing.freeze(), group(body.si(), failing)
    ways: dict[str, Any] = {
        "chord": lambda: chord(header, body.s()),
        "chain with a group": lambda: chain(body.s(), header, body.s()),
        "body of two": lambda: chord(header, chain(body.s(), body.s())),
        "body that fails": lambda: chord(group(body.si(), body.si()), failing),
    }
    canvas = ways.get(way, ways["chord"])()
    guarded = canvas.body if way == "body's own" else canvas
    guarded.link_error(note.s())
    guarded.link_error(note_id.s())
    sent = canvas.delay()
    worker.run_jobs(propagate=False)
    described = {"chord": (sent.id, "body"), "body's own": (sent.id, "body")}.get(way, (member.id, "fails"))
    assert sorted(seen, key=str) == sorted([(*described, "no"), described[0]], key=str)


def test_an_error_callback_of_a_chord_is_called_for_each_member_that_fails_if_the_setting_allows_it(
    app: App, worker: InlineWorker
) -> None:
    seen: list[str] = []

    @app.task(name="fails")
    def fails(*_: Any) -> None:
        raise ValueError("no")

    @app.task(name="one")
    def one(*_: Any) -> None: ...

    @app.task(name="note")
    def note(request: Any, error: str, traceback: str) -> None:
        seen.append(request.task)

    def called(*, as_option: bool = False) -> list[str]:
        seen.clear()
        canvas = chord([fails.s(), one.s(), one.s() | fails.s(), chain(fails.s(), one.s())], one.s())
        if as_option:
            canvas.apply_async(link_error=note.s())
        else:
            canvas.link_error(note.s())
            canvas.clone().delay()
        worker.run_jobs(propagate=False)
        return sorted(seen)

    assert called() == ["one"]
    app.conf.task_allow_error_cb_on_chord_header = True
    assert called() == ["fails", "fails", "fails", "one"]
    assert called(as_option=True) == ["one"]
    app.conf.task_allow_error_cb_on_chord_header = False
    assert called() == ["one"]


def test_stamps_are_among_the_headers_that_a_signal_shows(app: App, worker: InlineWorker) -> None:
    shown: list[Any] = []

    def show(headers: Any, properties: Any, **_: Any) -> None:
        shown.append((headers["stamps"], headers["stamped_headers"], "stamp" in properties))

    @app.task(name="stamped", bind=True)
    def stamped(self: Context) -> Any:
        return dict(self.request.stamps)

    before_task_publish.connect(show)
    try:
        assert stamped.s().stamp(stamp=[4, 2]).delay().get(timeout=5) == {"stamp": [4, 2]}
    finally:
        before_task_publish.disconnect(show)
    assert shown == [({"stamp": [4, 2]}, ["stamp"], False)]


# ---- results ---------------------------------------------------------------------------------------------------------


def test_a_job_that_has_expired_or_was_revoked_has_not_failed_and_its_status_is_revoked(
    app: App, worker: InlineWorker
) -> None:
    @app.task(name="one")
    def one() -> None:
        raise ValueError

    expired, revoked, failed = one.apply_async(expires=60), one.delay(), one.delay()
    revoked.revoke()
    worker.clock.advance(61)
    worker.run_jobs(propagate=False)
    for result in (expired, revoked):
        assert (result.status, result.ready(), result.failed(), result.successful()) == ("REVOKED", True, False, False)
        assert not ResultSet([result]).failed()
        with pytest.raises(TaskRevokedError) as caught:
            result.get()
        assert caught.value.job_id == result.id
    with pytest.raises(JobExpiredError, match=r"the job expired 1\.\d+ s before it was acquired") as late:
        expired.get()
    assert "the job expired" in late.value.reason
    assert "JobExpiredError" in late.value.remote_traceback
    assert (failed.status, failed.failed(), ResultSet([revoked, failed]).failed()) == ("FAILURE", True, True)


@pytest.mark.parametrize("option", [True, None])
def test_get_returns_a_dictionary_for_a_model_only_with_celerys_option(
    app: App, worker: InlineWorker, option: bool | None
) -> None:
    @app.task(name="doubled", pydantic=option)
    def doubled(order: Order) -> Order:
        return Order(number=order.number * 2)

    results = [doubled.delay(Order(number=2)), doubled.s(Order(number=2)).delay(), doubled.apply((Order(number=2),))]
    expected = {"number": 4} if option else Order(number=4)
    assert [result.get(timeout=5) for result in results] == [expected] * 3


def test_a_task_can_return_a_handle(app: App, worker: InlineWorker) -> None:
    handles: list[Any] = []

    @app.task(name="one")
    def one(x: int = 1) -> int:
        return x

    @app.task(name="returns")
    def returns(what: str) -> Any:
        sends: dict[str, Any] = {
            "job": one.delay,
            "chain": chain(one.s(), one.s()).delay,
            "group": group(one.s(), one.s()).delay,
        }
        handles.append(sends[what]())
        return handles[-1]

    results = [returns.delay(what).get(timeout=5) for what in ("job", "chain", "group")]
    job, last, members = handles
    assert results == [
        [[job.id, None], None],
        [[last.id, [[last.parent.id, None], None]], None],
        [[members.id, None], [[[member.id, None], None] for member in members]],
    ]
    assert AsyncResult(results[0][0][0], app=app).get(timeout=5) == 1
    assert returns.apply(("job",)).get()[1] is None


def test_an_ignored_handle_does_not_wait(app: App) -> None:
    result = app.task(name="never")(lambda: 5).delay()
    assert result.ignored is False
    with pytest.raises(CeleryTimeoutError):
        result.get(timeout=0.01)
    result.ignored = True
    assert result.get(timeout=0.01) is None


def test_a_handle_knows_that_its_call_ignores_the_result(app: App, worker: InlineWorker) -> None:
    quiet = app.task(name="quiet", ignore_result=True)(lambda: 5)
    loud = app.task(name="loud")(lambda: 5)
    assert [quiet.delay().ignored, quiet.apply_async().ignored, quiet.delay_many([()])[0].ignored] == [True] * 3
    assert quiet.apply_async(ignore_result=False).ignored is False
    assert [loud.delay().ignored, loud.apply_async(ignore_result=True).ignored] == [False, True]
    assert quiet.delay().get(timeout=5) is None
    assert quiet.apply_async(ignore_result=False).get(timeout=5) == 5


@pytest.mark.parametrize(
    ("error", "args"),
    [
        (Refused("no", 7), ("no", 7)),
        (Refused({"a": [1, None]}, 2.5, True), ({"a": [1, None]}, 2.5, True)),
        (Refused("no", datetime), ("no", "<class 'datetime.datetime'>")),
        (KeyError("key"), ("key",)),
        (KeyError(5), (5,)),
        (ValueError(("a", 1), object), (["a", 1], "<class 'object'>")),
        (ValueError("only text"), ("only text",)),
        (ValueError(), ()),
        (OSError(2, "gone"), (2, "gone")),
        (ValueError("x", "y" * ARGUMENTS_CHARS), (str(("x", "y" * ARGUMENTS_CHARS)),)),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else type(value).__name__,
)
@pytest.mark.parametrize("way", ["job", "chain", "eager"])
def test_an_exception_keeps_its_arguments(
    app: App, worker: InlineWorker, error: Exception, args: tuple[Any, ...], way: str
) -> None:
    @app.task(name="fails")
    def fails() -> None:
        raise error

    send: dict[str, Any] = {
        "job": fails.delay,
        "chain": (fails.si() | fails.si() | fails.si()).delay,
        "eager": lambda: fails.apply(throw=False),
    }
    result = send[way]()
    with pytest.raises(type(error)) as caught:
        result.get(timeout=5)
    assert caught.value.args == args
    assert getattr(caught.value, "errno", None) == getattr(error, "errno", None)


def test_arguments_of_an_exception_are_bounded_and_may_have_a_broken_repr() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    assert storable_arguments(Refused(1, Broken()))[1:] == [1, "<Broken>"]
    assert storable_arguments(Refused(1, object))[1:] == [1, "<class 'object'>"]
    assert storable_arguments(Refused("x", "y" * ARGUMENTS_CHARS)) == []
    assert storable_arguments(Refused(1, type("N" * 1000, (), {})))[1:] == [1, f"<class '{__name__}.{'N' * 1000}"[:200]]


def test_arguments_of_an_earlier_failure_are_not_used() -> None:
    stored = storable_arguments(Refused("no", 7))
    assert arguments_for("refused: no", stored) == ("no", 7)
    for other in (["no", 7], [1, "no"], {"a": 1}, [], "no", None):
        assert arguments_for("refused: no", other) == ()
    assert arguments_for("refused: yes", stored) == ()


def test_get_of_a_rejected_job_raises_its_reason(app: App, worker: InlineWorker) -> None:
    @app.task(name="rejects")
    def rejects(how: str) -> None:
        if how == "error":
            raise Reject(MemoryError("full"), requeue=False)
        raise Reject(how or None)

    with pytest.raises(MemoryError, match="full"):
        rejects.delay("error").get(timeout=5)
    result = rejects.delay("not today")
    with pytest.raises(Reject) as caught:
        result.get(timeout=5)
    assert isinstance(caught.value, TaskRejectedError)
    assert str(caught.value) == f"job {result.id}: not today"
    assert "Reject: not today" in (result.traceback or "")
    with pytest.raises(TaskError, match="the task rejected its job"):
        rejects.delay("").get(timeout=5)
    assert isinstance(rejects.apply(("eager",), throw=False).info, Reject)


def test_the_message_of_a_revoked_job_has_no_traceback() -> None:
    error = TaskRevokedError("revoked", job_id="1", remote_traceback="Traceback …")
    assert (str(error), error.remote_traceback) == ("job 1: revoked", "Traceback …")


# ---- self, signals, settings, schedules ------------------------------------------------------------------------------


def test_attributes_set_on_self_belong_to_the_task(app: App, worker: InlineWorker) -> None:
    def count(self: Any) -> list[Any]:
        self.count = getattr(self, "count", 0) + 1
        return [self.count, self.priority]

    counts: Any = app.task(name="counts", bind=True)(count)
    first, second = counts.delay(), counts.delay()
    assert [first.get(timeout=5)[0], second.get(timeout=5)[0], counts.count] == [1, 2, 2]
    assert counts()[0] == 3

    @app.task(name="wrong", bind=True)
    def wrong(self: Any, name: str) -> None:
        setattr(self, name, 5)

    for name in ("_options", "function", "_direct"):
        with pytest.raises(AttributeError, match=f"{name} would replace an attribute that bulltask uses"):
            wrong.delay(name).get(timeout=5)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        getattr(Context(Request(task="none")), "missing")  # noqa: B009
    assert not hasattr(current_task, "count")


@pytest.mark.parametrize("options", [{}, {"compression": "zlib"}, {"serializer": "cloudpickle"}])
def test_publish_signals_show_the_arguments_and_not_their_encoded_form(
    broker_url: str, options: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"payload_encryption_keys": {"*": KEY}, "compression_threshold": 1}
    app = App(
        "signals",
        broker_url,
        payload_signing_keys=[KEY.replace("A", "B")],
        accept_content=["json", "cloudpickle"],
        **settings,
    )
    seen: list[Any] = []

    def note(sender: Any, body: Any, **named: Any) -> None:
        seen.append(body[1])

    before_task_publish.connect(note)
    after_task_publish.connect(note)
    with use_server(app, broker_url):
        app.task(name="add")(lambda x, y: x).apply_async(("a" * 100, 2), **options)
        app.task(name="other")(lambda x: x).s(3).apply_async()
    assert seen == [{"x": "a" * 100, "y": 2}] * 2 + [{"x": 3}] * 2


@pytest.mark.parametrize("value", [0, 0.0, timedelta(0)])
def test_a_value_with_another_meaning_in_celery_is_refused(value: Any) -> None:
    app = App("settings")
    for set_it in (
        lambda: app.conf.update(result_expires=value),
        lambda: app.conf.update({"result_expires": value}),
        lambda: app.config_from_object({"result_expires": value}),
        lambda: app.config_from_object({"CELERY_RESULT_EXPIRES": value}, namespace="CELERY"),
        lambda: app.config_from_object({"SHOP_RESULT_EXPIRES": value}, namespace="SHOP"),
    ):
        with pytest.raises(ConfigError, match="Celery then keeps results forever"):
            set_it()
    app.conf.update(result_expires=None)
    app.conf.result_expires = 0
    assert App("settings", result_expires=0)._config.result_expires_ms == 0


def test_crontab_takes_fields_by_position_and_says_when_it_is_due() -> None:
    assert crontab("0", "7", "mon", "*", "6") == crontab(0, 7, day_of_week=1, month_of_year=6)
    now = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
    daily = crontab(30, 7, nowfun=lambda: now, app=None)
    assert daily.is_due(now - timedelta(hours=1)) == (False, 19.5 * 3600)
    assert daily.is_due(now - timedelta(days=1)).is_due
    assert daily.is_due(now - timedelta(days=1)).next == 19.5 * 3600
    assert daily.remaining_estimate(now - timedelta(days=1)) == timedelta(hours=-4.5)
    berlin = (now - timedelta(hours=1)).astimezone(ZoneInfo("Europe/Berlin"))
    assert daily.is_due(berlin).next == 18.5 * 3600
    assert daily.is_due((now - timedelta(hours=1)).replace(tzinfo=None)) == (False, 19.5 * 3600)
    assert isinstance(crontab().is_due(datetime.now(UTC)).next, float)
