"""Calls that type checkers must reject. `test_types.py` removes the comments and checks that each line is rejected.

Both checkers report a comment that is not needed, so `make lint` checks these lines as well.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true
from __future__ import annotations

import bulltask
from bulltask import App, AsyncResult, BatchJob, Context, chain, current_task, group, shared_task
from bulltask.jobs.job import JobOptions, NewJob, RunningJob
from bulltask.queue import Job
from bulltask.signals import task_failure

app = App("typed")


@app.task
def add(x: int, y: int = 1) -> int:
    return x + y


@app.task
def add3(x: int, y: int, z: int) -> int:
    return x + y + z


@app.task
def report(job: dict[str, str], error: str, traceback: str) -> None: ...


@app.task(queue="web")
async def fetch(url: str) -> bytes:
    return url.encode()


@app.task(bind=True)
def bound(self: Context, x: int) -> str:
    return str(x)


@app.task(batch=10)
def index(jobs: list[BatchJob[str]]) -> list[int]:
    return [len(job.data) for job in jobs]


@app.task
def upper(text: str, times: int = 1) -> str:
    return text.upper() * times


@app.task
def repeat(text: str, times: int) -> str:
    return text * times


@shared_task
def shared(x: int) -> int:
    return x


def names() -> None:
    bulltask.Ap("typed")  # type: ignore[attr-defined]
    bulltask.queue.Queu()  # type: ignore[attr-defined]


def arguments() -> None:
    add("1")  # type: ignore[arg-type]
    add.delay("1")  # type: ignore[arg-type]
    add.delay()  # type: ignore[call-arg]
    add.delay(1, 2, 3)  # type: ignore[call-arg]
    upper.delay_many([(1,)])  # type: ignore[list-item]
    upper.delay_many([("a", 1), ("b", "c")])  # type: ignore[list-item]
    repeat.starmap([("a",), ("b", 1)])  # type: ignore[list-item]
    repeat.chunks([("a", 1, 2)], 5)  # type: ignore[list-item]
    report.delay_many([({"a": "b"},), ({}, "error", "trace")])  # type: ignore[list-item]
    report.delay_many([({"a": "b"}, "error")])  # type: ignore[list-item]
    fetch.delay_many(["u", 1])  # type: ignore[list-item]
    add.delay(1, z=2)  # type: ignore[call-arg]
    add.s(x="1")  # type: ignore[call-overload]
    fetch.delay(5)  # type: ignore[arg-type]
    shared.delay("1")  # type: ignore[arg-type]


def batches() -> None:
    index.delay(5)  # type: ignore[arg-type]
    index.delay("a", "b")  # type: ignore[call-arg]


async def awaited_arguments() -> None:
    await add.adelay("1")  # type: ignore[arg-type]
    await fetch.adelay()  # type: ignore[call-arg]
    await fetch(5)  # type: ignore[arg-type]


def context_as_argument(context: Context) -> None:
    bound.delay(context, 1)  # type: ignore[call-arg, arg-type]
    bound.delay("1")  # type: ignore[arg-type]
    bound(x="1")  # type: ignore[arg-type]


def loops(context: Context) -> None:
    context.iterate(lambda cursor: [cursor])  # type: ignore[call-overload]
    context.iterate(5)  # type: ignore[call-overload]
    context.iterate(list, cursor=1)  # type: ignore[call-overload]


def results() -> object:
    first: AsyncResult[str] = add.delay(1)  # type: ignore[assignment]
    second: str = add.delay(1).get()  # type: ignore[assignment]
    third: bytes = fetch("u")  # type: ignore[assignment]
    return first, second, third


async def awaited_results() -> object:
    first: str = await fetch.adelay("u")  # type: ignore[assignment]
    second: str = await (await fetch.adelay("u"))  # type: ignore[assignment]
    return first, second


def options() -> None:
    add.apply_async(5)  # type: ignore[arg-type]
    add.delay(1).get(timeout="5")  # type: ignore[arg-type]
    app.task(5)  # type: ignore[call-overload]
    app.task(name=5)  # type: ignore[call-overload]
    app.task(max_retrys=5)  # type: ignore[call-overload]
    app.task(max_retries="5")  # type: ignore[call-overload]
    app.task(bind=True, acks_late="yes")  # type: ignore[call-overload]
    shared_task(queue=5)  # type: ignore[call-overload]
    add.apply_async((1,), countdwon=5)  # type: ignore[call-arg]
    add.apply_async((1,), countdown="5")  # type: ignore[arg-type]
    add.apply((1,), priority="5")  # type: ignore[arg-type]
    add.s(1).set(queue=5)  # type: ignore[arg-type]
    add.s(1).apply_async(link=add)  # type: ignore[arg-type]
    group(add.s(1)).apply_async(eta=5)  # type: ignore[arg-type]
    app.send_task("add", headers=5)  # type: ignore[arg-type]
    app.signature("add", immutable="yes")  # type: ignore[arg-type]


async def awaited_options() -> None:
    await add.aapply_async((1,), routing_key="x")  # type: ignore[call-arg]
    await app.asend_task("add", expires="1h")  # type: ignore[arg-type]


def immutable_values(active: RunningJob, job: NewJob) -> None:
    active.name = "another"  # type: ignore[misc]
    job.options.priority = 5  # type: ignore[misc]
    JobOptions(3)  # type: ignore[call-arg]


def queues() -> object:
    queue = app.queue("mail")
    queue.add("send", {"to": object()})  # type: ignore[dict-item]
    queue.add("send", priority="2")  # type: ignore[arg-type]
    queue.get_next_job()  # type: ignore[call-arg]
    job: Job = queue.get_next_job("token")  # type: ignore[assignment]
    job.move_to_failed(5)  # type: ignore[arg-type]
    return job


def canvases() -> None:
    add.s(1, 2) | add.s(1, 2)  # type: ignore[operator]
    add.s(1, 2) | fetch.s()  # type: ignore[operator]
    group(add.s(1, 2), add.s(3, 4)) | add.s(1)  # type: ignore[operator]
    chain(add.s(1, 2), fetch.s())  # type: ignore[misc]
    chain(add.s(1, 2), add.s(1), add.s(2), add.s(3), upper.s())  # type: ignore[misc]
    chain(add.s(), add.s(), add.s(), upper.s(), add.s(), add.s(), add.s(), add.s(), add.s())  # type: ignore[misc]
    add.s(1, 2) | report.s()  # type: ignore[operator]
    add3.s()  # type: ignore[call-overload]
    add.s(1, 2).delay(3)  # type: ignore[call-overload]
    add.s().delay("1")  # type: ignore[call-overload]
    (add.s(1, 2) | add.s(1)).delay(3)  # type: ignore[call-overload]
    chain(add.s(1, 2), add.s(1))(3)  # type: ignore[call-overload]
    group(add.s(1, 2), add.s(3, 4)).delay(5)  # type: ignore[call-overload]


def callbacks() -> None:
    add.apply_async((1, 2), link=upper.s())  # type: ignore[arg-type]
    add.apply_async((1, 2), link=[add.s(1), upper.s()])  # type: ignore[list-item]
    add.s(1, 2).set(link=upper.s())  # type: ignore[arg-type]
    (add.s(1, 2) | add.s(1)).apply_async(link=upper.s())  # type: ignore[arg-type]


def many_calls_in_few_jobs() -> None:
    add.map(["a"])  # type: ignore[list-item]
    bound.map(["a"])  # type: ignore[list-item]
    fetch.map([1])  # type: ignore[list-item]
    add.starmap([("a", 1)])  # type: ignore[list-item]
    upper.starmap([(1, "a")])  # type: ignore[list-item]
    upper.starmap([("a", 1, 2)])  # type: ignore[list-item]
    upper.chunks([(1, "a")], 10)  # type: ignore[list-item]


def replacements(context: Context) -> None:
    context.replace(5)  # type: ignore[arg-type]


async def awaited_replacements(context: Context) -> None:
    await add.s(1, 2).adelay(3)  # type: ignore[call-overload]
    await context.areplace(add)  # type: ignore[arg-type]


def hooks() -> None:
    app.add_middleware(print)  # type: ignore[arg-type]
    task_failure.connect(print, sendr="add")  # type: ignore[call-overload]


def task_classes() -> None:
    app.task(base=Context)  # type: ignore[arg-type]


def settings() -> None:
    App("shop", lock_duraton=60)  # type: ignore[call-arg]
    App("shop", lock_duration="a minute")  # type: ignore[arg-type]
    app.conf.lock_duraton = 60  # type: ignore[attr-defined]
    app.conf.lock_duration = "a minute"  # type: ignore[assignment]
    app.conf.update(max_payload=None)  # type: ignore[arg-type]
    repr(app.conf.no_such_setting)  # type: ignore[attr-defined]


def periodic_tasks() -> None:
    app.add_periodic_task(10.0, "add")  # type: ignore[arg-type]
    app.add_periodic_task(10.0, add.s(1), expire=5)  # type: ignore[call-arg]
    current_task.updat_state()  # type: ignore[attr-defined]
