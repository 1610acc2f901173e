"""What type checkers must refuse; `test_types.py` takes the comments away and sees to it that each line is refused.

Both checkers complain about a comment that is not needed, so that `make lint` guards these lines as well.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true
from __future__ import annotations

import bulltask
from bulltask import App, AsyncResult, Context, shared_task
from bulltask.jobs.job import JobOptions, NewJob, RunningJob
from bulltask.queue import Job

app = App("typed")


@app.task
def add(x: int, y: int = 1) -> int:
    return x + y


@app.task(queue="web")
async def fetch(url: str) -> bytes:
    return url.encode()


@app.task(bind=True)
def bound(self: Context, x: int) -> str:
    return str(x)


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
    add.delay(1, z=2)  # type: ignore[call-arg]
    add.s(x="1")  # type: ignore[arg-type]
    fetch.delay(5)  # type: ignore[arg-type]
    shared.delay("1")  # type: ignore[arg-type]


async def awaited_arguments() -> None:
    await add.adelay("1")  # type: ignore[arg-type]
    await fetch.adelay()  # type: ignore[call-arg]
    await fetch(5)  # type: ignore[arg-type]


def a_context_is_no_argument(context: Context) -> None:
    bound.delay(context, 1)  # type: ignore[call-arg, arg-type]
    bound.delay("1")  # type: ignore[arg-type]
    bound(x="1")  # type: ignore[arg-type]


def results() -> object:
    one: AsyncResult[str] = add.delay(1)  # type: ignore[assignment]
    two: str = add.delay(1).get()  # type: ignore[assignment]
    three: bytes = fetch("u")  # type: ignore[assignment]
    return one, two, three


async def awaited_results() -> object:
    one: str = await fetch.adelay("u")  # type: ignore[assignment]
    two: str = await (await fetch.adelay("u"))  # type: ignore[assignment]
    return one, two


def options() -> None:
    add.apply_async(5)  # type: ignore[arg-type]
    add.delay(1).get(timeout="5")  # type: ignore[arg-type]
    app.task(5)  # type: ignore[call-overload]
    app.task(name=5)  # type: ignore[call-overload]


def values_stay_as_they_are(active: RunningJob, job: NewJob) -> None:
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
