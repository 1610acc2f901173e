"""The steps of a canvas before they become jobs, with the parent and root of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bulltask.registry.signature import Signature

__all__ = ["Node", "ResultList", "Step", "leaves", "step_origins"]


@dataclass(slots=True, eq=False)
class Step:
    """A call that becomes a job, or a fan-out job (without a call).

    Attributes:
        queue: The queue, if the job exists already.
        parent: The job that waits for it and receives its result.
        receives: The structure of the results that it receives, ``None`` if it has no preceding step.
        dependents: The other jobs that wait for it, if it is a fan-out job.
        errbacks: Error callbacks of the chain that it ends; they are also called if an earlier step failed.
        chord_errbacks: Those of the chord whose body it is; they are also called if a member of its header failed.
        links: The results of its callbacks.
    """

    id: str
    call: Signature[Any, Any] | None = None
    queue: str = ""
    parent: Step | None = None
    children: list[Step] = field(default_factory=list)
    receives: Node | None = None
    dependents: list[Step] = field(default_factory=list)
    errbacks: list[Signature[Any, Any]] = field(default_factory=list)
    chord_errbacks: list[Signature[Any, Any]] = field(default_factory=list)
    links: list[Node] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ResultList:
    """The results of a group, in order; ``id`` is that of the job that receives them, or of the group."""

    id: str
    items: list[Node]


Node = Step | ResultList


def leaves(node: Node) -> list[Step]:
    """Return the steps whose results are those of ``node``, in order."""
    return [node] if isinstance(node, Step) else [leaf for item in node.items for leaf in leaves(item)]


def step_origins(steps: Iterable[Step], sent_by: Mapping[str, str]) -> dict[Step, Mapping[str, str]]:
    """Return the ids of the parent and the root of each call, as they are stored; ``sent_by`` for the first calls.

    As in Celery, the parent is the previous step; for the body of a chord, one of the members. The root is the first of
    the preceding steps, unless a task sends the canvas.

    Args:
        steps: The steps of a canvas.
        sent_by: The parent and the root of the first calls: those of jobs that the current task sends; empty for none.
    """
    found: dict[Step, Mapping[str, str]] = {}
    for step in steps:
        chain = [step]  # no recursion, as a chain may exceed Python's recursion limit
        while chain[-1] not in found and (before := _before(chain[-1])) is not None:
            chain.append(before)
        first = chain.pop()
        origin = found.setdefault(first, sent_by)
        while chain:
            parent, first = first, chain.pop()
            origin = found[first] = {"parent": parent.id, "root": origin.get("root", parent.id)}
    return found


def _before(step: Step) -> Step | None:
    """Return the call before a step, ``None`` for the first one."""
    found: Step | None = step
    while found is not None and (found is step or found.call is None):
        received = [] if found.receives is None else leaves(found.receives)
        # After an empty group, the step before that group is among the children.
        found = next(reversed([*found.children, *received]), None)
    return found
