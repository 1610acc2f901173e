"""Pickled, compressed and encrypted arguments, results and exceptions, written to Redis and read back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import redis

from bulltask import App, BatchJob, Context, chain, chord, group
from bulltask.errors import DecodeError, EncodeError
from bulltask.events import JobCompleted, JobFailed
from bulltask.jobs.payloads import ENVELOPE_KEY, ENVELOPE_START, Envelope, dump
from bulltask.testing import InlineWorker, use_server
from bulltask.worker.beat import read_entries
from tests.support.payloads import ENCRYPTION_KEY, PICKLES, Refused, WritesFile

pytestmark = pytest.mark.redis

MakeWorker = Callable[..., tuple[App, InlineWorker]]
PICKLING: dict[str, Any] = {**PICKLES, "task_serializer": "cloudpickle", "result_serializer": "cloudpickle"}
ENCRYPTED: dict[str, Any] = {"payload_encryption_keys": {"*": ENCRYPTION_KEY}}


@pytest.fixture
def make(broker_url: str) -> Iterator[MakeWorker]:
    """Create an app with settings, and a worker in the test's thread."""

    with ExitStack() as stack:

        def make(**settings: Any) -> tuple[App, InlineWorker]:
            app = App("tested", broker_url, **settings)
            stack.enter_context(use_server(app, broker_url))
            return app, stack.enter_context(InlineWorker(app))

        yield make


def define(app: App, **options: Any) -> dict[str, Any]:
    """Define tasks whose arguments and results need not be JSON."""

    def call(function: Any, x: Any = 1) -> Any:
        return function(x)

    def same(value: Any) -> Any:
        return value

    def pair(values: list[Any], extra: Any = None) -> Any:
        return values, extra

    def fail(code: int) -> None:
        raise Refused(code, {"set": {1, 2}})

    return {task.__name__: app.task(name=task.__name__, **options)(task) for task in (call, same, pair, fail)}


def stored(client: redis.Redis, job_id: str, queue: str = "default") -> dict[str, str]:
    found: dict[str, str] = client.hgetall(f"bull:{{{queue}}}:{job_id}")  # type: ignore[assignment]
    return found


@pytest.mark.parametrize("settings", [{}, ENCRYPTED, {"task_compression": "zstd", "compression_threshold": 0}])
def test_functions_and_objects_can_be_arguments_and_results(
    make: MakeWorker, redis_client: redis.Redis, settings: dict[str, Any]
) -> None:
    app, _ = make(**PICKLES, **settings)
    tasks = define(app, serializer="cloudpickle")
    result = tasks["call"].delay(lambda x: {x, Decimal("1.5")}, 2)
    assert result.get() == {2, Decimal("1.5")}
    fields = stored(redis_client, result.id)
    assert json.loads(fields["data"]).keys() == json.loads(fields["returnvalue"]).keys() == {ENVELOPE_KEY}
    assert app.result(result.id).get() == {2, Decimal("1.5")}


def test_a_call_can_be_pickled_although_its_task_uses_json(make: MakeWorker) -> None:
    app, _ = make(**PICKLES)
    same = define(app)["same"]
    assert same.apply_async([(1, 2)], serializer="cloudpickle").get() == [1, 2]
    with pytest.raises(EncodeError, match="the arguments of task same"):
        same.delay({1})


def test_an_exception_is_raised_with_its_attributes(make: MakeWorker, redis_client: redis.Redis) -> None:
    app, _ = make(**PICKLING)
    result = define(app)["fail"].delay(7)
    with pytest.raises(Refused) as caught:
        result.get()
    assert (caught.value.code, caught.value.details) == (7, {"set": {1, 2}})
    assert "Traceback" in str(caught.value.__cause__)
    fields = stored(redis_client, result.id)
    assert fields["failedReason"] == str(caught.value)
    assert json.loads(fields["bulltask:error"])[ENVELOPE_KEY]["ser"] == "cloudpickle"


def test_an_exception_of_an_earlier_failure_is_not_raised(make: MakeWorker, redis_client: redis.Redis) -> None:
    app, _ = make(**PICKLING)
    result = define(app)["fail"].delay(7)
    result.get(propagate=False)
    redis_client.hset(f"bull:{{default}}:{result.id}", "failedReason", "another reason")
    with pytest.raises(Exception, match="another reason"):
        result.get()


@pytest.mark.parametrize("settings", [PICKLING, {**PICKLING, **ENCRYPTED}, ENCRYPTED])
def test_chains_and_chords_pass_results_on(make: MakeWorker, settings: dict[str, Any]) -> None:
    app, _ = make(**settings)
    tasks = define(app)
    same, pair = tasks["same"], tasks["pair"]
    value: Any = {1, 2} if "task_serializer" in settings else [1, 2]
    assert chain(same.s(value), same.s()).delay().get() == value
    both = chord([same.s(value), same.s("b")], pair.s(extra=value)).delay().get()
    assert list(both) == [[value, "b"], value]
    fanned_out = chain(same.s(value), group(same.s(), same.s()), pair.s(extra=1)).delay().get()
    assert list(fanned_out) == [[value, value], 1]
    assert list(pair.chunks([([value], 1), ([value], 2)], 1).delay().get()[1][0]) == [[value], 2]


