"""What a worker stores about itself in Redis (:class:`WorkerState`), and which queues a server has (the registry).

A worker writes its whole state to its home queue, its first one, and a short one to its other queues. A state expires
soon after its worker has died. All times are the server's, in epoch milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, field, fields
from math import inf
from typing import Any, Final

from bulltask.jobs import codec
from bulltask.jobs.clock import value_class
from bulltask.jobs.errors import BrokerAuthError, BrokerError, DecodeError
from bulltask.transport.call import Call, QueueKeys, command, known_queues, nothing, text, texts, texts_by_name
from bulltask.transport.operation import Operation, execute

__all__ = [
    "MAX_JOBS",
    "MAX_TASKS",
    "REGISTERED_MS",
    "WorkerChild",
    "WorkerJob",
    "WorkerState",
    "forget_queues",
    "pid_of_worker",
    "read_workers",
    "register_queues",
    "registered_names",
    "registered_queues",
    "remove_state",
    "write_state",
]


MAX_JOBS: Final = 200
"""Maximum number of jobs in a state."""
MAX_TASKS: Final = 1_000
"""Maximum number of tasks in a state."""

REGISTERED_MS: Final = 30 * 86_400_000
"""How long a queue stays registered after a client has last used it."""

_SET_TTL_MS: Final = 3_600_000
_MAX_READ: Final = 1_000


@value_class(kw_only=True, frozen=True)
class WorkerJob:
    """A job that a child has.

    Attributes:
        id: The job, ``""`` if its id is too long for the worker's shared memory.
        queue: The queue's name in the app.
        since_ms: When it came into this state.
        state: ``active``, ``prefetched`` (its attempt has not started) or ``finishing`` (its outcome is being written).
    """

    id: str = ""
    queue: str = ""
    since_ms: int = 0
    state: str = ""


@value_class(kw_only=True, frozen=True)
class WorkerChild:
    """A child of a worker.

    Attributes:
        pid: Its process id.
        rss_kib: Its resident memory; ``None`` if that is unknown.
        state: ``starting``, ``run``, ``closing`` if it acquires no more jobs, ``stopped`` by ``SIGSTOP``, or
            ``unresponsive``: it has no job and asks for none, so it is soon replaced.
        jobs: Its jobs, those that it has had longest first.
        free: How many more jobs it can run at once; 0 if a job keeps it from acquiring any, though it has free slots.
    """

    pid: int = 0
    rss_kib: int | None = None
    state: str = ""
    jobs: tuple[WorkerJob, ...] = ()
    free: int = 0


@value_class(kw_only=True, frozen=True)
class WorkerState:
    """The state of a worker, as its supervisor has written it; readers ignore fields that they do not know.

    Attributes:
        id: The worker's id, which its log lines contain, too.
        host, pid: Where its supervisor runs.
        app: The app's name.
        version, python: The versions of bulltask and Python.
        started_ms: When it started.
        at_ms: When it wrote this state.
        ttl_ms: How long after that the state expires.
        queues: The names of its queues in the app.
        home: The name in BullMQ (with the hash tag) of the queue that has its whole state.
        is_short: Whether this is a short state. Only the fields above, ``queues`` with one queue, and ``state`` are
            known.
        state: ``run``, ``paused`` (only this worker, not its queues) or ``closing``.
        concurrency: How many children should be running.
        children: Its children.
        jobs_left_out: How many jobs are not in ``children``, because there are more than :data:`MAX_JOBS`.
        slots: How many jobs its children can run at a time.
        busy: How many they are running.
        tasks: The names of its tasks, at most :data:`MAX_TASKS`.
        tasks_left_out: How many tasks are not in ``tasks``.
        rate_limits: The rate limits of its tasks, as ``"10/s"`` or ``"5/30s"``.
        limiter: The ``limiter`` of its queues: ``{"max": …, "duration_ms": …}``.
        permits: How many jobs it may still start (``--max-jobs``); ``None`` for any number.
        lock_ms: ``lock_duration``.
        stalled_interval_ms: ``stalled_interval``; ``None`` if it does not look for stalled jobs.
        broker: The URL of Redis, without its password.
        batches: Its batch tasks: ``{"size": …, "wait_ms": …}``.
        cancelled: Those of its queues from which it was told to fetch no jobs.
    """

    id: str
    host: str = ""
    pid: int = 0
    app: str = ""
    version: str = ""
    python: str = ""
    started_ms: int = 0
    at_ms: int = 0
    ttl_ms: int = 0
    queues: tuple[str, ...] = ()
    home: str = ""
    is_short: bool = False
    state: str = ""
    concurrency: int = 0
    children: tuple[WorkerChild, ...] = ()
    jobs_left_out: int = 0
    slots: int = 0
    busy: int = 0
    tasks: tuple[str, ...] = ()
    tasks_left_out: int = 0
    rate_limits: Mapping[str, str] = field(default_factory=dict)
    limiter: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    permits: int | None = None
    lock_ms: int = 0
    stalled_interval_ms: int | None = None
    broker: str = ""
    batches: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    cancelled: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values; a short one without the fields that it does not know."""
        # Not asdict(), which copies each of a thousand names.
        values = {name: getattr(self, name) for name in (_SHORT if self.is_short else _NAMES)}
        return values if self.is_short else {**values, "children": tuple(map(asdict, self.children))}

    def to_json(self) -> str:
        """Return the state as JSON."""
        return codec.encode(self.to_dict(), what=f"the state of worker {self.id}").decode()

    @classmethod
    def from_json(cls, raw: bytes) -> WorkerState:
        """Return the state that another version of bulltask may have written; raises ``DecodeError``."""
        stored = codec.decode_object(raw, what="the state of a worker")
        try:
            children = tuple(
                _known(WorkerChild, {**child, "jobs": tuple(_known(WorkerJob, job) for job in child.get("jobs", ()))})
                for child in stored.get("children", ())
            )
            lists = {name: tuple(map(str, stored.get(name, ()))) for name in ("queues", "tasks", "cancelled")}
            state: WorkerState = _known(cls, {**stored, **lists, "children": children})
        except (TypeError, AttributeError) as exc:
            raise DecodeError(f"the state of a worker is malformed: {exc}") from exc
        return state


