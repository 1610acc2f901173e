"""What a server has: its queues (:func:`find_queues`), how full they are (:func:`read_overview`, and for metrics
:func:`read_figures`), and their workers (:func:`read_fleet`).

All ask a bounded number of questions, each of which takes Redis a few milliseconds at most. What the server does not
permit, or what was not searched, is said; it is never shown as nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from bulltask.jobs.errors import BrokerAuthError, BulltaskError
from bulltask.transport.broker import scan_up_to
from bulltask.transport.call import Call, QueueKeys, SyncClient, command, text, texts_by_name
from bulltask.transport.discovery import TIME
from bulltask.transport.operation import run_sync
from bulltask.transport.scripts.queue import (
    RATE_PERIOD_MS,
    ClientRow,
    QueueFigures,
    list_clients,
    queue_figures,
    queue_of_connection,
    scan_queues,
)
from bulltask.transport.workers import WorkerState, pid_of_worker, read_workers, registered_queues

__all__ = [
    "ConnectedWorker",
    "Fleet",
    "FoundQueues",
    "QueueOverview",
    "find_queues",
    "read_figures",
    "read_fleet",
    "read_overview",
    "worker_connections",
]


MAX_PAGES: Final = 400
"""How many pages, of a thousand keys each, are scanned for queues on each server; this takes about half a second."""

_QUEUES_PER_ROUND_TRIP: Final = 500

_MAX_TASKS: Final = 1_000
_EVENTS_PER_PAGE: Final = 500
_MAX_EVENTS: Final = 100_000
_TRIMMED_TO: Final = 9_000
"""A stream with as many events may have lost older ones: BullMQ keeps about 10,000 by default."""

SILENT_S: Final = 15
"""For how long a worker of bulltask without a state must have been connected to count as silent, not as new."""
SILENT: Final = "its supervisor has not written its state: it was stopped, hangs, or is not permitted to"
"""What is said of a worker whose state is unknown."""


@dataclass(frozen=True, slots=True)
class FoundQueues:
    """The queues of a server.

    Attributes:
        names: Their names in BullMQ (``{emails}``), sorted.
        scanned_all: Whether all keys were scanned. Otherwise, a queue that only Node.js uses, and that has no connected
            worker, may be missing.
    """

    names: tuple[str, ...]
    scanned_all: bool


@dataclass(frozen=True, slots=True)
class ConnectedWorker:
    """A connection by which a worker says that it processes a queue.

    Attributes:
        queue: The queue's name in BullMQ.
        name: The worker's id, or the name of a Node.js worker; ``""`` if it has none.
        address: ``host:port`` of the connection.
        age_s: Seconds since it was opened.
    """

    queue: str
    name: str
    address: str
    age_s: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers of some queues.

    Attributes:
        states: The workers of bulltask, by id; ``None`` if the state is unknown. See
            :func:`bulltask.transport.workers.read_workers`. It is unknown, too, if children are connected, but the
            supervisor no longer writes it.
        queues_of: The names in BullMQ of those queues that each of them processes.
        others: Other connected workers, such as those of Node.js; ``None`` if listing connections is not permitted.
    """

    states: Mapping[str, WorkerState | None]
    queues_of: Mapping[str, tuple[str, ...]]
    others: tuple[ConnectedWorker, ...] | None


def find_queues(client: SyncClient, prefix: str, known: Iterable[str] = (), *, scan: bool = True) -> FoundQueues:
    """Return the queues under a prefix: ``known``, the registered ones, and those that connections and keys name.

    Workers and senders of bulltask register their queues. Only a scan of the keys finds those that only Node.js uses,
    and that have no connected worker.
    """
    names = {*known, *run_sync(client, registered_queues(prefix))}
    names |= {worker.queue for worker in worker_connections(client, prefix) or ()}
    found, scanned_all = scan_up_to(client, lambda cursor: scan_queues(prefix, cursor), MAX_PAGES if scan else 0)
    return FoundQueues(tuple(sorted(names | found)), scanned_all)


