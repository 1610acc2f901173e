"""Adding jobs at most once in a write, even after they have run and were removed; packing only (ADR 18)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, islice
from typing import Any, Final, Literal, cast

from bulltask.jobs.job import NewJob
from bulltask.lua import loader
from bulltask.lua.loader import Script
from bulltask.transport.call import Call, command
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import raise_for, text, texts
from bulltask.transport.scripts.add import add_job
from bulltask.value_class import value_class

__all__ = ["TOGETHER", "Fence", "Sent", "add_fenced_jobs", "some_fenced"]

TOGETHER: Final = 25
"""Most jobs in one call: Redis does nothing else for a millisecond."""

_SCANNED: Final = 1_000

Outcome = Literal["added", "known", "fenced"]


@value_class
class Fence:
    """Which write adds the jobs.

    Attributes:
        write_id: the write; the same one again adds nothing that it has added before.
        ttl_ms: how long that is remembered after the write's last job.
    """

    write_id: str
    ttl_ms: int


@value_class
class Sent:
    """What became of one job of a write.

    Attributes:
        id: the job that is stored now; another one than was sent where deduplication says that they are the same.
        outcome: ``added``; ``known``: a job of that id was there; ``fenced``: this write has added it before.
    """

    id: str
    outcome: Outcome


def add_fenced_jobs(keys: QueueKeys, jobs: Sequence[NewJob], now_ms: int, fence: Fence) -> list[Call[list[Sent]]]:
    """BullMQ's add script for the jobs (:func:`bulltask.transport.scripts.add.add_job`), behind own ``fence``.

    Neighbours that the same script adds go in one call, up to :data:`TOGETHER` of them: to begin a script takes as long
    as a fifth of what it does for a job. The results, in the order of the calls, are those of the jobs in their order.
    """
    plain = [(job, add_job(keys, job, now_ms)) for job in jobs]
    calls = []
    for script, alike in groupby(plain, key=lambda pair: pair[1].script):
        assert script is not None
        while some := list(islice(alike, TOGETHER)):
            calls.append(_fenced(keys, script, some, fence))
    return calls


def _fenced(keys: QueueKeys, add: Script, plain: Sequence[tuple[NewJob, Call[str]]], fence: Fence) -> Call[list[Sent]]:
    first = add.key_count + 1
    script, places = loader.fenced(add.name), plain[0][1].args[1:first]

    def judge(replies: Any) -> list[Sent]:
        sent = []
        for (job, _), reply in zip(plain, replies, strict=True):
            raise_for(reply, job.id, keys.name)
            sent.append(Sent(text(reply[0]), cast(Outcome, text(reply[1]))))
        return sent

    words = [word for job, call in plain for word in (job.id, keys.job(job.id), *call.args[first:])]
    return Call((script.key_count, keys.fence(fence.write_id), *places, fence.ttl_ms, *words), judge, script)


def some_fenced(keys: QueueKeys, write_id: str, cursor: str) -> Call[tuple[str, list[str]]]:
    """Ids of jobs that a write has added: the next cursor, ``0`` at the end, and some ids.

    The same id may come twice.
    """

    def judge(reply: Any) -> tuple[str, list[str]]:
        return text(reply[0]), texts(reply[1])

    return command("SSCAN", keys.fence(write_id), cursor, "COUNT", _SCANNED, judge=judge)
