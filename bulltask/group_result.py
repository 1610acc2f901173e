"""``GroupResult``: the handle of a group."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast

from bulltask.clock import Duration, to_ms
from bulltask.errors import DecodeError
from bulltask.ports import ResultReader, Sender
from bulltask.result import CURRENT_APP, AsyncResult
from bulltask.result_set import ResultSet

__all__ = ["GroupResult"]

R = TypeVar("R")


class GroupResult(ResultSet[R]):
    """The handle of a group: a result set of its members, in order.

    Args:
        group_id: The group's id.
        results: The members' handles. A member that ends with a group has a ``GroupResult``.
        parent: The handle of the previous step, if the group is a step of a chain.

    Attributes:
        id, results, parent: The arguments.
        children: The handles of the steps after the group, if this process sent it as a step of a chain.
    """

    results: list[AsyncResult[R] | GroupResult[Any]]  # type: ignore[assignment]

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[AsyncResult[R] | GroupResult[Any]]: ...

    def __init__(self, group_id: str, results: Sequence[AsyncResult[R] | GroupResult[Any]], parent: Any = None) -> None:
        super().__init__(results)
        self.id, self.parent = group_id, parent
        self.children: list[Any] = []
        if parent is not None:
            parent.children.append(self)

    def as_tuple(self) -> list[Any]:
        """Return the ids of the group, of the steps before it and of its members; see ``AsyncResult.as_tuple``."""
        parent = None if self.parent is None else self.parent.as_tuple()
        members: list[Any] = [member.as_tuple() for member in self.results]
        for member, ids in zip(self.results, members, strict=True):
            if member.parent is self.parent:
                ids[0][1] = None  # the step before the group is its own parent, once
        return [[self.id, parent], members]

    def save(self, keep: Duration | None = 86_400) -> None:
        """Store the group, so that :meth:`restore` finds it by its id.

        Args:
            keep: How long it is stored, in seconds or as a ``timedelta``; ``None`` for no limit. Default: a day.
        """
        keep_ms = None if keep is None else max(1, to_ms(keep, "keep"))
        reader, queue = self._store()
        reader.save_group(queue, self.id, json.dumps(self._addresses()), keep_ms)

    def delete(self) -> None:
        """Remove what :meth:`save` stored; the members' jobs are kept (:meth:`forget` removes those)."""
        reader, queue = self._store()
        reader.forget_group(queue, self.id)

    def _store(self) -> tuple[ResultReader, str]:
        """Return what stores the group, and a queue on its server; an empty group belongs to the current app."""
        members = self._members()
        if members:
            return members[0].reader, members[0].queue
        app = cast(Sender, import_module(CURRENT_APP).current_sender())
        return app.results, app.config.default_queue

    @classmethod
    def restore(cls, group_id: str, app: Sender | None = None) -> GroupResult[Any] | None:
        """Return a group that any process has stored with :meth:`save`; ``None`` if there is none, or it has expired.

        Args:
            group_id: The group's id.
            app: An app with the same server and prefix; default: the current app, which is the app created last.

        Raises:
            DecodeError: What is stored is malformed.
        """
        app = app or cast(Sender, import_module(CURRENT_APP).current_sender())
        stored = app.results.load_group(app.config.default_queue, group_id)
        try:
            return None if stored is None else cls._from_addresses(json.loads(stored), app.results)
        except (KeyError, IndexError, TypeError, ValueError, RecursionError):
            text = (
                f"what is stored for group {group_id} is malformed: save it again, or remove it with GroupResult.delete"
            )
            raise DecodeError(text) from None

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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupResult) and (other.id, other.results) == (self.id, self.results)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<GroupResult {self.id} of {len(self.results)} members>"
