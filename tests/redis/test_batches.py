"""Batch tasks in the test's process: what their functions receive, and how each job ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any, TypedDict

import pytest

from bulltask import App, BatchJob, ConfigError, JobState, Middleware, PermanentError, group
from bulltask.errors import EncodeError, Ignore, InvalidJobError
from bulltask.registry.tasks import schema_of
from bulltask.signals import task_success
from bulltask.testing import InlineWorker, assert_enqueued, use_server

pytestmark = pytest.mark.redis


@dataclass
class Document:
    url: str
    day: date = date(2026, 1, 1)


class Click(TypedDict):
    url: str


@pytest.fixture
def app(broker_url: str) -> Iterator[App]:
    app = App("tested", "redis://unreachable.invalid:1", task_retry_backoff=1)
    with use_server(app, broker_url):
        yield app


@pytest.fixture
def sizes(app: App) -> list[int]:
    """The sizes of the batches of ``length``, a task that ends jobs with certain texts individually."""
    sizes: list[int] = []

    @app.task(name="length", batch=4, autoretry_for=(OSError,))
    def length(jobs: list[BatchJob[str]]) -> list[int]:
        sizes.append(len(jobs))
        for job in jobs:
            settle(job)
        if any(job.data == "raise" for job in jobs):
            raise PermanentError("all")
        return [len(job.data) for job in jobs]

    @app.task(name="other")
    def other() -> str:
        return "other"

    return sizes


def settle(job: BatchJob[str]) -> None:
    """End a job individually if its text says so."""
    match job.data:
        case "permanent":
            job.fail(PermanentError("why"))
        case "transient" if not job.request.retries:
            job.fail(OSError("later"))
        case "again" if not job.request.retries:
            job.retry(countdown=5)
        case "own":
            job.complete(-1)
        case _:
            pass


def send(app: App, *texts: str) -> list[Any]:
    return [app.send_task("length", (text,)) for text in texts]


@pytest.mark.every_topology
def test_waiting_jobs_run_in_batches_and_each_has_its_own_result(
    app: App, worker: InlineWorker, sizes: list[int]
) -> None:
    jobs = send(app, *["a" * count for count in range(10)])
    worker.run_jobs()
    assert [job.get() for job in jobs] == list(range(10))
    assert sizes == [4, 4, 2]


def test_one_job_fails_one_is_retried_and_the_others_complete(app: App, worker: InlineWorker, sizes: list[int]) -> None:
    bad, again, own, good = send(app, "permanent", "again", "own", "good")
    worker.run_jobs(propagate=False)
    assert (bad.state, again.state, own.get(), good.get()) == (JobState.FAILED, JobState.DELAYED, -1, 4)
    worker.run_for(6)
    assert again.get() == 5
    assert sizes == [4, 1]
    with pytest.raises(PermanentError, match="why"):
        bad.get()


def test_an_exception_applies_to_jobs_that_did_not_end_individually(
    app: App, worker: InlineWorker, sizes: list[int]
) -> None:
    own, raising, third = send(app, "own", "raise", "third")
    worker.run_jobs(propagate=False)
    assert own.get() == -1
    assert [raising.state, third.state] == [JobState.FAILED] * 2
    assert [str(job.info) for job in (raising, third)] == ["all"] * 2


def test_a_job_that_fails_individually_is_retried_by_the_tasks_rules(
    app: App, worker: InlineWorker, sizes: list[int]
) -> None:
    later, good = send(app, "transient", "good")
    worker.run_jobs()
    assert (later.state, good.get()) == (JobState.DELAYED, 4)
    worker.run_for(60)
    assert later.get() == 9


def test_a_job_of_another_task_ends_a_batch_and_keeps_its_place(
    app: App, worker: InlineWorker, sizes: list[int]
) -> None:
    send(app, "a", "b")
    app.send_task("other")
    send(app, "c")
    events = worker.run_jobs()
    assert [getattr(event, "task", None) for event in events] == ["length", "length", "other", "length"]
    assert sizes == [2, 1]


def test_prioritized_and_paused_jobs_are_collected_as_a_worker_would_acquire_them(
    app: App, worker: InlineWorker, sizes: list[int]
) -> None:
    late, early = (app.send_task("length", ("x",), priority=priority) for priority in (2, 1))
    first = app.send_task("length", ("y",))
    events = worker.run_jobs()
    assert [event.job_id for event in events] == [first.id, early.id, late.id]  # type: ignore[attr-defined]
    assert sizes == [3]


def test_the_data_of_a_job_is_the_argument(app: App, worker: InlineWorker) -> None:
    got: list[Any] = []

    @app.task(batch=10)
    def index(jobs: list[BatchJob[Document]]) -> None:
        got.extend(job.data for job in jobs)

    @app.task(batch=10)
    def count(jobs: list[BatchJob[Click]]) -> None:
        got.extend(job.data for job in jobs)

    @app.task(batch=10)
    def anything(jobs: list[BatchJob]) -> None:
        got.extend(job.data for job in jobs)

    sent = index.delay(Document("a", date(2026, 2, 3)))
    assert json.loads(app.queue("default").get_job(sent.id).data_text) == {"url": "a", "day": "2026-02-03"}  # type: ignore[union-attr]
    assert_enqueued(app, index, (Document("a", date(2026, 2, 3)),))
    app.queue("default").add(index.name, {"url": "b"})
    app.send_task(index.name, kwargs={"url": "c"})
    worker.run_jobs()
    assert got == [Document("a", date(2026, 2, 3)), Document("b"), Document("c")]
    got.clear()

    count.delay({"url": "d"})
    for value in ([1, 2], None, "text", {"x": 1}):
        anything.delay(value)
    worker.run_jobs()
    assert got == [{"url": "d"}, [1, 2], None, "text", {"x": 1}]

    with pytest.raises(EncodeError):
        index.delay("no document")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        index.delay()  # type: ignore[call-arg]


def test_the_schema_of_the_data_is_that_of_the_argument() -> None:
    app = App("schema")

    @app.task(name="index", batch=10)
    def index(jobs: list[BatchJob[Click]]) -> list[int]:
        return [len(job.data["url"]) for job in jobs]

    @app.task(name="total", batch=10)
    def total(jobs: list[BatchJob[list[int]]]) -> list[int]:
        return [sum(job.data) for job in jobs]

    schema = schema_of(app.tasks.values(), app._config)
    assert schema["$defs"]["Click"]["properties"] == {"url": {"type": "string"}}
    entries = schema["tasks"]
    assert entries["index"]["data"] == {"$ref": "#/$defs/Click"}
    assert entries["index"]["returnvalue"] == {"type": "integer"}
    numbers = {"type": "array", "items": {"type": "integer"}}
    assert entries["total"]["data"] == {"type": "array", "prefixItems": [numbers], "minItems": 1, "maxItems": 1}


def test_malformed_data_fails_one_job_of_a_batch(app: App, worker: InlineWorker) -> None:
    @app.task(batch=10)
    def index(jobs: list[BatchJob[Document]]) -> list[str]:
        return [job.data.url for job in jobs]

    queue = app.queue("default")
    bad, empty = queue.add(index.name, {"uri": "a"}), queue.add(index.name, [])
    good = index.delay(Document("a"))
    worker.run_jobs(propagate=False)
    assert good.get() == "a"
    for job in (bad, empty):
        with pytest.raises(InvalidJobError):
            app.result(job.id).get()


@pytest.mark.parametrize("returned", [[1], {"a": 1}, "ab", 5])
def test_a_function_that_does_not_return_one_result_for_each_job_fails_all(
    app: App, worker: InlineWorker, returned: Any
) -> None:
    @app.task(name="wrong", batch=10)
    def wrong(jobs: list[BatchJob[int]]) -> Any:
        return returned

    jobs = [wrong.delay(1), wrong.delay(2)]
    worker.run_jobs(propagate=False)
    for job in jobs:
        with pytest.raises(PermanentError, match=r"batch task wrong returned .* for 2 jobs"):
            job.get()


def test_canvases_pass_results_to_and_from_the_jobs_of_a_batch(app: App, worker: InlineWorker) -> None:
    @app.task
    def find(url: str) -> Document:
        return Document(url)

    @app.task(batch=10)
    def index(jobs: list[BatchJob[Document]]) -> list[str]:
        return [f"{len(jobs)} {job.data.url}" for job in jobs]

    @app.task(batch=10)
    def join(jobs: list[BatchJob[list[str]]]) -> list[str]:
        return [" + ".join(job.data) for job in jobs]

    result = (group(find.s("a") | index.s(), index.s(Document("b"))) | join.s()).delay()
    worker.run_jobs()
    assert sorted(str(result.get()).split(" + ")) in [["1 a", "1 b"], ["2 a", "2 b"]]


def test_a_rate_limit_holds_the_jobs_of_a_batch_one_by_one(app: App, worker: InlineWorker) -> None:
    sizes: list[int] = []

    @app.task(batch=10, rate_limit="2/s")
    def limited(jobs: list[BatchJob[int]]) -> list[int]:
        sizes.append(len(jobs))
        return [job.data for job in jobs]

    jobs = [limited.delay(number) for number in range(6)]
    worker.run_for(10)
    assert [job.get() for job in jobs] == list(range(6))
    assert sum(sizes) == 6


def test_async_functions_receive_batches(app: App, worker: InlineWorker) -> None:
    @app.task(batch=10)
    async def double(jobs: list[BatchJob[int]]) -> list[int]:
        return [2 * job.data for job in jobs]

    jobs = [double.delay(number) for number in range(3)]
    worker.run_jobs()
    assert [job.get() for job in jobs] == [0, 2, 4]


def test_hooks_are_called_for_each_job(app: App, worker: InlineWorker, sizes: list[int]) -> None:
    log: list[str] = []

    class Hooks(Middleware):
        def before_run(self, request: Any) -> None:
            log.append(f"before {request.args}")
            if request.args == ("drop",):
                raise app_error

        def after_run(self, request: Any, result: object, error: BaseException | None) -> None:
            log.append(f"after {result} {error!r}")

    app_error = Ignore()
    app.add_middleware(Hooks())

    @task_success.connect(weak=False)
    def succeeded(result: object, **_: Any) -> None:
        log.append(f"success {result}")

    try:
        jobs = send(app, "a", "drop", "permanent")
        worker.run_jobs(propagate=False)
    finally:
        task_success.disconnect(succeeded)
    assert sizes == [2]
    assert [job.state for job in jobs] == [JobState.COMPLETED, JobState.COMPLETED, JobState.FAILED]
    assert log == [
        "before ('a',)",
        "before ('drop',)",
        "before ('permanent',)",
        "after None PermanentError('why')",
        "after None Ignore()",
        "after 1 None",
        "success 1",
        "success None",
    ]


def test_a_call_without_a_worker_is_a_batch_of_one(app: App, sizes: list[int], broker_url: str) -> None:
    length: Any = app.tasks["length"]
    assert length("four") == 4
    assert length("own") == -1
    with pytest.raises(PermanentError, match="why"):
        length("permanent")
    assert length.apply(("four",)).get() == 4
    assert length.map(["a", "bb"]).apply().get() == [1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "from 1 to 1,000"),
        ({"batch": True}, "from 1 to 1,000"),
        ({"batch_wait": 1}, "batch_wait needs batch"),
        ({"batch": 5, "batch_wait": -1}, "batch_wait"),
        ({"batch": 5, "bind": True}, "cannot have bind=True"),
        ({"batch": 5, "checkpoint": True}, "cannot have checkpoint=True"),
        ({"batch": 5, "spark": True}, "cannot have spark=True"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        App("refusing").task(name="refused", **options)(lambda jobs: None)


def test_invalid_functions_and_type_hints_are_rejected() -> None:
    app = App("refusing")

    def two(first: Any, second: Any) -> None: ...

    with pytest.raises(ConfigError, match="called with one argument"):
        app.task(batch=5, name="two")(two)

    @app.task(batch=5)
    def wrong(jobs: list[int]) -> None: ...

    @app.task(batch=5)
    def one(jobs: list[BatchJob[int]]) -> int:
        return len(jobs)

    refused: list[tuple[Any, str]] = [(wrong, "must be a list"), (one, "must return a list")]
    for task, message in refused:
        with pytest.raises(ConfigError, match=message):
            task._codec.check_types()


def test_fail_takes_an_exception(sizes: list[int], app: App) -> None:
    @app.task(name="text", batch=5)
    def text(jobs: list[BatchJob[int]]) -> None:
        jobs[0].fail("why")  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="PermanentError"):
        text(1)
