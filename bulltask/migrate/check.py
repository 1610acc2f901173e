"""Decide for each job whether it is migrated or skipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bulltask.errors import ConfigError, DecodeError
from bulltask.jobs.names import check_job_name, is_queue_key
from bulltask.migrate.bull_job import BullJob, JobOrigin
from bulltask.migrate.convert import DEFAULT_NAME, Conversion, convert
from bulltask.migrate.outcome import MigrationOutcome, SkipReason
from bulltask.transport.scripts.bull import JobConversion

__all__ = ["STATES", "JobCheck", "MigrationOptions"]

STATES: Final = ("waiting", "delayed", "completed", "failed")
_TARGET_STATES: Final = {
    "wait": "waiting",
    "paused": "waiting",
    "delayed": "delayed",
    "active": "recovered",
    "completed": "completed",
    "failed": "failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationOptions:
    """Options of a migration.

    Attributes:
        states: Migrate only jobs in these states, some of :data:`STATES`.
        limit: The maximum number of jobs; ``None``: all.
        id_prefix: A prefix for the ids of migrated jobs.
        default_name: The name for jobs that were added to Bull without one.
        recover_active: Move active jobs without a lock, because their workers have died, to the waiting list.
        force: Migrate even if workers seem to be connected.

    Raises:
        ConfigError, InvalidNameError: An option is invalid.
    """

    states: tuple[str, ...] = STATES
    limit: int | None = None
    id_prefix: str = ""
    default_name: str = DEFAULT_NAME
    recover_active: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.states) - set(STATES)):
            raise ConfigError(f"states must be one or more of {', '.join(STATES)}, not {unknown[0]!r}")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit must be 1 or more, not {self.limit}")
        if ":" in self.id_prefix:
            raise ConfigError(f"id_prefix {self.id_prefix!r} has a ':', which separates the parts of BullMQ's keys")
        check_job_name(self.default_name)


class JobCheck:
    """Decides for each job whether it is migrated, and counts skipped jobs; the caller counts migrated jobs.

    Args:
        options: The migration's options.
        bull_only: Skip jobs unless they are certainly Bull's, because the queue also has BullMQ's jobs.
        outcome: Counts skipped jobs.
    """

    def __init__(self, options: MigrationOptions, *, bull_only: bool, outcome: MigrationOutcome) -> None:
        self._options, self._bull_only, self._outcome = options, bull_only, outcome

    def change(self, job: BullJob) -> tuple[JobConversion, Conversion] | None:
        """Return how to migrate a job; ``None`` if it is skipped."""
        reason, detail = self._skip_reason(job), ""
        if reason is None:
            try:
                return self._change(job)
            except DecodeError as exc:
                reason, detail = SkipReason.MALFORMED, str(exc)
        self._outcome.skip(reason, job.id, detail)
        return None

    def _skip_reason(self, job: BullJob) -> SkipReason | None:
        state = _TARGET_STATES[job.key_suffix]
        checks = (
            (not job.fields, SkipReason.NO_HASH),
            (not self._is_from_bull(job), SkipReason.BULLMQ),
            (job.key_suffix == "active" and (job.locked or not self._options.recover_active), SkipReason.ACTIVE),
            (job.locked, SkipReason.LOCKED),
            (state != "recovered" and state not in self._options.states, SkipReason.NOT_SELECTED),
            (is_queue_key(self._options.id_prefix + job.id), SkipReason.RESERVED),
        )
        return next((reason for applies, reason in checks if applies), None)

    def _is_from_bull(self, job: BullJob) -> bool:
        if job.origin is JobOrigin.EITHER:
            return not self._bull_only
        return job.origin is not JobOrigin.BULLMQ  # unreadable jobs of both libraries are reported as malformed

    def _change(self, job: BullJob) -> tuple[JobConversion, Conversion]:
        state = _TARGET_STATES[job.key_suffix]
        conversion = convert(job, state, self._options.default_name)
        debounced = job.fields.get("deid")
        change = JobConversion(
            id=job.id,
            new_id=self._options.id_prefix + job.id,
            source=job.key_suffix,
            state=state,
            read=job.fields,
            fields=conversion.fields,
            dropped=conversion.dropped,
            priority=conversion.priority,
            score=conversion.finished,
            debounce_id=None if debounced is None else debounced.decode("utf-8", "surrogateescape"),
        )
        return change, conversion