def test_a_replaced_job_has_the_result_of_its_canvas(make: MakeWorker) -> None:
    app, _ = make(**PICKLING, **ENCRYPTED)
    tasks = define(app)

    @app.task(bind=True, name="replace")
    def replaced(self: Context) -> Any:
        self.replace(chain(tasks["same"].s({1}), tasks["same"].s()))

    assert replaced.delay().get() == {1}


def test_a_canvas_fails_with_the_exception_of_its_step(make: MakeWorker) -> None:
    app, _ = make(**PICKLING)
    tasks = define(app)
    with pytest.raises(Refused) as caught:
        chain(tasks["fail"].s(7), tasks["same"].s()).delay().get()
    assert caught.value.code == 7


@pytest.mark.parametrize("settings", [PICKLING, ENCRYPTED])
def test_error_callbacks_receive_their_arguments_and_the_failure(make: MakeWorker, settings: dict[str, Any]) -> None:
    app, worker = make(**settings)
    tasks, calls = define(app), list[Any]()

    @app.task(name="report")
    def report(failed: Any, reason: str, trace: str, channel: Any) -> None:
        calls.append((failed["id"], reason, channel))

    value: Any = {1} if "task_serializer" in settings else [1]
    result = tasks["fail"].apply_async([7], link_error=app.signature("report", kwargs={"channel": value}))
    worker.run_jobs(propagate=False)
    assert calls == [(result.id, str(Refused(7, {"set": {1, 2}})), value)]


def test_a_bound_task_reads_and_writes_payloads(make: MakeWorker) -> None:
    app, _ = make(**PICKLES, **ENCRYPTED)
    seen = []

    @app.task(bind=True, name="step", serializer="cloudpickle", max_retries=1)
    def step(self: Context, value: Any) -> Any:
        seen.append(value)
        if len(seen) == 1:
            self.update_data({"value": {2}})
            raise self.retry(countdown=0)
        return step.request.kwargs

    assert step.delay({1}).get() == {"value": {2}}
    assert seen == [{1}, {2}]


def test_hints_are_converted_for_json_and_not_for_pickles(make: MakeWorker) -> None:
    app, _ = make(**PICKLES)

    @app.task(name="price")
    def price(value: Decimal) -> Decimal:
        return value + 1

    @app.task(name="pickled", serializer="cloudpickle")
    def pickled(value: Decimal, more: Any = None) -> Decimal:
        return value + 1

    assert price.delay(Decimal(1)).get() == Decimal(2)
    assert pickled.delay(Decimal(1), {1}).get() == Decimal(2)
    assert chain(price.s(Decimal(1)), pickled.s(more={1}), price.s()).delay().get() == Decimal(4)
    assert pickled.map([Decimal(1)]).delay().get() == price.map([Decimal(1)]).delay().get() == [Decimal(2)]


def test_schedules_and_eager_mode_use_payloads(make: MakeWorker, broker_url: str) -> None:
    schedule = {"every": {"task": "same", "schedule": 60, "args": [{"x": 1}]}}
    app, worker = make(**PICKLES, **ENCRYPTED, beat_schedule=schedule)
    define(app)
    completed = [event for event in worker.run_for(60) if isinstance(event, JobCompleted)]
    assert [event.result for event in completed] == [{"x": 1}] * len(completed) != []
    eager = App("tested", broker_url, task_always_eager=True, **PICKLING, **ENCRYPTED)
    tasks = define(eager)
    assert chain(tasks["same"].s({1}), tasks["same"].s()).delay().get() == {1}
    with pytest.raises(Refused):
        tasks["fail"].delay(7).get()


def test_a_schedule_does_not_change_because_its_payload_is_encrypted_again(make: MakeWorker) -> None:
    schedule = {"every": {"task": "same", "schedule": 60, "args": ["x"]}}
    app, _ = make(**ENCRYPTED, beat_schedule=schedule)
    define(app)
    [first], [second] = read_entries(app) or [], read_entries(app) or []
    assert first.job.data != second.job.data
    assert first.digest == second.digest