def worker_connections(client: SyncClient, prefix: str) -> list[ConnectedWorker] | None:
    """Return the connections of workers; ``None`` if listing them is not permitted."""
    try:
        rows = client.run(named_connections(prefix, client.database))
    except BrokerAuthError:
        return None
    return workers_of(rows, prefix)


def named_connections(prefix: str, database: int) -> Call[list[ClientRow]]:
    """Return the call that lists the connections of :func:`workers_of`."""
    start = f"{prefix}:"
    return list_clients(start, start, database=database)


def workers_of(rows: Iterable[ClientRow], prefix: str) -> list[ConnectedWorker]:
    """Return those of the connections that are workers'."""
    named = [(row, *queue_of_connection(row.name, prefix)) for row in rows]
    return [
        ConnectedWorker(queue, kind.removeprefix("w:"), row.address, int(row.fields.get("age", 0)))
        for row, queue, kind in named
        if queue and (kind == "" or kind.startswith("w:"))  # not another client's, nor one that only reads events
    ]


def read_fleet(client: SyncClient, queues: Sequence[QueueKeys], now_ms: int) -> Fleet:
    """Return the workers of some queues, which all have the same prefix; ``now_ms`` is the server's time."""
    states: dict[str, WorkerState | None] = {}
    queues_of: dict[str, list[str]] = {}
    for keys, found in zip(queues, run_sync(client, read_workers(queues, now_ms)), strict=True):
        for worker_id, state in found.items():
            states[worker_id] = states.get(worker_id) or state
            queues_of.setdefault(worker_id, []).append(keys.name)
    names = {keys.name for keys in queues}
    connected = worker_connections(client, queues[0].prefix) if queues else []
    others = None
    if connected is not None:
        found_others = [worker for worker in connected if worker.queue in names and worker.name not in states]
        others = tuple(worker for worker in found_others if not pid_of_worker(worker.name))
        for worker in found_others:
            if pid_of_worker(worker.name) and worker.age_s >= SILENT_S:  # others have started, and soon write it
                states[worker.name] = None
                of_worker = queues_of.setdefault(worker.name, [])
                of_worker += [] if worker.queue in of_worker else [worker.queue]
    return Fleet(states, {worker_id: tuple(found) for worker_id, found in queues_of.items()}, others)


@dataclass(frozen=True, slots=True)
class QueueOverview:
    """A queue.

    Attributes:
        keys: The queue.
        figures: How full it is; the error if that cannot be read.
        workers: How many workers it has; ``None`` if that cannot be known.
        throttled: How many of its delayed jobs the rate limit of each task delays; ``None`` if that cannot be known.
        incompatible: How many of its delayed jobs no worker can run; ``None`` if that cannot be known.
    """

    keys: QueueKeys
    figures: QueueFigures | BulltaskError
    workers: int | None
    throttled: Mapping[str, int] | None
    incompatible: int | None


def read_overview(client: SyncClient, queues: Sequence[QueueKeys], now_ms: int) -> list[QueueOverview]:
    """Return how full queues are, which all have the same prefix; ``now_ms`` is the server's time."""
    connected: dict[str, set[str]] = {}
    connections = worker_connections(client, queues[0].prefix) if queues else None
    for worker in connections or ():
        connected.setdefault(worker.queue, set()).add(worker.name or worker.address)
    overview, figures = [], list(_figures(client, queues, now_ms, rates=True))
    figures = _with_rates(client, queues, figures, now_ms)
    with_delayed = [keys for keys, found in zip(queues, figures, strict=True) if getattr(found, "delayed", 0)]
    held = dict(zip(with_delayed, _held(client, with_delayed), strict=True))
    for keys, found in zip(queues, figures, strict=True):
        reported = () if isinstance(found, BulltaskError) else found.workers
        workers = len({*reported, *connected.get(keys.name, ())})
        overview.append(
            QueueOverview(
                keys, found, workers if workers or connections is not None else None, *held.get(keys, ({}, 0))
            )
        )
    return overview


