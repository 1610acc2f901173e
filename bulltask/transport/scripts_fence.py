"""Adding a job at most once in a write, even after it has run and was removed; packing only (ADR 18)."""

from __future__ import annotations

from typing import Any, Final, Literal, cast

from bulltask.job import NewJob
from bulltask.lua import loader
from bulltask.transport.call import Call, command
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import raise_for, text, texts
from bulltask.transport.scripts_add import add_job
from bulltask.values import value_class

__all__ = ["Fence", "Sent", "add_fenced_job", "some_fenced"]

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


def add_fenced_job(keys: QueueKeys, job: NewJob, now_ms: int, fence: Fence) -> Call[Sent]:
    """BullMQ's add script for the job (:func:`bulltask.transport.scripts_add.add_job`), behind own ``fence``."""
    call = add_job(keys, job, now_ms)
    assert call.script is not None
    count = call.script.key_count
    places, said = call.args[1 : count + 1], call.args[count + 1 :]
    script = loader.fenced(call.script.name)

    def judge(reply: Any) -> Sent:
        raise_for(reply, job.id, keys.name)
        return Sent(text(reply[0]), cast(Outcome, text(reply[1])))

    words = (keys.fence(fence.write_id), *places, fence.ttl_ms, job.id, keys.job(job.id), *said)
    return Call((script.key_count, *words), judge, script)


def some_fenced(keys: QueueKeys, write_id: str, cursor: str) -> Call[tuple[str, list[str]]]:
    """Ids of jobs that a write has added: the next cursor, ``0`` at the end, and some ids.

    The same id may come twice.
    """

    def judge(reply: Any) -> tuple[str, list[str]]:
        return text(reply[0]), texts(reply[1])

    return command("SSCAN", keys.fence(write_id), cursor, "COUNT", _SCANNED, judge=judge)
