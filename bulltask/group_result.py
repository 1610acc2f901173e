"""``GroupResult``: the states and outcomes of a group's members, for sync and async code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar, overload

from bulltask.clock import Duration, mono_ms, to_ms
from bulltask.errors import ResultTimeoutError
from bulltask.jobs.states import JobState, Revocation
from bulltask.ports import ResultReader, Sender
from bulltask.result import AsyncResult

__all__ = ["GroupResult"]

R = TypeVar("R")

_Member = AsyncResult[Any]

_POLL_MS: Final = 200
"""How long :meth:`GroupResult.iterate` waits for one member before it looks at all of them again."""


class GroupResult(Generic[R]):
    """The handle of a group: a sequence of the handles of its members, in their order.

    Args:
        group_id: The group's id.
        results: The members' handles. A member that ends with a group has a ``GroupResult``.
        parent: The handle of the step before the group, if it is a step of a chain.

    Attributes:
        id, results, parent: As above.
        children: The handles of the steps after the group, if this process sent it as a step of a chain.
    """

    def __init__(self, group_id: str, results: Sequence[AsyncResult[R] | GroupResult[Any]], parent: Any = None) -> None:
        self.id, self.results, self.parent = group_id, list(results), parent
        self.children: list[Any] = []
        if parent is not None:
            parent.children.append(self)

    def get(self, timeout: Duration | None = None, *, propagate: bool = True) -> list[R]:
        """Wait for all members, and return the list of their return values, in the group's order.

        Args:
            timeout: Seconds or ``timedelta`` for all of them; ``None`` waits without a limit.
            propagate: Raise the exception of the first member, in the group's order, that failed. Otherwise, the list
                contains the exceptions of failed members.

        Raises:
            ResultTimeoutError: Not all members finished in time; they keep running.
            Exception: As for :meth:`bulltask.result.AsyncResult.get`.
        """
        deadline = _Deadline(timeout)
        return [member.get(deadline.left(), propagate=propagate) for member in self.results]  # type: ignore[misc]

    join = get
    """Celery's name."""

    async def aget(self, timeout: Duration | None = None, *, propagate: bool = True) -> list[R]:  # noqa: ASYNC109 - as get()
        """:meth:`get` for asyncio. ``await result`` is the same without arguments."""
        async with asyncio.TaskGroup() as tasks:  # the members of an event loop share one reader for each queue
            waits = [tasks.create_task(member.aget(timeout, propagate=False)) for member in self.results]
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
        """Return whether a member has failed, without further retries."""
        return JobState.FAILED in self._states()

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

    def save(self, keep: Duration | None = 86_400) -> None:
        """Store the group, so that :meth:`restore` finds it by its id.

        Args:
            keep: How long it is stored, in seconds or as a ``timedelta``; ``None`` for no limit. Default: a day.
        """
        members = self._members()
        if members:
            keep_ms = None if keep is None else max(1, to_ms(keep, "keep"))
            members[0].reader.save_group(members[0].queue, self.id, json.dumps(self._addresses()), keep_ms)

    @classmethod
    def restore(cls, group_id: str, app: Sender) -> GroupResult[Any] | None:
        """Return a group that was saved with :meth:`save`, in any process; ``None`` if it is missing or has expired.

        Args:
            group_id: The group's id.
            app: An app with the same server and prefix. (In Celery, it defaults to the current app.)
        """
        stored = app.results.load_group(app.config.default_queue, group_id)
        return None if stored is None else cls._from_addresses(json.loads(stored), app.results)

    def _addresses(self) -> Any:
        members = [it._addresses() if isinstance(it, GroupResult) else [it.queue, it.id] for it in self.results]  # noqa: SLF001
        return {"id": self.id, "members": members}

    @classmethod
    def _from_addresses(cls, stored: Any, reader: ResultReader) -> GroupResult[Any]:
        members: list[Any] = [
            cls._from_addresses(it, reader) if isinstance(it, dict) else AsyncResult(it[1], it[0], reader)
            for it in stored["members"]
        ]
        return cls(stored["id"], members)

    def _states(self) -> list[JobState | None]:
        return _finished_states(self._members())

    def _members(self) -> list[_Member]:
        """Return the handles of all jobs whose results are items of the list, or of a list in it."""
        found: list[_Member] = []
        for member in self.results:
            found += member._members() if isinstance(member, GroupResult) else [member]  # noqa: SLF001 - this class
        return found

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[AsyncResult[R] | GroupResult[Any]]:
        return iter(self.results)

    @overload
    def __getitem__(self, index: int) -> AsyncResult[R]: ...
    @overload
    def __getitem__(self, index: slice) -> list[AsyncResult[R]]: ...

    def __getitem__(self, index: Any) -> Any:
        return self.results[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupResult) and (other.id, other.results) == (self.id, self.results)

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<GroupResult {self.id} of {len(self.results)} members>"


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
    return members[0].reader.finished_states([member.ref for member in members]) if members else []


def _wait_briefly(member: _Member, deadline: _Deadline) -> None:
    left_ms = deadline.left_ms()
    try:
        member.reader.wait(member.ref, _POLL_MS if left_ms is None else min(left_ms, _POLL_MS), None)
    except ResultTimeoutError:
        if left_ms == 0:
            raise
