"""Calls that type checkers must accept. mypy --strict and pyright check this file; it is never executed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import timedelta
from typing import Any, Never, assert_type

from pyspark.sql import DataFrame

from bulltask import (
    App,
    AsyncResult,
    AsyncTask,
    BatchJob,
    Celery,
    Context,
    GroupResult,
    JobState,
    Middleware,
    Request,
    ResultSet,
    Signature,
    Task,
    chain,
    chord,
    crontab,
    current_task,
    get_task_logger,
    group,
    schedule,
    shared_task,
    signature,
)
from bulltask.events import JobFailed
from bulltask.hooks import OutgoingJob
from bulltask.jobs.schedules import Scheduler
from bulltask.queue import AsyncJob, AsyncQueue, FlowJob, Job, Queue
from bulltask.queue.flows import FlowNode
from bulltask.registry.canvas import Canvas, Chain, Group
from bulltask.signals import task_failure

app = App("typed", lock_duration=60)
assert_type(Celery("typed", broker="redis://localhost", include=["shop.tasks"]), App)


# --- plain tasks ------------------------------------------------------------------------------------------------------


@app.task
def add(x: int, y: int = 1) -> int:
    return x + y


@app.task(queue="mail", max_retries=None, retry_backoff=timedelta(seconds=5), autoretry_for=(OSError,))
def send(to: str, *, subject: str = "") -> None: ...


@app.task
def tell(job: dict[str, str], error: str, traceback: str, label: str = "") -> None: ...


@app.task(bind=True)
async def atell(self: Context, job: Any, error: str, traceback: str) -> None: ...


class Row:
    id: int


def rows_after(last_id: int | None) -> list[Row]:
    return [] if last_id else [Row()]


async def arows_after(last_id: int | None) -> list[Row]:
    return rows_after(last_id)


def lines_from(offset: int | None) -> Iterator[tuple[str, int]]:
    yield "", offset or 0


@app.task(bind=True, checkpoint=True)
def loops(self: Context) -> None:
    for number in self.iterate(range(5), total=5):
        assert_type(number, int)
    for row in self.iterate(rows_after, cursor=lambda row: row.id):
        assert_type(row, Row)
    for row in self.iterate(lambda last_id: rows_after(last_id or 0), cursor=lambda row: row.id):
        assert_type(row, Row)
    for line, offset in self.iterate(lines_from, cursor=lambda item: item[1]):
        assert_type((line, offset), tuple[str, int])


@app.task(bind=True, checkpoint=True)
async def aloops(self: Context) -> None:
    async for text in self.iterate(["a"]):
        assert_type(text, str)
    async for row in self.iterate(arows_after, cursor=lambda row: row.id):
        assert_type(row, Row)


@app.task()
def total(*numbers: int, **named: int) -> float:
    return sum(numbers) / len(named)


def plain() -> None:
    assert_type(add(1, y=2), int)
    assert_type(add.delay(1, y=2), AsyncResult[int])
    assert_type(add.delay(1), AsyncResult[int])
    assert_type(add.apply_async((1, 2), countdown=5), AsyncResult[int])
    assert_type(add.apply_async((1, 2), retry=False, shadow="sum", compression="gzip"), AsyncResult[int])
    assert_type(add.apply_async((1, 2), expires=timedelta(hours=1), link=add.s(1), headers={"a": 1}), AsyncResult[int])
    app.task(acks_late=True, autoretry_for=[OSError], retry_kwargs={"max_retries": None}, throws=(KeyError,))
    shared_task(bind=True, max_retries=None, retry_backoff=lambda attempts, _exc: attempts * 2.0, track_started=True)
    assert_type(add.apply((1, 2), throw=True), AsyncResult[int])
    assert_type(add.delay_many([(1, 2), (3,)]), list[AsyncResult[int]])
    assert_type(add.s(1, 2), Signature[Never, int])
    assert_type(add.s(1), Signature[int, int])
    assert_type(add.s(1, 2).set(countdown=5), Signature[Never, int])
    assert_type(add.delay(1).get(timeout=5), int)
    assert_type(add.delay(1).get(timedelta(seconds=5)), int)
    assert_type(add.delay(1).state, JobState)
    assert_type(add.name, str)
    send("a@b", subject="x")
    assert_type(send.delay("a@b", subject="x"), AsyncResult[None])
    assert_type(total.delay(1, 2, a=3).get(), float)
    takes_task(add)


def takes_task(task: Task[..., int]) -> None: ...


# --- async tasks ------------------------------------------------------------------------------------------------------


@app.task
async def fetch(url: str) -> bytes:
    return url.encode()


@app.task(queue="web")
async def crawl(url: str, depth: int = 0) -> list[str]:
    return [url] * depth


async def asynchronous() -> None:
    coroutine = assert_type(fetch("u"), Coroutine[Any, Any, bytes])
    assert_type(await coroutine, bytes)
    assert_type(await fetch("u"), bytes)
    assert_type(await fetch.adelay("u"), AsyncResult[bytes])
    assert_type(await fetch.aapply_async(("u",), priority=1), AsyncResult[bytes])
    result = await crawl.adelay("u", depth=2)
    assert_type(await result, list[str])
    assert_type(await result.aget(timeout=5), list[str])
    assert_type(await add.adelay(1), AsyncResult[int])
    assert_type(fetch.delay("u"), AsyncResult[bytes])
    takes_async_task(fetch)


def takes_async_task(task: AsyncTask[[str], bytes]) -> None: ...


# --- batch tasks ------------------------------------------------------------------------------------------------------


@app.task(batch=100, batch_wait=0.05)
def index(jobs: list[BatchJob[str]]) -> None:
    for job in jobs:
        assert_type(job.data, str)
        job.fail(OSError(job.id))


@app.task(batch=10, queue="texts")
def lengths(jobs: list[BatchJob[str]]) -> list[int]:
    return [len(job.data) for job in jobs]


@shared_task(batch=10)
async def alengths(jobs: list[BatchJob[bytes]]) -> list[int] | None:
    jobs[0].retry(countdown=timedelta(seconds=5))
    return None


def batches() -> None:
    assert_type(index.delay("a"), AsyncResult[None])
    assert_type(lengths.delay("a"), AsyncResult[int])
    assert_type(lengths("a"), int)
    assert_type(alengths.delay(b"a"), AsyncResult[int])
    assert_type(lengths.s("a"), Signature[Never, int])


# --- bound tasks ------------------------------------------------------------------------------------------------------


@app.task(bind=True)
def bound(self: Context, x: int) -> str:
    assert_type(self.request, Request)
    assert_type(self.request.id, str)
    self.update_progress({"done": [x, 1.5, None]})
    if x < 0:
        self.retry(countdown=5, exc=ValueError(x))
        unreachable: int = "mypy knows that retry() does not return"  # noqa: F841
    return str(x)


@app.task(bind=True, name="bound.async")
async def bound_async(self: Context, *, x: int = 0) -> str:
    await self.aupdate_progress(50)
    return str(x)


async def with_context() -> None:
    assert_type(bound(1), str)
    assert_type(bound.delay(1), AsyncResult[str])
    assert_type(bound.s(x=1), Signature[Never, str])
    assert_type(await bound_async(x=1), str)
    assert_type(await bound_async.adelay(x=1), AsyncResult[str])


# --- shared tasks and names -------------------------------------------------------------------------------------------


@shared_task
def shared(x: int) -> int:
    return x


@shared_task(queue="mail")
async def shared_async(x: int) -> int:
    return x


@shared_task(bind=True)
def shared_bound(self: Context, x: int) -> int:
    return x + self.request.retries


def notify(event: JobFailed) -> str:
    return event.error


def listeners() -> None:
    assert_type(app.on(JobFailed, notify), Callable[[JobFailed], str])
    assert_type(app.on(JobFailed)(notify), Callable[[JobFailed], str])


async def other() -> None:
    assert_type(shared.delay(1), AsyncResult[int])
    assert_type(await shared_async(1), int)
    assert_type(shared_async.delay(1), AsyncResult[int])
    assert_type(shared_bound.delay(1), AsyncResult[int])
    assert_type(app.send_task("remote", kwargs={"x": 1}), AsyncResult[Any])
    assert_type(app.send_many([add.s(1), send.s("a@b"), fetch.s("u")]), list[AsyncResult[Any]])
    assert_type(app.result("id", "mail"), AsyncResult[Any])
    assert_type(app.result("id", task=shared), AsyncResult[int])


# --- queues, jobs, flows, schedulers ----------------------------------------------------------------------------------


def queues() -> None:
    queue = assert_type(app.queue("mail"), Queue)
    job = assert_type(queue.add("send", {"to": ["ann"]}, delay=timedelta(hours=1), priority=2), Job)
    assert_type(queue.add_bulk([{"name": "send"}, {"name": "send", "options": {"lifo": True}}]), list[Job])
    assert_type(queue.get_job(job.id), Job | None)
    assert_type([item.id for item in queue.iter_jobs("waiting", page_size=5)], list[str])
    assert_type(queue.get_job_counts("waiting"), dict[str, int])
    assert_type(job.get_state(), JobState)
    assert_type(job.get_dependencies().failed, tuple[str, ...])
    assert_type(job.next_iteration_id, str | None)
    while acquired := queue.get_next_job("token", timeout=timedelta(seconds=1)):
        assert_type(acquired.token, str)
        assert_type(acquired.move_to_completed({"sent": 1}, fetch_next=True), Job | None)
        assert_type(acquired.move_to_failed(ValueError("no")), Job | None)
        assert_type(acquired.move_to_waiting_children(), bool)
    assert_type(queue.check_stalled(), list[str])
    assert_type([item.next_ms for item in queue.repeatables.list()], list[int])
    assert_type(queue.repeatables.remove("tick", every=60), bool)


async def async_queues() -> None:
    queue = assert_type(app.aqueue("mail"), AsyncQueue)
    job = assert_type(await queue.add("send", {"to": "ann"}), AsyncJob)
    assert_type([item.id async for item in queue.iter_jobs()], list[str])
    acquired = assert_type(await queue.get_next_job("token"), AsyncJob | None)
    if acquired is not None:
        assert_type(await acquired.move_to_completed(None, fetch_next=True), AsyncJob | None)
    assert_type(await job.get_state(), JobState)
    assert_type(await queue.schedulers.upsert("s", every=60), Scheduler | None)
    assert_type(await queue.repeatables.remove_by_key("old"), bool)


def flows() -> None:
    node = assert_type(app.flows().add(FlowJob.of(add.s(1), [FlowJob("send", "mail")])), FlowNode[Job])
    assert_type([child.job for child in node.walk()], list[Job])
    assert_type(app.queue("mail").schedulers.upsert("s", cron="0 3 * * *", tz="UTC"), Scheduler | None)


def spark_rows(frame: DataFrame) -> None:
    assert_type(add.map_dataframe(frame, ["x", "y"], wait=60), DataFrame)
    assert_type(add.map_dataframe(frame, {"x": "n"}, options={"priority": 5}), DataFrame)


# --- canvas -----------------------------------------------------------------------------------------------------------


@app.task
def text_of(number: int, prefix: str = "") -> str:
    return f"{prefix}{number}"


@app.task
def in_the_background() -> None: ...


@app.task
async def count(texts: list[str]) -> int:
    return len(texts)


def canvases() -> None:
    assert_type(text_of.s(), Signature[int, str])
    assert_type(text_of.si(1), Signature[object, str])
    assert_type(add.s(1, 2) | text_of.s("a"), Chain[Never, str])
    assert_type((add.s(1, 2) | text_of.s("a")).delay(), AsyncResult[str])
    assert_type(chain(add.s(1, 2), add.s(1), text_of.s()), Chain[Never, str])
    assert_type(chain(add.s(), add.s(1), add.s(1), text_of.s()), Chain[int, str])
    assert_type(group(text_of.s(1, "a"), text_of.s(2, "b")).delay(), GroupResult[str])
    assert_type(group(text_of.s(1, "a"), text_of.s(2, "b")).apply(), GroupResult[str])
    assert_type(group(text_of.si(n) for n in range(3)) | count.s(), Chain[object, int])
    assert_type(chord([text_of.si(1)], count.s()).delay().get(), int)
    assert_type(chord([text_of.si(1)])(count.s()), AsyncResult[int])
    assert_type((add.s(1, 2) | group(text_of.s(), text_of.s("a"))).delay(), GroupResult[str])
    assert_type(add.s(1, 2) | group(text_of.s(), text_of.s("a")) | count.s(), Chain[Never, int])
    assert_type(add.chunks([(1, 2), (3, 4)], 1).delay(), GroupResult[list[int]])
    assert_type(app.signature("other") | add.s(1) | app.signature("another"), Chain[Any, Any])
    assert_type(chain(text_of.si(n) for n in range(9)), Chain[Any, Any])
    assert_type(chain(add.s(), add.s(), add.s(), add.s(), add.s(), add.s(), add.s(), text_of.s()), Chain[int, str])
    assert_type(
        chain(add.s(), app.signature("other"), count.s(), send.si("a"), add.si(1), *[add.s(1)] * 9), Chain[int, Any]
    )


def arguments_of_canvases(canvas: Canvas[Any, Any]) -> None:
    add.s(1).delay()
    add.s(1).delay(5)
    add.s().delay(1, 2)
    text_of.s().delay(1, "a")
    text_of.s(prefix="a").delay(1)
    send.s("a").delay(subject="x")
    add.si(1, 2).delay("ignored")
    total.s(1).delay(2, 3)
    (add.s() | text_of.s()).delay(1)
    assert_type(chain(add.s(1), add.s(2))(5), AsyncResult[int])
    assert_type(group(add.s(), add.s(1)).delay(5), GroupResult[int])
    assert_type(group(add.s(1, 2))(), GroupResult[int])
    canvas.delay(1, "a", b=2)


def dictionaries() -> None:
    assert_type(add.s(1).to_dict(), dict[str, Any])
    assert_type(signature(add.s(1).to_dict()), Canvas[Any, Any])
    assert_type(Signature.from_dict(group(add.s(1)).to_dict(), app=app), Canvas[Any, Any])


def callbacks(canvas: Canvas[Any, Any], task: Task) -> None:
    add.apply_async((1,), link=[add.s(1), text_of.s(), send.si("a"), total.s(), canvas, app.signature("other")])
    add.apply_async((1,), link=(text_of.s() | send.s()), link_error=send.si("a"))
    add.apply_async((1,), link=group(add.s(1), add.s(2)))
    add.s(1, 2).set(link=text_of.s("a"))
    (add.s(1, 2) | text_of.s()).apply_async(link=send.s())
    chord([text_of.si(1)])(count.s(), link=add.s(1))
    group(add.s(1, 2)).apply_async(link=add.s(1))
    task.apply_async((1,), link=send.s())


def error_callbacks() -> None:
    assert_type(add.s(1, 2).on_error(tell.s()), Signature[Never, int])
    assert_type((add.s(1, 2) | add.s(1)).on_error(tell.s("label")).delay(), AsyncResult[int])
    assert_type(group(add.s(1, 2)).on_error(tell.s()).delay(), GroupResult[int])
    assert_type(chord([text_of.si(1)], count.s()).on_error(send.s()).set(priority=1).delay(), AsyncResult[int])
    add.apply_async((1, 2), link_error=[tell.s(), atell.s(), send.s()])
    assert_type(add.s(1, 2).freeze(), AsyncResult[int])


def many_calls_in_few_jobs(any_rows: list[Any], sequences: list[Sequence[Any]], numbers: list[tuple[int, ...]]) -> None:
    assert_type(add.map([1, 2]), Signature[Never, list[int]])
    assert_type(fetch.map(str(n) for n in range(3)), Signature[Never, list[bytes]])
    assert_type(bound.map(range(3)), Signature[Never, list[str]])
    count.map([["a"], ["b", "c"]])
    assert_type(text_of.starmap([(1, "a"), (2,)]), Signature[Never, list[str]])
    assert_type(crawl.starmap({"u": 1}.items()), Signature[Never, list[list[str]]])
    assert_type(text_of.chunks([(1, "a"), (2, "b")], 1), Group[Never, list[str]])
    add.starmap(zip(range(3), range(3), strict=True))
    text_of.starmap([[1, "a"], [2]])
    mixed = [(1, 2), (3,)]
    add.delay_many(mixed)
    total.delay_many([(1, 2, 3, 4, 5), (6,)])
    in_the_background.delay_many([()] * 100)
    for rows in (any_rows, sequences):
        text_of.delay_many(rows)
        add.map(any_rows)
    add.starmap(numbers)


def replacements(context: Context, canvas: Canvas[Any, Any]) -> None:
    if add.name:
        context.replace(context.s(1))
    if send.name:
        context.replace(add.s(1, 2) | group(text_of.s(), text_of.s("a")))
    context.replace(canvas)


# --- hooks ------------------------------------------------------------------------------------------------------------


class Tracing(Middleware):
    def before_send(self, job: OutgoingJob) -> None:
        assert_type(job.headers, dict[str, Any])

    async def aafter_run(self, request: Request, result: Any, exception: BaseException | None) -> None: ...


@task_failure.connect
def report(sender: Task[..., Any], task_id: str, **_: Any) -> None: ...


@task_failure.connect(sender=add, weak=False)
def report_add(**_: Any) -> str:
    return "reported"


def hooks() -> None:
    app.add_middleware(Tracing())
    assert_type(report_add(), str)
    assert_type(task_failure.connect(report_add, sender="add")(), str)
    assert_type(task_failure.disconnect(report_add), bool)
    get_task_logger(__name__).info("a line")


class DatabaseTask(Task):
    max_retries = 5

    @property
    def db(self) -> str:
        return self.request.id


@app.task(base=DatabaseTask, bind=True, queue="db")
def with_class(self: DatabaseTask, x: int) -> str:
    self.update_state(state="HALF")
    return self.db * x


@shared_task(base=DatabaseTask, bind=True)
async def async_with_class(self: DatabaseTask) -> int | None:
    return self.max_retries


def task_classes() -> None:
    assert_type(with_class.delay(1), AsyncResult[str])
    assert_type(async_with_class.delay(), AsyncResult[int | None])


# --- periodic tasks ---------------------------------------------------------------------------------------------------


@app.on_after_configure.connect
def setup_periodic_tasks(sender: App, **kwargs: Any) -> None:
    assert_type(sender.add_periodic_task(10.0, add.s(1), name="every 10", expires=5), str)
    sender.add_periodic_task(timedelta(minutes=1), add, [1, 2])
    sender.add_periodic_task(crontab(hour=7, minute=0), send.si("a@example.org", subject="x"))
    sender.add_periodic_task(schedule(30), send.si("a@example.org", subject="x"))


# --- the running task -------------------------------------------------------------------------------------------------


@app.task(bind=True)
def looks_at_itself(self: Context, x: int) -> str | None:
    assert_type(self.max_retries, int | None)
    assert_type(self.default_retry_delay, float)
    self.apply_async((x,), countdown=5)
    return self.delay(x).id if self.request.retries == self.max_retries else self.AsyncResult("id").id


def in_any_function() -> None:
    if current_task:
        assert_type(current_task.request, Request)
        current_task.update_state(state="PROGRESS", meta={"done": 1})


# --- result sets ------------------------------------------------------------------------------------------------------


def results_of_any_jobs() -> None:
    results = ResultSet([add.delay(1), add.delay(2)])
    results.add(add.delay(3))
    results.discard("id")
    assert_type(results.get(timeout=5), list[int])
    assert_type(results[0], AsyncResult[int])
    ResultSet[Any]([add.delay(1), group(add.s(1, 2)).delay()]).revoke()


def settings(given: dict[str, Any]) -> None:
    App("shop", "redis://h", lock_duration=timedelta(minutes=1), task_routes={"a": "b"}, task_acks_late=True)
    App("shop", broker="redis://h", backend="redis://h", config_source="shop.settings", **given)
    app.conf.lock_duration, app.conf.timezone, app.conf.remove_on_fail = 60, "Europe/Berlin", {"age": 3600}
    app.conf.update({"max_payload": 5}, broker_url="redis://h", worker_concurrency=4, worker_prefetch_multiplier=1)
    app.conf.beat_schedule = {"a": {"task": "a", "schedule": 30.0}}
    assert_type(app.conf.max_payload, int)
    assert_type(app.conf.task_always_eager, bool)