def pid_of_worker(worker_id: str) -> int:
    """Return the supervisor's process id, which a worker's id contains (:func:`bulltask.observe.log.worker_id`).

    0 if this is not the id of a worker of bulltask, as far as one can see: users choose the names of Node.js' workers.
    """
    _, pid, end = ["", "", *worker_id.rsplit("-", 2)][-3:]
    return int(pid) if pid.isdecimal() and len(end) == _RANDOM_CHARS else 0


_RANDOM_CHARS: Final = 6
_NAMES: Final = tuple(item.name for item in fields(WorkerState))
_SHORT: Final = _NAMES[:13]


def _known(kind: Any, stored: Mapping[str, Any]) -> Any:
    """Return an instance with those fields that this version knows, if they have the types of the defaults."""
    known = [item for item in fields(kind) if item.name in stored]
    for item in known:
        if not isinstance(stored[item.name], _TYPES.get(str(item.type), object)):
            raise TypeError(f"{item.name} is {stored[item.name]!r:.100}")
    return kind(**{item.name: stored[item.name] for item in known})


_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "int | None": (int, type(None)),
    "Mapping[str, str]": (dict,),
    "Mapping[str, Mapping[str, int]]": (dict,),
}


def write_state(keys: QueueKeys, state: WorkerState, *, clean: bool = True) -> list[Call[Any]]:
    """Return the calls that store a worker's state in a queue.

    With ``clean``, which is needed now and then, they also remove the ids of the workers whose states have expired.
    """
    calls: list[Call[Any]] = [
        command("SET", keys.worker(state.id), state.to_json(), "PX", state.ttl_ms),
        command("ZADD", keys.workers, state.at_ms + state.ttl_ms, state.id),
    ]
    if clean:
        calls += [
            command("ZREMRANGEBYSCORE", keys.workers, "-inf", state.at_ms),
            command("PEXPIRE", keys.workers, _SET_TTL_MS),
        ]
    return calls


def remove_state(keys: QueueKeys, worker_id: str) -> list[Call[Any]]:
    """Return the calls that remove the state of a worker that stops from a queue."""
    return [command("DEL", keys.worker(worker_id)), command("ZREM", keys.workers, worker_id)]


