"""The loop of a checkpointed task: yields items, and advances the job's cursor after each."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, Generic, TypeVar, cast

from bulltask.errors import InvalidJobError, PermanentError
from bulltask.jobs import codec
from bulltask.registry.checkpoints import Checkpoints

__all__ = ["CheckpointedItems", "Items", "Page", "Source"]

T = TypeVar("T")

Items = Iterable[T] | AsyncIterable[T]
Page = Items[T] | Awaitable[Iterable[T]]
Source = Items[T] | Callable[[Any], Page[T]]


class CheckpointedItems(Generic[T]):
    """The items of a checkpointed task's loop, for ``for`` or ``async for``; :meth:`Context.iterate` returns it.

    Args:
        checkpoints: The cursor.
        source: The items, or a function that returns the items after a cursor.
        cursor: Returns the cursor after an item; ``None`` if ``source`` is not a function.
    """

    def __init__(self, checkpoints: Checkpoints, source: Source[T], cursor: Callable[[T], Any] | None) -> None:
        self._checkpoints, self._source, self._cursor = checkpoints, source, cursor

    def __iter__(self) -> Iterator[T]:
        """Return an iterator over the items that are left.

        Raises:
            TypeError: The items need ``async for``.
            WorkerShutdown: The worker is stopping.
        """
        checkpoints = self._checkpoints
        if checkpoints.is_async:
            raise TypeError("self.iterate() is used with 'for' in an async task: use 'async for'")
        for page in self._pages():
            for item in _without_await(page.items, page.skipped):
                position = page.position_after(item)
                yield item
                if checkpoints.advance(position, done=page.is_last):
                    checkpoints.save()
                checkpoints.release_if_stopping()
                if page.is_last:
                    break
        if checkpoints.finish():
            checkpoints.save()

    async def __aiter__(self) -> AsyncIterator[T]:
        """Return an asynchronous iterator over the items that are left.

        Raises:
            WorkerShutdown: The worker is stopping.
        """
        checkpoints = self._checkpoints
        for page in self._pages():
            async for item in _with_await(page.items, page.skipped):
                position = page.position_after(item)
                yield item
                if checkpoints.advance(position, done=page.is_last):
                    await checkpoints.asave()
                checkpoints.release_if_stopping()
                if page.is_last:
                    break
        if checkpoints.finish():
            await checkpoints.asave()

    def _pages(self) -> Iterator[_Counted[T] | _AfterCursor[T]]:
        """Yield what the source returns, until nothing is left."""
        checkpoints, source, cursor = self._checkpoints, self._source, self._cursor
        if checkpoints.done:
            return
        checkpoints.release_if_stopping()
        if cursor is None:
            yield _Counted(cast(Items[T], source), checkpoints.cursor, checkpoints.job_id)
            return
        fetch, start = cast(Callable[[Any], Page[T]], source), checkpoints.cursor
        while True:
            page = _AfterCursor(fetch(start), start, cursor, checkpoints.job_id)
            yield page
            if page.is_empty or page.is_last:
                return
            # Decoded like a cursor from Redis, so that the source receives a list instead of a tuple in every call.
            start = codec.decode(page.check_moved(checkpoints.cursor))


class _Counted(Generic[T]):
    """Items whose cursor is the number of finished items.

    Attributes:
        skipped: How many items earlier attempts have finished.
    """

    is_last = False

    def __init__(self, items: Items[T], start: Any, job_id: str) -> None:
        if not isinstance(start, int | None):
            raise InvalidJobError(
                f"the cursor of job {job_id} is {start!r}, not the number of finished items: has the source of its "
                "task's loop changed since the job started? Send the job again"
            )
        self.items = items
        self.skipped = self._count = start or 0

    def position_after(self, _item: T) -> int:
        """Return the cursor after an item."""
        self._count += 1
        return self._count


class _AfterCursor(Generic[T]):
    """The items that a function has returned for a cursor.

    Attributes:
        is_empty: The function has returned no item.
        is_last: The cursor after the current item is ``None``: nothing follows it.
    """

    skipped = 0

    def __init__(self, items: Page[T], start: Any, cursor: Callable[[T], Any], job_id: str) -> None:
        self.items, self.is_empty, self.is_last = items, True, False
        self._start, self._cursor, self._job_id = start, cursor, job_id

    def position_after(self, item: T) -> Any:
        """Return the cursor after an item; called before the task's code, which may change or delete the item."""
        position = self._cursor(item)
        self.is_last = position is None
        if self.is_empty:
            self.check_moved(position)
            self.is_empty = False
        return position

    def check_moved(self, position: Any) -> bytes:
        """Return a position as JSON.

        Raises:
            EncodeError: It is not plain JSON.
            PermanentError: It is the position where the items begin, so the loop would never end.
        """
        encoded = codec.encode(position, what=f"the cursor of job {self._job_id}")
        if self._start is not None and encoded == codec.encode(self._start):
            raise PermanentError(
                f"the loop of job {self._job_id} makes no progress: its source was called with the cursor "
                f"{self._start!r} and returned an item with the same cursor; it must return only items after the cursor"
            )
        return encoded


def _without_await(items: Page[T], skipped: int) -> Iterable[T]:
    if isinstance(items, Iterable):
        return itertools.islice(items, skipped, None) if skipped else items
    if isinstance(items, Coroutine):
        items.close()  # otherwise, Python warns that it was never awaited
    raise TypeError(f"self.iterate() cannot loop over {type(items).__name__}: in an async task, use 'async for'")


async def _with_await(items: Page[T], skipped: int) -> AsyncIterator[T]:
    if isinstance(items, Awaitable):
        items = await items
    if isinstance(items, AsyncIterable):  # before Iterable: Django's QuerySet is both
        async for item in items:
            if skipped:
                skipped -= 1
            else:
                yield item
    else:
        for item in _without_await(items, skipped):
            yield item
