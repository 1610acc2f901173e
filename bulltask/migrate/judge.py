"""What becomes of one job: moved and how, or left and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bulltask.errors import ConfigError, DecodeError
from bulltask.jobs.names import check_job_name, is_queue_key
from bulltask.migrate.bull_job import BullJob, Origin
from bulltask.migrate.convert import DEFAULT_NAME, Conversion, convert
from bulltask.migrate.outcome import Left, Outcome
from bulltask.transport.scripts.bull import JobConversion

__all__ = ["STATES", "Judge", "Wishes"]

STATES: Final = ("waiting", "delayed", "completed", "failed")
_BECOMES: Final = {
    "wait": "waiting",
    "paused": "waiting",
    "delayed": "delayed",
    "active": "recovered",
    "completed": "completed",
    "failed": "failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a user asked for.

    Attributes:
        states: of :data:`STATES`.
        limit: how many jobs at most, ``None``: all.
        id_prefix: stands before the ids of the moved jobs.
        default_name: for jobs that were added to Bull without a name.
        recover_active: active jobs without a lock, whose workers have died, wait again.
        force: also while workers seem to be connected.

    Raises:
        ConfigError, InvalidNameError: a wish cannot be.
    """

    states: tuple[str, ...] = STATES
    limit: int | None = None
    id_prefix: str = ""
    default_name: str = DEFAULT_NAME
    recover_active: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.states) - set(STATES)):
            raise ConfigError(f"states must be some of {', '.join(STATES)}, not {unknown[0]!r}")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit must be 1 or more, not {self.limit}")
        if ":" in self.id_prefix:
            raise ConfigError(f"id_prefix {self.id_prefix!r} has a ':', which separates the parts of BullMQ's keys")
        check_job_name(self.default_name)


class Judge:
    """Responsible for one job at a time; what is left is counted here, what is moved by the caller.

    Args:
        wishes: what the user asked for.
        only_bulls: leave every job that does not show itself that it is Bull's: the queue has BullMQ's too.
        outcome: where it is counted.
    """

    def __init__(self, wishes: Wishes, *, only_bulls: bool, outcome: Outcome) -> None:
        self._wishes, self._only_bulls, self._outcome = wishes, only_bulls, outcome

    def change(self, job: BullJob) -> tuple[JobConversion, Conversion] | None:
        """What is to be done with a job; ``None``: it stays."""
        reason, detail = self._stays(job), ""
        if reason is None:
            try:
                return self._change(job)
            except DecodeError as exc:
                reason, detail = Left.BROKEN, str(exc)
        self._outcome.leave(reason, job.id, detail)
        return None

    def _stays(self, job: BullJob) -> Left | None:
        state = _BECOMES[job.place]
        checks = (
            (not job.fields, Left.NO_HASH),
            (not self._is_bulls(job), Left.BULLMQ),
            (job.place == "active" and (job.locked or not self._wishes.recover_active), Left.ACTIVE),
            (job.locked, Left.LOCKED),
            (state != "recovered" and state not in self._wishes.states, Left.NOT_ASKED),
            (is_queue_key(self._wishes.id_prefix + job.id), Left.RESERVED),
        )
        return next((reason for applies, reason in checks if applies), None)

    def _is_bulls(self, job: BullJob) -> bool:
        if job.origin is Origin.EITHER:
            return not self._only_bulls
        return job.origin is not Origin.BULLMQ  # an unreadable one is told as broken, whoever has made it

    def _change(self, job: BullJob) -> tuple[JobConversion, Conversion]:
        state = _BECOMES[job.place]
        made = convert(job, state, self._wishes.default_name)
        debounced = job.fields.get("deid")
        change = JobConversion(
            id=job.id,
            new_id=self._wishes.id_prefix + job.id,
            place=job.place,
            state=state,
            read=job.fields,
            fields=made.fields,
            dropped=made.dropped,
            priority=made.priority,
            score=made.finished,
            debounce_id=None if debounced is None else debounced.decode("utf-8", "surrogateescape"),
        )
        return change, made