def read_workers(queues: Sequence[QueueKeys], now_ms: int) -> Operation[list[dict[str, WorkerState | None]]]:
    """Return the operation that reads which workers each queue has, with their states, by their ids.

    A state is ``None`` if it is unknown: it is missing or malformed, although its worker was alive a moment ago. It is
    short if the worker's home queue cannot be read, for example because this is not permitted. A worker without a state
    in its home queue has died.
    """
    ids: list[list[str]] = yield [_live_ids(keys, now_ms) for keys in queues]
    first = {worker_id: keys for keys, found in zip(queues, ids, strict=True) for worker_id in found}
    if not first:
        return [{} for _ in queues]
    read: list[WorkerState | None] = yield [_read_state(keys, worker_id) for worker_id, keys in first.items()]
    states = dict(zip(first, read, strict=True))
    homes = {
        state.id: QueueKeys(first[state.id].prefix, state.home)
        for state in states.values()
        if state is not None and state.is_short
    }
    whole = (yield from _read_homes(homes)) if homes else {}
    dead = {worker_id for worker_id, state in whole.items() if state is None}
    states |= whole
    return [{worker_id: states[worker_id] for worker_id in found if worker_id not in dead} for found in ids]


def _read_homes(homes: Mapping[str, QueueKeys]) -> Operation[dict[str, WorkerState | None]]:
    """Return the states in the home queues; ``None`` for workers that have died, nothing for those that are unknown."""
    try:
        read = yield [_read_state(keys, worker_id) for worker_id, keys in homes.items()]
    except BrokerError:
        if len(homes) == 1:
            return {}
        found: dict[str, WorkerState | None] = {}
        for worker_id, keys in homes.items():  # one by one: only some may be forbidden, or on another node
            found |= yield from _read_homes({worker_id: keys})
        return found
    return dict(zip(homes, read, strict=True))


def _live_ids(keys: QueueKeys, now_ms: int) -> Call[list[str]]:
    def parse_reply(reply: Any) -> list[str]:
        return [worker for worker, until in texts_by_name(reply).items() if float(until) > now_ms]

    return command("ZREVRANGE", keys.workers, 0, _MAX_READ - 1, "WITHSCORES", parse_reply=parse_reply)


def _read_state(keys: QueueKeys, worker_id: str) -> Call[WorkerState | None]:
    def parse_reply(reply: Any) -> WorkerState | None:
        try:
            return None if reply is None else WorkerState.from_json(reply)
        except DecodeError:
            return None

    return command("GET", keys.worker(worker_id), parse_reply=parse_reply)


def register_queues(prefix: str, names: Iterable[str], now_ms: int) -> list[Call[None]]:
    """Return the calls that register queues by their names in BullMQ, and remove those that nobody uses any more."""
    key, members = known_queues(prefix), list(names)
    chunks = [members[start : start + _MAX_READ] for start in range(0, len(members), _MAX_READ)]
    added: list[Call[None]] = [
        command("ZADD", key, *(word for name in chunk for word in (now_ms, name)), parse_reply=nothing)
        for chunk in chunks
    ]
    return [*added, command("ZREMRANGEBYSCORE", key, "-inf", now_ms - REGISTERED_MS, parse_reply=nothing)]


def forget_queues(prefix: str, names: Sequence[str]) -> Call[None]:
    """Return the call that removes queues from the registry."""
    return command("ZREM", known_queues(prefix), *names, parse_reply=nothing)


def registered_queues(prefix: str, at_least: float = inf) -> Operation[dict[str, int]]:
    """Return the operation that reads when bulltask has last used each queue, by the queues' names in BullMQ.

    It ends when it has read ``at_least`` queues. A registry that the user may not read counts as empty.
    """
    names: dict[str, int] = {}
    cursor = ""
    with suppress(BrokerAuthError):
        while cursor != "0" and len(names) < at_least:
            scan = command("ZSCAN", known_queues(prefix), cursor or "0", "COUNT", _MAX_READ, parse_reply=_scanned)
            cursor, page = yield from execute(scan)
            names |= page
    return names


def registered_names(prefix: str) -> Call[list[str]]:
    """Return the call that reads the names in BullMQ of all registered queues."""
    return command("ZRANGE", known_queues(prefix), 0, -1, parse_reply=texts)


def _scanned(reply: Any) -> tuple[str, dict[str, int]]:
    return text(reply[0]), {name: int(float(at_ms)) for name, at_ms in texts_by_name(reply[1]).items()}
