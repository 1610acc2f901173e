"""The sync and the async classes have the same methods, with the same arguments and results."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from bulltask.queue.ajob import AsyncJob
from bulltask.queue.aqueue import AsyncQueue
from bulltask.queue.events import AsyncQueueEvents, QueueEvents
from bulltask.queue.flow import AsyncFlowProducer, FlowProducer
from bulltask.queue.job import Job
from bulltask.queue.queue import Queue
from bulltask.queue.repeatables import AsyncRepeatables, Repeatables
from bulltask.queue.schedulers import AsyncJobSchedulers, JobSchedulers

DOCUMENTED = {Queue, Job}
"""The text of a twin leads to that of the other, word for word; in the others the two classes share a file."""
TWINS = [
    (Queue, AsyncQueue),
    (Job, AsyncJob),
    (FlowProducer, AsyncFlowProducer),
    (JobSchedulers, AsyncJobSchedulers),
    (Repeatables, AsyncRepeatables),
    (QueueEvents, AsyncQueueEvents),
]


def methods(kind: type) -> dict[str, Any]:
    return {name: found for name, found in inspect.getmembers(kind) if not name.startswith("_")}


def in_sync_words(annotation: str) -> str:
    return re.sub(r"\bAsync(?=Job|Iterator|Queue|FlowProducer|Repeatables)", "", annotation)


def signature(function: Any) -> list[tuple[str, Any, Any, str]]:
    found = inspect.signature(function)
    parameters = [(p.name, p.kind, p.default, in_sync_words(str(p.annotation))) for p in found.parameters.values()]
    return [*parameters, ("return", None, None, in_sync_words(str(found.return_annotation)))]


@pytest.mark.parametrize(("sync", "twin"), TWINS)
def test_the_twins_have_the_same_methods(sync: type, twin: type) -> None:
    assert set(methods(sync)) == set(methods(twin))


@pytest.mark.parametrize(
    ("sync", "twin", "name"),
    [(sync, twin, name) for sync, twin in TWINS for name, found in methods(sync).items() if inspect.isfunction(found)],
)
def test_a_method_and_its_twin_have_the_same_signature(sync: type, twin: type, name: str) -> None:
    own, other = methods(sync)[name], methods(twin)[name]
    if own is other:
        return  # it asks nothing of Redis
    assert signature(own) == signature(other)
    assert inspect.iscoroutinefunction(other) or inspect.isasyncgenfunction(other)
    assert not inspect.iscoroutinefunction(own)
    assert sync not in DOCUMENTED or other.__doc__ == f"As :meth:`{own.__module__}.{own.__qualname__}`."
