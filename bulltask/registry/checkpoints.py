"""The checkpoints of a running job: its cursor in memory, and when it is stored in Redis."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

from bulltask.clock import mono_ms
from bulltask.errors import BrokerError, EncodeError, WorkerShutdown
from bulltask.jobs import codec
from bulltask.jobs.checkpoint import NO_CHECKPOINT, Checkpoint

__all__ = ["CheckpointStore", "Checkpoints"]

_STOPPING: Final = "its worker is stopping; the next attempt continues from the cursor"


class CheckpointStore(Protocol):
    """Stores the checkpoint of a running job."""

    def store_checkpoint(self, token: str, checkpoint: str, progress: bytes | None) -> bool:
        """Store a checkpoint, and the job's progress unless it is ``None``; return False if the lock has expired.

        Args:
            token: The token of the job's lock.
            checkpoint: The checkpoint in its stored form.
            progress: The progress as JSON.

        Raises:
            LockMismatchError, JobNotFoundError: Another worker has the job, or it was removed.
            BrokerError: Redis is unavailable, or returns an error.
        """
        ...

    async def astore_checkpoint(self, token: str, checkpoint: str, progress: bytes | None) -> bool:
        """:meth:`store_checkpoint` for asyncio."""
        ...


class Checkpoints:
    """The checkpoints of one attempt.

    The cursor advances in memory with each item. It is stored in Redis when the interval has passed, when the loop
    ends, and with the outcome of the attempt.

    Args:
        stored: The checkpoint in the job's hash, ``""`` for none.
        job_id: The job's id, ``""`` if the task was called directly.
        attempts_started: The job's started attempts, including this one.
        interval_ms: Minimum time between two writes; 0 stores each checkpoint.
        store: Stores the checkpoints; ``None`` if the task was called directly.

    Attributes:
        total: The number of items, from which the job's progress is computed; ``None`` for no progress.
        in_loop: Whether :meth:`Context.iterate` has been called.
        is_async: Whether the task runs on an event loop, which a write must not block.

    Raises:
        DecodeError: The stored checkpoint is malformed.
    """

    def __init__(
        self,
        stored: str = NO_CHECKPOINT,
        job_id: str = "",
        attempts_started: int = 1,
        interval_ms: int = 0,
        store: CheckpointStore | None = None,
    ) -> None:
        self.job_id, self._attempts_started, self._interval_ms, self._store = (
            job_id,
            attempts_started,
            interval_ms,
            store,
        )
        checkpoint = Checkpoint.from_json(stored, job_id)
        self._cursor, self._items, self._done = checkpoint.cursor, checkpoint.items, checkpoint.done
        self._exists, self._changed = stored != NO_CHECKPOINT, False
        self._token, self._is_stopping = "", _never
        self._due_ms = mono_ms() + interval_ms
        self._percent: int | None = None
        self.total: int | None = None
        self.in_loop = self.is_async = False

    @property
    def cursor(self) -> Any:
        """The position after the last finished item; ``None`` before the first one."""
        return self._cursor

    @property
    def done(self) -> bool:
        """Whether the loop has ended, in this attempt or an earlier one."""
        return self._done

    def start(self, token: str, is_stopping: Callable[[], bool], *, is_async: bool) -> None:
        """Begin the attempt.

        Args:
            token: The token of the job's lock.
            is_stopping: Returns whether the worker is stopping.
            is_async: Whether the task runs on an event loop.
        """
        self._token, self._is_stopping, self.is_async = token, is_stopping, is_async

    def release_if_stopping(self) -> None:
        """End the attempt between two items if the worker is stopping.

        Raises:
            WorkerShutdown: It is stopping.
        """
        if self._is_stopping():
            raise WorkerShutdown(_STOPPING)

    def advance(self, cursor: Any, *, done: bool = False) -> bool:
        """Record that an item has finished; return whether it is time to store the checkpoint."""
        self._cursor, self._items, self._done = cursor, self._items + 1, done
        self._changed = True
        return mono_ms() >= self._due_ms

    def finish(self) -> bool:
        """Record that the loop has ended; return whether this must be stored."""
        is_new = self._changed or not self._done
        self._done, self._changed = True, is_new
        return is_new

    def save(self) -> None:
        """Store the checkpoint. While Redis is unavailable, it stays in memory and is stored later.

        Raises:
            EncodeError: The cursor is not plain JSON.
            LockMismatchError, JobNotFoundError: Another worker has the job, or it was removed.
        """
        checkpoint, progress = self._to_store()
        if self._store is not None:
            with suppress(BrokerError):
                self._changed = not self._store.store_checkpoint(self._token, checkpoint, progress)

    async def asave(self) -> None:
        """:meth:`save` for asyncio."""
        checkpoint, progress = self._to_store()
        if self._store is not None:
            with suppress(BrokerError):
                self._changed = not await self._store.astore_checkpoint(self._token, checkpoint, progress)

    def last(self, *, completed: bool) -> str | None:
        """Return the checkpoint to store with the attempt's outcome; ``None`` if Redis has it already.

        Args:
            completed: Whether the job has completed; its checkpoint is then removed.
        """
        if completed:
            return NO_CHECKPOINT if self._exists else None
        with suppress(EncodeError):  # the attempt has failed with this error already
            return self._encode() if self._changed else None
        return None

    def _to_store(self) -> tuple[str, bytes | None]:
        self._due_ms = mono_ms() + self._interval_ms
        self._exists = True  # even if the reply is lost
        percent = None if not self.total else min(100, 100 * self._items // self.total)
        is_new, self._percent = percent != self._percent, percent
        return self._encode(), codec.encode(percent) if is_new else None

    def _encode(self) -> str:
        return Checkpoint(self._cursor, self._items, self._attempts_started, self._done).to_json(self.job_id)


def _never() -> bool:
    return False