@pytest.mark.parametrize("settings", [PICKLES, ENCRYPTED, {**PICKLES, **ENCRYPTED}])
def test_each_job_of_a_batch_has_its_own_payloads(
    make: MakeWorker, redis_client: redis.Redis, settings: dict[str, Any]
) -> None:
    app, worker = make(**settings)
    is_pickled, sizes = "accept_content" in settings, list[int]()

    @app.task(name="apply", batch=10, serializer="cloudpickle" if is_pickled else "json")
    def apply(jobs: list[BatchJob[Any]]) -> list[Any]:
        sizes.append(len(jobs))
        for job in jobs:
            if job.data == "fail":
                job.fail(Refused(7, {"secret": {1, 2}}))
            elif job.data == "retry" and not job.request.retries:
                job.retry(countdown=0)
        return [job.data(2) if callable(job.data) else [job.data, "secret"] for job in jobs]

    first = apply.delay((lambda x: {x, "secret"}) if is_pickled else "secret")
    failed, retried = apply.apply_async(["fail"], max_retries=0), apply.delay("retry")
    worker.run_jobs(propagate=False)
    assert first.get() == ({2, "secret"} if is_pickled else ["secret", "secret"])
    assert retried.get() == ["retry", "secret"]
    assert sizes == [3, 1]
    with pytest.raises(Refused) as caught:
        failed.get()
    if is_pickled:
        assert caught.value.details == {"secret": {1, 2}}
    for job in (first, retried):
        fields = stored(redis_client, job.id)
        assert "secret" not in fields["data"] + fields["returnvalue"]


def test_a_job_with_an_unsigned_pickle_does_not_fail_its_batch(make: MakeWorker, tmp_path: Path) -> None:
    app, worker = make(**PICKLES)

    @app.task(name="same", batch=10, serializer="cloudpickle")
    def same(jobs: list[BatchJob[Any]]) -> list[Any]:
        return [job.data for job in jobs]

    good = [same.delay({1}), same.delay({2})]
    envelope = Envelope("cloudpickle", dump({"jobs": WritesFile(tmp_path / "written")}, "it"))
    bad = app.queue("default").add("same", json.loads(envelope.to_json()))
    worker.run_jobs(propagate=False)
    assert [job.get() for job in good] == [{1}, {2}]
    with pytest.raises(Exception, match="is pickled but not signed"):
        app.result(bad.id).get()
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize("settings", [ENCRYPTED, {**PICKLING, **ENCRYPTED}])
def test_a_checkpointed_task_continues_on_an_encrypted_queue(
    make: MakeWorker, redis_client: redis.Redis, settings: dict[str, Any]
) -> None:
    app, worker = make(**settings)
    seen = []

    @app.task(bind=True, name="loop", checkpoint=True, max_retries=1)
    def loop(self: Context, items: Any, word: str) -> Any:
        for number in self.iterate(items):
            seen.append(number)
            if seen == [0, 1, 2]:
                raise self.retry(countdown=0)
        return [word, self.cursor]

    result = loop.delay([0, 1, 2, 3], "secret")
    worker.run_jobs()
    assert list(result.get()) == ["secret", 4]
    assert seen == [0, 1, 2, 2, 3]
    assert "secret" not in str(stored(redis_client, result.id))


# ---- what must not be loaded -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepts", [True, False])
def test_a_job_with_a_foreign_pickle_fails_and_is_never_loaded(
    make: MakeWorker, redis_client: redis.Redis, tmp_path: Path, *, accepts: bool
) -> None:
    app, worker = make(**(PICKLES if accepts else {}))
    define(app)
    written = tmp_path / "written"
    envelope = Envelope("cloudpickle", dump({"value": WritesFile(written)}, "it"))
    app.queue("default").add("same", json.loads(envelope.to_json()))
    (failed,) = worker.run_jobs(propagate=False)
    assert isinstance(failed, JobFailed)
    reason = "is pickled but not signed" if accepts else "'cloudpickle', which this app does not accept"
    assert reason in failed.error
    assert (failed.category, failed.attempts_made) == ("permanent", 1)
    assert not written.exists()


def test_a_reader_without_the_keys_gets_the_reason(make: MakeWorker, broker_url: str) -> None:
    app, _ = make(**PICKLING, **ENCRYPTED)
    tasks = define(app)
    result, failed = tasks["same"].delay({1}), tasks["fail"].delay(7)
    result.get()
    failed.get(propagate=False)
    reader = App("reader", broker_url)
    with pytest.raises(DecodeError, match="'cloudpickle', which this app does not accept"):
        reader.result(result.id).get()
    with pytest.raises(Exception, match="7"):  # the class is known, so the exception is rebuilt from the message
        reader.result(failed.id).get()
    reader.close()


def test_queues_encrypt_jobs_and_results_that_are_added_manually(make: MakeWorker, redis_client: redis.Redis) -> None:
    app, _ = make(**ENCRYPTED)
    define(app)
    queue = app.queue("default")
    job = queue.add("same", {"value": "secret"})
    assert stored(redis_client, job.id)["data"].encode().startswith(ENVELOPE_START)
    assert app.result(job.id).get() == "secret"
    by_hand = queue.add("by-hand", {"value": "secret"})
    taken = queue.get_next_job("token", timeout=1)
    assert taken is not None
    taken.update_data({"value": "secret"})
    assert "secret" not in str(stored(redis_client, by_hand.id))
    taken.move_to_completed("secret", "token")
    assert "secret" not in str(stored(redis_client, by_hand.id))
    assert app.result(by_hand.id).get() == "secret"
