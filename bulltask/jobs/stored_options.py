"""The options of a stored job, as any client may have written them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any, Final

from bulltask.errors import DecodeError
from bulltask.jobs import codec
from bulltask.jobs.numbers import number
from bulltask.jobs.retention import stored_keep
from bulltask.jobs.time_limits import TimeLimits

__all__ = ["BULLTASK_KEY", "StoredOptions", "read_options"]

BULLTASK_KEY: Final = "bulltask"
"""The option that contains bulltask's own options."""

_MAX_CACHED_BYTES: Final = 1_000
"""Longer options contain a canvas or headers, and are rarely equal to those of another job."""


class StoredOptions(dict[str, Any]):
    """A job's ``opts``. Do not change it: jobs with the same options share one object.

    The cached properties are therefore computed only once for all jobs with the same options.
    """

    @cached_property
    def bulltask(self) -> Mapping[str, Any]:
        """The options that only bulltask reads; empty if another client sent the job."""
        options = self.get(BULLTASK_KEY)
        return options if isinstance(options, dict) else {}

    @cached_property
    def attempts(self) -> int:
        """Maximum number of attempts; 0 and 1 both mean a single attempt."""
        return number(self.get("attempts")) or 0

    @cached_property
    def deduplication_id(self) -> str:
        """The deduplication id, ``""`` for none."""
        stored = self.get("de")
        return str(stored.get("id", "")) if isinstance(stored, dict) else ""

    @cached_property
    def keep(self) -> Mapping[str, Mapping[str, int] | None]:
        """BullMQ's ``keepJobs`` map for each retention option, ``None`` for one that is not set."""
        return {option: stored_keep(self.get(option)) for option in ("removeOnComplete", "removeOnFail")}

    @cached_property
    def canvas(self) -> Mapping[str, Any]:
        """The job's place in a canvas, empty for most jobs."""
        canvas = self.bulltask.get("canvas")
        return canvas if isinstance(canvas, dict) else {}

    @cached_property
    def retries_before(self) -> int:
        """Retries in another queue, from which the job was moved."""
        return number(self.bulltask.get("retries")) or 0

    @cached_property
    def time_limits(self) -> TimeLimits:
        """The sender's limits for one attempt."""
        return TimeLimits.from_wire(self.bulltask)


def read_options(stored: bytes, job_id: str) -> StoredOptions:
    """Return a job's options from the field ``opts``.

    Raises:
        DecodeError: The field is not a JSON object; the message names the job.
    """
    if len(stored) > _MAX_CACHED_BYTES:
        return _parse(stored, job_id)
    try:
        return _parse_once(stored)
    except DecodeError:
        return _parse(stored, job_id)  # for the message


def _parse(stored: bytes, job_id: str) -> StoredOptions:
    return StoredOptions(codec.decode_object(stored, what=f"field opts of job {job_id}"))


@lru_cache(maxsize=1_000)
def _parse_once(stored: bytes) -> StoredOptions:
    return _parse(stored, "")
