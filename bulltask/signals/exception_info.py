"""``einfo`` of ``task_failure`` and ``task_retry``."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

__all__ = ["ExceptionInfo"]


@dataclass(frozen=True, slots=True)
class ExceptionInfo:
    """An exception and its traceback, with the attribute names of Celery's ``einfo``.

    Attributes:
        exception: The exception.
        traceback: The traceback as text, as it is stored in the job.
    """

    exception: BaseException
    traceback: str

    @property
    def type(self) -> type[BaseException]:
        """The exception's class."""
        return type(self.exception)

    @property
    def tb(self) -> TracebackType | None:
        """The traceback object."""
        return self.exception.__traceback__

    def __str__(self) -> str:
        return self.traceback
