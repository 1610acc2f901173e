"""``ResultSet``: the states and outcomes of several jobs, for sync and async code."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any, ClassVar, Final, Generic, TypeVar, Unpack, overload

from bulltask.clock import Duration, mono_ms, to_ms
from bulltask.errors import ResultTimeoutError
from bulltask.jobs.states import JobState, Revocation
from bulltask.result import AsyncResult
from bulltask.task_waits import WaitOptions, allow_join_result, check_wait_options

__all__ = ["ResultSet"]

R = TypeVar("R")
T = TypeVar("T")

_Member = AsyncResult[Any]

_POLL_MS: Final = 200
"""How long :meth:`ResultSet.iterate` waits for one member before it looks at all of them again."""


class ResultSet(Generic[R]):
    """Several handles: waits for all of their jobs, and reads their states together (Celery's ``ResultSet``).

    The jobs may belong to different queues and apps.

    Args:
        results: The handles. Each may also be a result set, such as a group's; its result is then a list.
        app: Has no effect; for code written for Celery.

    Attributes:
        results: The handles, in the order in which they were added.

    Raises:
        TypeError: A member is a coroutine, such as ``task.adelay(1)`` without ``await``.
    """

    def __init__(self, results: Iterable[AsyncResult[R] | ResultSet[Any]] = (), app: Any = None) -> None:
        del app
        self.results: list[AsyncResult[R] | ResultSet[Any]] = [_checked(result) for result in results]

    def add(self, result: AsyncResult[R] | ResultSet[Any]) -> None:
        """Add a handle, unless it is already a member."""
        if result not in self.results:
            self.results.append(_checked(result))

    def update(self, results: Iterable[AsyncResult[R] | ResultSet[Any]]) -> None:
        """Add several handles, except those that are already members."""
        for result in results:
            self.add(result)

    def remove(self, result: AsyncResult[R] | ResultSet[Any] | str) -> None:
        """Remove a handle, or the handle of the job with this id; the job itself is not affected.

        Raises:
            KeyError: It is not a member.
        """
        for index, member in enumerate(self.results):
            if member == result or (isinstance(result, str) and getattr(member, "id", None) == result):
                del self.results[index]
                return
        raise KeyError(result)

    def discard(self, result: AsyncResult[R] | ResultSet[Any] | str) -> None:
        """Like :meth:`remove`, but do nothing if it is not a member."""
        with suppress(KeyError):
            self.remove(result)

    def clear(self) -> None:
        """Remove all handles."""
        self.results.clear()

    def get(
        self,
        timeout: Duration | None = None,
        *,
        propagate: bool = True,
        disable_sync_subtasks: bool = True,
        **celery: Unpack[WaitOptions],
    ) -> list[R]:
        """Wait for all members, and return the list of their return values, in the members' order.

        Args:
            timeout: Seconds or ``timedelta`` for all of them; ``None`` waits without a limit.
            propagate: If members have failed, raise the exception of the first of them. Otherwise, the list contains
                the exceptions of failed members.
            disable_sync_subtasks, celery: As for :meth:`bulltask.result.AsyncResult.get`.

        Raises:
            ResultTimeoutError: Not all members finished in time; they keep running.
            Exception: As for :meth:`bulltask.result.AsyncResult.get`.
        """
        deadline = _Deadline(timeout)
        check_wait_options(celery)
        with nullcontext() if disable_sync_subtasks else allow_join_result():
            return [member.get(deadline.left(), propagate=propagate) for member in self.results]  # type: ignore[misc]

    join = join_native = get
    """Celery's names."""

    async def aget(self, timeout: Duration | None = None, *, propagate: bool = True) -> list[R]:  # noqa: ASYNC109 - as get()
        """:meth:`get` for asyncio. ``await result`` is the same without arguments."""
        try:
            async with asyncio.TaskGroup() as tasks:  # the members of an event loop share one reader for each queue
                waits = [tasks.create_task(member.aget(timeout, propagate=False)) for member in self.results]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # one error, as from get()
        outcomes: list[Any] = [wait.result() for wait in waits]
        for outcome in outcomes:
            if propagate and isinstance(outcome, Exception):
                raise outcome
        return outcomes

    def __await__(self) -> Generator[Any, None, list[R]]:
        return self.aget().__await__()

    def iterate(self, timeout: Duration | None = None) -> Iterator[R]:
        """Iterate over the return values in the order in which the members complete.

        Args:
            timeout: Seconds or ``timedelta`` for all of them; ``None`` waits without a limit.

        Raises:
            ResultTimeoutError: The next member did not finish in time.
            Exception: A member failed, as for :meth:`bulltask.result.AsyncResult.get`.
        """
        deadline, pending = _Deadline(timeout), self._members()
        while pending:
            states = _finished_states(pending)
            for member, state in zip(pending, states, strict=True):
                if state is not None:
                    yield member.get()
            unfinished = [member for member, state in zip(pending, states, strict=True) if state is None]
            if unfinished and len(unfinished) == len(pending):
                _wait_briefly(unfinished[0], deadline)
            pending = unfinished

    async def __aiter__(self) -> AsyncIterator[R]:
        for wait in asyncio.as_completed([asyncio.ensure_future(member.aget()) for member in self._members()]):
            yield await wait

    def ready(self) -> bool:
        """Return whether all members have completed or failed."""
        return None not in self._states()

    def successful(self) -> bool:
        """Return whether all members have completed."""
        return self.completed_count() == len(self._members())

    def failed(self) -> bool:
        """Return whether a member has failed; see :meth:`bulltask.result.AsyncResult.failed`."""
        members = self._members()
        return any(
            member.failed()
            for member, state in zip(members, _finished_states(members), strict=True)
            if state is JobState.FAILED
        )

    def waiting(self) -> bool:
        """Return whether a member has not finished yet."""
        return not self.ready()

    def completed_count(self) -> int:
        """Return how many members have completed."""
        return self._states().count(JobState.COMPLETED)

    def revoke(self, *, terminate: bool = False) -> list[Revocation]:
        """Revoke all members; see :meth:`bulltask.result.AsyncResult.revoke`. Returns what happened to each."""
        return [member.revoke(terminate=terminate) for member in self._members()]

    async def arevoke(self, *, terminate: bool = False) -> list[Revocation]:
        """:meth:`revoke` for asyncio."""
        return list(await asyncio.gather(*(member.arevoke(terminate=terminate) for member in self._members())))

    def forget(self) -> None:
        """Remove all members and their results from Redis; see :meth:`bulltask.result.AsyncResult.forget`."""
        for member in self._members():
            member.forget()

    async def aforget(self) -> None:
        """:meth:`forget` for asyncio."""
        await asyncio.gather(*(member.aforget() for member in self._members()))

    def _states(self) -> list[JobState | None]:
        return _finished_states(self._members())

    def _members(self) -> list[_Member]:
        """Return the handles of all jobs whose results are items of the list, or of a list in it."""
        found: list[_Member] = []
        for member in self.results:
            found += member._members() if isinstance(member, ResultSet) else [member]  # noqa: SLF001 - this class
        return found

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[AsyncResult[R] | ResultSet[Any]]:
        return iter(self.results)

    @overload
    def __getitem__(self, index: int) -> AsyncResult[R]: ...
    @overload
    def __getitem__(self, index: slice) -> list[AsyncResult[R]]: ...

    def __getitem__(self, index: Any) -> Any:
        return self.results[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ResultSet) and other.results == self.results

    __hash__: ClassVar[None]  # type: ignore[assignment] # it can change

    def __repr__(self) -> str:
        return f"<ResultSet of {len(self.results)} members>"


def _checked(member: T) -> T:
    """Return a member of a set.

    Raises:
        TypeError: It is not a handle yet, as in ``ResultSet([task.adelay(1)])``.
    """
    if inspect.iscoroutine(member) or asyncio.isfuture(member):
        raise TypeError(f"a result set consists of results such as `await task.adelay(…)`: await {member!r:.200} first")
    return member


class _Deadline:
    """A deadline shared by the waits for several results."""

    def __init__(self, timeout: Duration | None) -> None:
        self._at_ms = None if timeout is None else mono_ms() + to_ms(timeout, "timeout")

    def left_ms(self) -> int | None:
        return None if self._at_ms is None else max(0, self._at_ms - mono_ms())

    def left(self) -> float | None:
        left_ms = self.left_ms()
        return None if left_ms is None else left_ms / 1000


def _finished_states(members: Sequence[_Member]) -> list[JobState | None]:
    states: list[JobState | None] = [None] * len(members)
    for reader in {id(member.reader): member.reader for member in members}.values():  # each app has one
        own = [index for index, member in enumerate(members) if member.reader is reader]
        for index, state in zip(own, reader.finished_states([members[index].ref for index in own]), strict=True):
            states[index] = state
    return states


def _wait_briefly(member: _Member, deadline: _Deadline) -> None:
    left_ms = deadline.left_ms()
    try:
        member.reader.wait(member.ref, _POLL_MS if left_ms is None else min(left_ms, _POLL_MS), None)
    except ResultTimeoutError:
        if left_ms == 0:
            raise