def _with_rates(
    client: SyncClient, queues: Sequence[QueueKeys], figures: Sequence[QueueFigures | BulltaskError], now_ms: int
) -> list[QueueFigures | BulltaskError]:
    """Return the figures, after the events of those queues were counted that have had many in the last minute.

    After a burst, all the newest events are of jobs that finish: only those of a whole minute have the rates. Pages of
    500 are read, at most 100,000 events of all queues.
    """
    found, left = list(figures), _MAX_EVENTS // _EVENTS_PER_PAGE
    for index, (keys, queue) in enumerate(zip(queues, figures, strict=True)):
        if isinstance(queue, BulltaskError) or queue.window_ms is None or queue.window_ms >= RATE_PERIOD_MS:
            continue
        kinds: Counter[bytes] = Counter()
        end, since, oldest_ms, is_complete = "+", str(now_ms - RATE_PERIOD_MS), now_ms, False
        while left and not is_complete:
            left -= 1
            call = command("XREVRANGE", keys.events, end, since, "COUNT", _EVENTS_PER_PAGE, parse_reply=list)
            page: list[tuple[bytes, list[bytes]]] = client.run(call)
            kinds.update(fields[fields.index(b"event") + 1] for _, fields in page if b"event" in fields)
            is_complete = len(page) < _EVENTS_PER_PAGE
            if page:
                ms, _, number = text(page[-1][0]).partition("-")
                oldest_ms, end = int(ms), f"{ms}-{int(number) - 1}" if number != "0" else str(int(ms) - 1)
        if not kinds:
            continue
        window_ms = max(1, now_ms - oldest_ms)
        is_trimmed = client.run(command("XLEN", keys.events, parse_reply=int)) <= kinds.total()
        if is_complete and not (is_trimmed and kinds.total() >= _TRIMMED_TO):
            window_ms = RATE_PERIOD_MS
        finished = kinds[b"completed"] + kinds[b"failed"]
        found[index] = replace(queue, added=kinds[b"added"], finished=finished, window_ms=window_ms)
    return found


def _held(client: SyncClient, queues: Sequence[QueueKeys]) -> Iterator[tuple[dict[str, int] | None, int | None]]:
    """Yield of each queue how many jobs each task's rate limit delays, and how many no worker can run."""
    asked: list[Call[Any]] = []
    for keys in queues:
        asked.append(command("HGETALL", keys.task_rates, parse_reply=texts_by_name))
        asked.append(command("ZCARD", keys.incompatible, parse_reply=int))
    replies = client.try_many(asked)
    rates, incompatible = replies[::2], replies[1::2]
    tasks = [() if isinstance(found, BulltaskError) else tuple(found)[:_MAX_TASKS] for found in rates]
    pairs = [(keys, task) for keys, names in zip(queues, tasks, strict=True) for task in names]
    counts = iter(client.try_many([command("ZCARD", keys.throttled(task), parse_reply=int) for keys, task in pairs]))
    for found, number, names in zip(rates, incompatible, tasks, strict=True):
        numbers = [next(counts) for _ in names]
        is_unknown = any(isinstance(item, BulltaskError) for item in (found, *numbers))
        throttled = {task: item for task, item in zip(names, numbers, strict=True) if isinstance(item, int) and item}
        yield None if is_unknown else throttled, None if isinstance(number, BulltaskError) else number


def read_figures(client: SyncClient, queues: Sequence[QueueKeys]) -> dict[str, QueueFigures]:
    """Return how full queues are, by their names in the app; raises the error of one that cannot be read."""
    figures: dict[str, QueueFigures] = {}
    for keys, found in zip(queues, _figures(client, queues, int(client.run(TIME)), rates=False), strict=True):
        if isinstance(found, BulltaskError):
            raise found
        figures[keys.queue] = found
    return figures


def _figures(
    client: SyncClient, queues: Sequence[QueueKeys], now_ms: int, *, rates: bool
) -> Iterator[QueueFigures | BulltaskError]:
    for start in range(0, len(queues), _QUEUES_PER_ROUND_TRIP):
        part = queues[start : start + _QUEUES_PER_ROUND_TRIP]
        yield from client.try_many([queue_figures(keys, now_ms, rates=rates) for keys in part])
