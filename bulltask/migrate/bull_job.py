"""A job of Bull as Redis has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from bulltask.errors import DecodeError
from bulltask.jobs import codec
from bulltask.jobs.job import OWN_KEY

__all__ = ["BullJob", "Origin"]

_ONLY_BULLMQ = frozenset({"atm", "ats", "stc", "rjk", "parentKey", "parent", "pb", "defa", "nrjid"})
_ONLY_BULLMQ_OPTS = frozenset(
    {"repeatJobKey", "de", "kl", "fpof", "cpof", "idof", "rdof", "tm", "omc", "parent", OWN_KEY}
)


class Origin(Enum):
    """Whose layout a job's hash has."""

    BULL = "Bull"
    BULL_1 = "Bull 1 or 2"
    BULLMQ = "BullMQ"
    EITHER = "either"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, kw_only=True)
class BullJob:
    """Responsible for what a hash says; nothing is refused here.

    Attributes:
        id: its id.
        place: the suffix of the key that has it: ``wait``, ``delayed`` …
        score: its score there, ``""`` in lists and sets.
        fields: its hash.
        locked: a worker has it.
    """

    id: str
    place: str
    score: str
    fields: Mapping[str, bytes]
    locked: bool = False

    @cached_property
    def opts(self) -> Mapping[str, Any]:
        """Its options.

        Raises:
            DecodeError: they are no JSON object.
        """
        found = codec.decode(self.fields.get("opts", b"{}"), what="the text of its options")
        if not isinstance(found, dict):
            raise DecodeError("its options are no JSON object")
        return found

    @property
    def repeat(self) -> Mapping[str, Any] | None:
        """Its rule, if it is the next job of a repeatable one."""
        try:
            found = self.opts.get("repeat")
        except DecodeError:
            return None
        return found if isinstance(found, dict) else None

    @cached_property
    def origin(self) -> Origin:
        """Whose job it is, as far as it says so itself.

        Bull 3 and 4 write ``timestamp`` and ``delay`` into the options of every job, which BullMQ does only for jobs
        whose sender said both; a migrated job has no ``timestamp`` there any more. Bull 1 and 2 know no names, and
        count attempts in a field from the beginning.
        """
        if _ONLY_BULLMQ & self.fields.keys():
            return Origin.BULLMQ
        if "name" not in self.fields and "attemptsMade" in self.fields:
            return Origin.BULL_1
        if "retriedOn" in self.fields:
            return Origin.BULL
        try:
            opts = self.opts
        except DecodeError:
            return Origin.UNREADABLE
        if _ONLY_BULLMQ_OPTS & opts.keys() or "pattern" in (self.repeat or {}):
            return Origin.BULLMQ
        return Origin.BULL if {"timestamp", "delay", "attempts"} <= opts.keys() else Origin.EITHER

    def number(self, name: str) -> int:
        """A field as a whole number, 0 if it is none."""
        try:
            return int(float(self.fields.get(name, b"0")))
        except (ValueError, OverflowError):
            return 0

    def due_ms(self) -> int:
        """When a delayed job is due: Bull's scores are milliseconds times 4096, as BullMQ's."""
        return int(float(self.score)) // 4096
