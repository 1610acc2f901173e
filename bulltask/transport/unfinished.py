"""Why a job has not finished: a sentence for ``ResultTimeoutError``, from what Redis knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bulltask.errors import BrokerError
from bulltask.jobs import codec
from bulltask.jobs.job import INCOMPATIBLE_FIELD
from bulltask.jobs.states import JobState
from bulltask.transport.call import command
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation, execute
from bulltask.transport.scripts.job import get_state, job_fields
from bulltask.transport.scripts.queue import ClientRow, list_clients, worker_queues

__all__ = ["describe_unfinished"]

_FIELDS: Final = ("name", "failedReason", "pb", "atm", INCOMPATIBLE_FIELD)
_MAX_TEXT: Final = 300
_MAX_QUEUES: Final = 5


def describe_unfinished(keys: QueueKeys, job_id: str, url: str) -> Operation[str]:
    """Return what the job is waiting for; ``""`` if it has finished in the meantime.

    Args:
        keys: The keys of the job's queue.
        job_id: The job's id.
        url: The server's URL without its password: a worker may be connected to another server.
    """
    state, fields, is_paused = yield [
        get_state(keys, job_id),
        job_fields(keys, job_id, _FIELDS),
        command("HEXISTS", keys.meta, "paused"),
    ]
    name, reason, worker, attempts, incompatible = (codec.decode_text(value)[:_MAX_TEXT] for value in fields)
    if state.finished or state is JobState.UNKNOWN:
        return ""
    match state:
        case JobState.ACTIVE:
            why = f" on worker {worker}" if worker else ""
        case JobState.WAITING_CHILDREN:
            why = ": its child jobs have not finished"
        case _ if incompatible.startswith(f"{attempts or 0}:"):
            why = f", because no worker could run it: {reason}"
        case _ if reason:
            why = f", because an attempt failed: {reason}"
        case _ if is_paused:
            why = ", because the queue is paused"
        case _:
            why = yield from _workers(keys, url)
    return f"its task is {name!r}, and it is {state}{why}"


def _workers(keys: QueueKeys, url: str) -> Operation[str]:
    """Return how many workers the queue has; ``""`` if the server does not say."""
    own = keys.client_name()
    try:
        rows: list[ClientRow] = yield from execute(list_clients(own, f"{own}:w:"))
        others: set[str] = set() if rows else (yield from execute(worker_queues(keys.prefix)))
    except BrokerError:  # CLIENT LIST is forbidden
        return ""
    if rows:
        return f"; workers that are connected to this queue: {len(rows)}"
    served = f", only to {_names(sorted(others))}" if others else ""
    return (
        f", because no worker is connected to this queue at {url}{served}. Start one with `bulltask worker -A APP -Q "
        f"{keys.queue}`, with the same broker_url"
    )


def _names(queues: Sequence[str]) -> str:
    shown = ", ".join(name.strip("{}") for name in queues[:_MAX_QUEUES])
    return shown if len(queues) <= _MAX_QUEUES else f"{shown} and {len(queues) - _MAX_QUEUES} other queues"
