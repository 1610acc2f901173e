"""``assert_enqueued``: which jobs has the code under test sent?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from bulltask.app import App
from bulltask.clock import to_epoch_ms, to_ms
from bulltask.jobs import codec
from bulltask.queue import Job
from bulltask.registry.batches import to_wire
from bulltask.registry.task import AnyTask
from bulltask.testing.queues import queues_in_redis

__all__ = ["assert_enqueued", "enqueued_jobs"]

_STATES: Final = ("waiting", "prioritized", "delayed", "waiting-children")
_ETA_TOLERANCE_MS: Final = 1_000


def enqueued_jobs(app: App) -> list[Job]:
    """Return the jobs that are waiting or delayed, in all queues, oldest first."""
    with app.broker.pool.client() as client:
        client.connect()
        names = [keys.queue for keys in queues_in_redis(app, client)]
    jobs = [job for name in names for job in app.queue(name).get_jobs(_STATES)]
    return sorted(jobs, key=lambda job: (job.timestamp_ms, job.id))


def assert_enqueued(
    app: App,
    task: AnyTask[Any, Any] | str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    count: int | None = None,
    **expected: Any,
) -> list[Job]:
    """Assert that a job is waiting or delayed, in any queue; jobs that have already run do not count.

    Args:
        app: The app.
        task: The task or its name.
        args, kwargs: Some or all of the job's arguments; the others may have any value.
        count: The exact number of such jobs, 0 for none; ``None`` means at least one.
        expected: ``countdown``: the job's delay, in seconds or as a ``timedelta``; 0: it is not delayed. ``eta``: when
            it is due, a ``datetime``, accurate to a second. Or an attribute of :class:`bulltask.queue.Job`: ``queue``,
            ``priority``, ``id``, ``attempts`` …

    Returns:
        The jobs, oldest first.

    Raises:
        AssertionError: There are no such jobs, or not ``count``; the message lists all jobs that are enqueued.
        TypeError: The task has no such parameter, or a job no such attribute.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    name, arguments = _call(task, args, kwargs or {})
    for field in expected.keys() - {"countdown", "eta"}:
        if field.startswith("_") or not isinstance(getattr(Job, field, None), property):
            raise TypeError(f"a job has no attribute {field!r}")
    jobs = enqueued_jobs(app)
    found = [
        job
        for job in jobs
        if job.name == name
        and _contains(job.data, arguments)
        and all(_matches(job, field, value) for field, value in expected.items())
    ]
    if len(found) == count or (count is None and found):
        return found
    wanted = f"{name} {arguments}" + "".join(f", {field}={value!r}" for field, value in expected.items())
    number = f"{len(found)} instead of {count} jobs are" if count is not None else "no job is"
    lines = "".join(f"\n  {_describe(job)}" for job in jobs) or " nothing"
    raise AssertionError(f"{number} enqueued for {wanted}; enqueued:{lines}")


def _call(task: AnyTask[Any, Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, Any]:
    if isinstance(task, str):
        return task, list(args) if args else dict(kwargs)
    data: Any = task.arguments.bind_partial(args, kwargs)
    conversion = task.conversion
    data = data if conversion is None else conversion.encode_arguments(data)
    if task.is_batch:
        data = to_wire(data)
    convert = task.sender.config.convert
    return task.name, codec.decode(codec.encode(data, what=f"the arguments of task {task.name}", convert=convert))


def _contains(data: Any, arguments: Any) -> bool:
    if isinstance(arguments, dict) and isinstance(data, dict):
        return all(name in data and data[name] == value for name, value in arguments.items())
    return not arguments or data == arguments


def _matches(job: Job, field: str, value: Any) -> bool:
    match field:
        case "countdown":
            return job.delay_ms == to_ms(value, field)
        case "eta":
            return abs(job.timestamp_ms + job.delay_ms - to_epoch_ms(value)) <= _ETA_TOLERANCE_MS
        case _:
            return bool(getattr(job, field) == value)


def _describe(job: Job) -> str:
    delay = f", delayed by {job.delay_ms / 1000:g} s" if job.delay_ms else ""
    priority = f", priority {job.priority}" if job.priority else ""
    return f"{job.name} {job.data_text} in queue {job.queue}{delay}{priority}"
