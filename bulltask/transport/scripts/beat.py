"""What ``beat_schedule`` notes and reads: whose a job scheduler is, and in which queues an app has some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bulltask.errors import DecodeError
from bulltask.jobs import codec
from bulltask.jobs.job import OWN_KEY
from bulltask.transport import keys as key_names
from bulltask.transport.call import Call, command
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import text

__all__ = ["Label", "beat_queues", "forget_queue", "note_queue", "read_label"]


@dataclass(frozen=True, slots=True)
class Label:
    """What the template of a job scheduler says about who made it.

    Attributes:
        owner: the name of the app whose ``beat_schedule`` it comes from, ``""`` for none.
        digest: stands for what the entry said.
    """

    owner: str
    digest: str


def read_label(keys: QueueKeys, scheduler_id: str) -> Call[Label]:
    """Whose a scheduler is."""

    def judge(reply: Any) -> Label:
        try:
            options = codec.decode(reply)
        except DecodeError:
            options = None
        own = options.get(OWN_KEY) if isinstance(options, dict) else None
        said = own if isinstance(own, dict) else {}
        return Label(str(said.get("beat", "")), str(said.get("digest", "")))

    return command("HGET", keys.scheduler(scheduler_id), "opts", judge=judge)


def beat_queues(prefix: str, app: str) -> Call[set[str]]:
    """The queues in which the app has made schedulers, as the user spells them."""
    return command("SMEMBERS", key_names.beat_queues(prefix, app), judge=lambda reply: {text(name) for name in reply})


def note_queue(prefix: str, app: str, queue: str) -> Call[int]:
    """Note that the app makes schedulers in this queue: they are found again when its code names it no more."""
    return command("SADD", key_names.beat_queues(prefix, app), queue)


def forget_queue(prefix: str, app: str, queue: str) -> Call[int]:
    """The app has none in this queue any more."""
    return command("SREM", key_names.beat_queues(prefix, app), queue)
