"""A job's checkpoint: how far a checkpointed task got, as stored in the job's hash."""

from __future__ import annotations

from typing import Any, Final

from bulltask.errors import DecodeError
from bulltask.jobs import codec
from bulltask.value_class import value_class

__all__ = ["CHECKPOINT_FIELD", "NO_CHECKPOINT", "Checkpoint"]

CHECKPOINT_FIELD: Final = "bulltask:checkpoint"
"""The field of a job's hash with its :class:`Checkpoint`; BullMQ ignores it."""

NO_CHECKPOINT: Final = ""
"""The field's value after the job has completed, so that a retry starts from the beginning."""


@value_class
class Checkpoint:
    """How far a checkpointed task got.

    Attributes:
        cursor: The position after the last finished item; ``None`` before the first one.
        items: The number of finished items, in all attempts.
        attempts_started: The job's started attempts (``ats``) when the checkpoint was stored.
        done: The task's loop has ended.
    """

    cursor: codec.Json = None
    items: int = 0
    attempts_started: int = 0
    done: bool = False

    def to_json(self, job_id: str) -> str:
        """Return the value of the field.

        Raises:
            EncodeError: The cursor is not plain JSON.
        """
        cursor = codec.encode(self.cursor, what=f"the cursor of job {job_id}").decode()
        return (
            f'{{"cursor":{cursor},"items":{self.items},"started":{self.attempts_started},'
            f'"done":{"true" if self.done else "false"}}}'
        )

    @classmethod
    def from_json(cls, stored: str, job_id: str) -> Checkpoint:
        """Read the value of the field; ``NO_CHECKPOINT`` is a checkpoint before the first item.

        Raises:
            DecodeError: It is malformed.
        """
        if stored == NO_CHECKPOINT:
            return cls()
        value: Any = codec.decode(stored, what=f"field {CHECKPOINT_FIELD} of job {job_id}")
        try:
            items, started = value["items"], value["started"]
            if isinstance(items, int) and isinstance(started, int):
                return cls(value["cursor"], items, started, value["done"] is True)
        except (TypeError, LookupError):
            pass
        raise DecodeError(
            f"field {CHECKPOINT_FIELD} of job {job_id} is not a checkpoint: {stored[:80]!r}; remove the field to "
            "restart the job from the beginning"
        )
