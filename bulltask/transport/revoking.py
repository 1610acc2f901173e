"""Revoking a job: one operation for queues, results and workers."""

from __future__ import annotations

from collections.abc import Callable

from bulltask.config import Config
from bulltask.errors import DecodeError
from bulltask.job import ActiveJob
from bulltask.states import Revocation
from bulltask.transport import scripts_revoke
from bulltask.transport.call import Call, command
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation, ask
from bulltask.transport.scripts_add import add_kept_job

__all__ = ["revoke"]


def revoke(
    keys: QueueKeys, job_id: str, config: Config, now_ms: Callable[[], int], *, terminate: bool
) -> Operation[Revocation]:
    """End a job that does not run; have its worker end one that does, if ``terminate``.

    Args:
        keys: the queue.
        job_id: the job.
        config: the settings of whoever revokes it.
        now_ms: gives the server's time, once there is a connection.
        terminate: end a run, too.
    """
    options: Call[bytes | None] = command("HGET", keys.job(job_id), "opts")
    job = _options_of(keys, job_id, (yield from ask(options)))
    found = yield from ask(scripts_revoke.revoke(keys, job, config, now_ms(), terminate=terminate))
    if found is Revocation.REVOKED and job.deduplication_id:
        # BullMQ 5.72 and newer may have put another job aside until this one has ended
        yield from ask(add_kept_job(keys, job.deduplication_id, job_id, now_ms()))
    return found


def _options_of(keys: QueueKeys, job_id: str, opts: bytes | None) -> ActiveJob:
    try:
        return ActiveJob.from_hash(keys.queue, job_id, [b"opts", opts or b"{}"])
    except DecodeError as exc:  # a job that cannot be read can be ended all the same
        return ActiveJob.broken(keys.queue, job_id, str(exc))
