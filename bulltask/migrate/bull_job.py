"""A Bull job, as stored in Redis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from bulltask.errors import DecodeError
from bulltask.jobs import codec
from bulltask.jobs.stored_options import BULLTASK_KEY

__all__ = ["BullJob", "JobOrigin"]

_ONLY_BULLMQ = frozenset({"atm", "ats", "stc", "rjk", "parentKey", "parent", "pb", "defa", "nrjid"})
_ONLY_BULLMQ_OPTS = frozenset(
    {"repeatJobKey", "de", "kl", "fpof", "cpof", "idof", "rdof", "tm", "omc", "parent", BULLTASK_KEY}
)


class JobOrigin(Enum):
    """The library whose layout a job's hash has."""

    BULL = "Bull"
    BULL_1 = "Bull 1 or 2"
    BULLMQ = "BullMQ"
    EITHER = "either"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, kw_only=True)
class BullJob:
    """A job's hash, read without validation.

    Attributes:
        id: The job's id.
        key_suffix: The suffix of the key that contains the job: ``wait``, ``delayed`` …
        score: The job's score under that key; ``""`` in lists and sets.
        fields: The fields of the hash.
        locked: Whether a worker holds the job's lock.
    """

    id: str
    key_suffix: str
    score: str
    fields: Mapping[str, bytes]
    locked: bool = False

    @cached_property
    def opts(self) -> Mapping[str, Any]:
        """The job's options.

        Raises:
            DecodeError: The options are not a JSON object.
        """
        value = codec.decode(self.fields.get("opts", b"{}"), what="the text of its options")
        if not isinstance(value, dict):
            raise DecodeError("its options are not a JSON object")
        return value

    @property
    def repeat(self) -> Mapping[str, Any] | None:
        """The repeat options, if this is the next iteration of a repeatable job."""
        try:
            value = self.opts.get("repeat")
        except DecodeError:
            return None
        return value if isinstance(value, dict) else None

    @cached_property
    def origin(self) -> JobOrigin:
        """The library that added the job, as far as the hash shows.

        Bull 3 and 4 write ``timestamp`` and ``delay`` into the options of every job. BullMQ does so only if the sender
        sets both, and a migrated job no longer has ``timestamp``. Jobs of Bull 1 and 2 have no name, but they have
        the field ``attemptsMade`` from the start.
        """
        if _ONLY_BULLMQ & self.fields.keys():
            return JobOrigin.BULLMQ
        if "name" not in self.fields and "attemptsMade" in self.fields:
            return JobOrigin.BULL_1
        if "retriedOn" in self.fields:
            return JobOrigin.BULL
        try:
            opts = self.opts
        except DecodeError:
            return JobOrigin.UNREADABLE
        if _ONLY_BULLMQ_OPTS & opts.keys() or "pattern" in (self.repeat or {}):
            return JobOrigin.BULLMQ
        return JobOrigin.BULL if {"timestamp", "delay", "attempts"} <= opts.keys() else JobOrigin.EITHER

    def number(self, name: str) -> int:
        """Return a field as an integer; 0 if it is not a number."""
        try:
            return int(float(self.fields.get(name, b"0")))
        except (ValueError, OverflowError):
            return 0

    def due_ms(self) -> int:
        """Return when a delayed job is due, in epoch milliseconds; its score is 4096 times that, as in BullMQ."""
        return int(float(self.score)) // 4096
