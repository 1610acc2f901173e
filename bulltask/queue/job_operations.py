"""What is done with one job: operations of :class:`bulltask.queue.job.Job`, each written once.

What an operation changes in Redis it notes in the job's fields too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from bulltask.clock import Duration, to_ms
from bulltask.errors import ConfigError, JobNotFoundError, LockMismatchError
from bulltask.jobs import codec
from bulltask.jobs.options import check_priority, check_together
from bulltask.queue.answers import ChildFailures, Dependencies
from bulltask.queue.fields import JobFields
from bulltask.transport.operation import Operation, execute
from bulltask.transport.scripts import flow as flow_scripts
from bulltask.transport.scripts import job as job_scripts
from bulltask.transport.scripts.job import add_log, remove_job, update_progress

__all__ = [
    "change_delay",
    "change_priority",
    "clear_logs",
    "extend_lock",
    "get_children_values",
    "get_dependencies",
    "get_dependencies_count",
    "get_failed_children",
    "log",
    "promote",
    "refresh",
    "remove",
    "remove_child_dependency",
    "remove_deduplication_key",
    "remove_unprocessed_children",
    "retry",
    "set_data",
    "set_progress",
]

_OUTCOMES: Final = {"failed": "failed_reason", "completed": "returnvalue"}


def refresh(job: JobFields) -> Operation[None]:
    """Read all fields again."""
    record = yield from execute(job_scripts.read_job(job.link.keys, job.id))
    if record is None:
        raise JobNotFoundError(job.id, job.link.keys.name)
    job.become(record)


def set_data(job: JobFields, data: Any) -> Operation[None]:
    """Replace the data."""
    limit = job.link.broker.config.max_payload
    encoded = codec.encode(data, what=f"the data of job {job.id}", limit=limit)
    check_together(encoded, job.opts, limit, f"the data of job {job.id}")
    yield from execute(job_scripts.update_data(job.link.keys, job.id, encoded))
    job.change(data=codec.decode(encoded), data_text=encoded.decode())


def set_progress(job: JobFields, progress: codec.Json) -> Operation[None]:
    """Store the progress and tell listeners."""
    encoded = codec.encode(progress, what=f"progress of job {job.id}")
    yield from execute(update_progress(job.link.keys, job.id, encoded))
    job.change(progress=codec.decode(encoded))


def log(job: JobFields, line: str) -> Operation[int]:
    """Append a line to the log; the result is how many lines it has."""
    default = job.link.broker.config.max_logs
    return (yield from execute(add_log(job.link.keys, job.id, str(line), job.opts.get("kl"), default)))


def clear_logs(job: JobFields, keep: int) -> Operation[None]:
    """Remove log lines."""
    if keep < 0:
        raise ConfigError(f"keep must be 0 or more, not {keep}")
    yield from execute(job_scripts.clear_logs(job.link.keys, job.id, keep))


def retry(job: JobFields, state: str) -> Operation[None]:
    """Let a finished job wait again."""
    if state not in _OUTCOMES:
        raise ConfigError(f"state must be failed or completed, not {state!r}")
    keys, lifo = job.link.keys, job.opts.get("lifo") is True
    if state == "failed" and job.parent_key is not None:
        yield from execute(job_scripts.retry_child(keys, job.id, lifo=lifo))
    else:
        yield from execute(job_scripts.reprocess_job(keys, job.id, state, lifo=lifo))
    job.change(finished_ms=None, processed_ms=None, **{_OUTCOMES[state]: None})


def remove(job: JobFields, *, children: bool) -> Operation[None]:
    """Remove the job."""
    if not (yield from execute(remove_job(job.link.keys, job.id, children=children))):
        raise LockMismatchError(job.id, job.link.keys.name, "It (or a child of it) is active and cannot be removed.")


def promote(job: JobFields) -> Operation[None]:
    """Let a delayed job wait now."""
    yield from execute(job_scripts.promote(job.link.keys, job.id))
    job.change(delay_ms=0)


def change_delay(job: JobFields, delay: Duration) -> Operation[None]:
    """Delay a delayed job anew, from now."""
    delay_ms = to_ms(delay, "delay")
    yield from execute(job_scripts.change_delay(job.link.keys, job.id, delay_ms, job.link.now_ms()))
    job.change(delay_ms=delay_ms)


def change_priority(job: JobFields, priority: int, *, lifo: bool) -> Operation[None]:
    """Give the job another priority."""
    wanted = check_priority(priority)
    yield from execute(job_scripts.change_priority(job.link.keys, job.id, wanted, lifo=lifo))
    job.change(priority=wanted)


def extend_lock(job: JobFields, token: str, duration: Duration) -> Operation[bool]:
    """Keep the job's lock."""
    lock_ms = to_ms(duration, "duration")
    if not lock_ms:
        raise ConfigError("duration must be longer than 0")
    return (yield from execute(job_scripts.extend_lock(job.link.keys, job.id, token, lock_ms)))


def get_children_values(job: JobFields) -> Operation[dict[str, Any]]:
    """Return values of completed children."""
    return (yield from execute(flow_scripts.children_values(job.link.keys, job.id)))


def get_dependencies(job: JobFields) -> Operation[Dependencies]:
    """All children."""
    processed, unprocessed, ignored, failed = (yield flow_scripts.all_dependencies(job.link.keys, job.id))[-1]
    return Dependencies(processed, tuple(unprocessed), ignored, tuple(failed))


def get_dependencies_count(job: JobFields, kinds: Sequence[str]) -> Operation[dict[str, int]]:
    """How many children of each kind there are."""
    wanted = list(dict.fromkeys(kinds)) or list(flow_scripts.DEPENDENCY_KINDS)
    for kind in wanted:
        if kind not in flow_scripts.DEPENDENCY_KINDS:
            raise ConfigError(f"kind must be one of {', '.join(flow_scripts.DEPENDENCY_KINDS)}, not {kind!r}")
    return (yield from execute(flow_scripts.get_dependency_counts(job.link.keys, job.id, wanted)))


def get_failed_children(job: JobFields) -> Operation[ChildFailures]:
    """Failed children, of both kinds."""
    keys = job.link.keys
    ignored, failed = yield [
        flow_scripts.ignored_failures(keys, job.id),
        flow_scripts.unsuccessful_children(keys, job.id),
    ]
    return ChildFailures(ignored, tuple(failed))


def remove_child_dependency(job: JobFields) -> Operation[bool]:
    """The parent waits for this job no more; false for a job without one."""
    if job.parent_key is None:
        return False
    removed = yield from execute(flow_scripts.remove_child_dependency(job.link.keys, job.id, job.parent_key))
    if removed:
        job.change(parent=None, parent_key=None)
    return removed


def remove_unprocessed_children(job: JobFields) -> Operation[None]:
    """Remove the children that have not ended and are not locked."""
    yield from execute(flow_scripts.remove_unprocessed_children(job.link.keys, job.id))


def remove_deduplication_key(job: JobFields) -> Operation[bool]:
    """Free the job's deduplication id; false when it does not own one."""
    if job.deduplication_id is None:
        return False
    return (yield from execute(job_scripts.remove_deduplication_key(job.link.keys, job.deduplication_id, job.id)))
