"""Orders to live workers, as their sender sees them: :class:`Answers`, and what both classes ``Control`` share.

Also what commands and the dashboard have in common when they change a queue.
"""

from __future__ import annotations

import getpass
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol
from uuid import uuid4

from bulltask.jobs import codec
from bulltask.jobs.clock import Duration, mono_ms, to_ms
from bulltask.jobs.errors import BrokerAuthError, BulltaskError, ConfigError, nearest
from bulltask.jobs.names import bullmq_name, check_queue_name
from bulltask.queue.overview import SILENT_S, named_connections, workers_of
from bulltask.transport.call import Call, QueueKeys, command
from bulltask.transport.operation import Operation, execute
from bulltask.transport.orders import Order, Reply, post_order, read_replies, withdraw_order
from bulltask.transport.scripts.queue import ClientRow
from bulltask.transport.workers import WorkerState, pid_of_worker, read_workers, registered_queues

if TYPE_CHECKING:
    from bulltask.queue.aio.queue import AsyncQueue
    from bulltask.queue.context import AddOptions, QueueContext
    from bulltask.queue.fields import RateLimit
    from bulltask.queue.sync.queue import Queue
    from bulltask.registry.results import AsyncResult

__all__ = [
    "Answers",
    "ControlBase",
    "Destination",
    "InspectBase",
    "JobIds",
    "Replies",
    "change_rate_limit",
    "check_routing",
    "this_user",
]

Destination = str | Iterable[str] | None
"""Workers' names or ids, patterns of ids (``web-*``), or ids without the process id; ``None`` for all workers."""
JobIds = list[str] | tuple[str, ...] | set[str]
Replies = list[dict[str, Any]] | None
"""The reply of each worker, or ``None`` if they were not waited for."""

POLL_S: Final = 0.025
_DURABLE_MS: Final = 60_000
"""How long an order without a reply waits for its worker."""
_MAX_QUEUES: Final = 10_000
_MAX_WORKERS_PER_CALL: Final = 500


@dataclass(slots=True)
class Answers:
    """The answers to an order.

    Attributes:
        replies: The result of each worker that has executed the order, by its id.
        errors: Why a worker has not executed it.
        withdrawn: Workers that did not take the order in time, or whose supervisor is stopped or hangs. They will not
            execute it.
        unanswered: Workers that have taken the order and not replied. They may have executed it.
        unknown: Given names, or patterns, that match no worker that is alive.
    """

    replies: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    withdrawn: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def answered(self) -> int:
        """How many workers have answered."""
        return len(self.replies) + len(self.errors)

    def results(self) -> dict[str, Any]:
        """Return the answers by worker, with errors as in Celery: ``{"error": "…"}``."""
        return self.replies | {worker: {"error": error} for worker, error in self.errors.items()}


class Conversation:
    """An order on its way: sends it, reads the replies, and withdraws it from the workers that did not take it."""

    def __init__(self, order: Order, timeout_ms: int, destination: Destination) -> None:
        self.answers = Answers()
        self._order = order
        self._raw = order.to_json()
        self._timeout_ms = timeout_ms
        self._ends_ms = mono_ms() + timeout_ms
        self._wanted = (
            [destination] if isinstance(destination, str) else None if destination is None else [*destination]
        )
        self._waits_for: dict[str, QueueKeys] = {}
        self._read: dict[str, int] = {}

    @property
    def waits(self) -> bool:
        """Whether there is a worker that may still reply."""
        return bool(self._waits_for) and mono_ms() < self._ends_ms

    def send(self, queues: Sequence[QueueKeys], now_ms: int, database: int) -> Operation[None]:
        """Send the order to the workers of these queues; those that have stopped writing their state cannot take it.

        Without a destination, an order that concerns a task or a queue goes to the workers that have it, if there are
        any: otherwise, all reply that they do not have it. To consume a queue concerns those that have cancelled it.
        """
        homes: dict[str, QueueKeys] = {}
        concerned: dict[str, QueueKeys] = {}
        for workers in (yield from read_workers(queues, now_ms)):
            for worker_id, state in workers.items():
                if state is not None and state.home:
                    homes[worker_id] = QueueKeys(queues[0].prefix, state.home)
                    if _concerns(self._order, state):
                        concerned[worker_id] = homes[worker_id]
        silent = (yield from _silent_workers(queues[0].prefix, database)) - homes.keys()
        if self._wanted is None:
            homes = concerned or homes
        else:
            matching = {name: [id_ for id_ in (*homes, *silent) if _matches(id_, name)] for name in self._wanted}
            self.answers.unknown = [name for name, ids in matching.items() if not ids]
            chosen = {worker_id for ids in matching.values() for worker_id in ids}
            homes, silent = {worker_id: homes[worker_id] for worker_id in homes if worker_id in chosen}, silent & chosen
        self.answers.withdrawn = sorted(silent)
        self._waits_for = dict(sorted(homes.items()))
        calls = [
            call
            for worker_id, keys in self._waits_for.items()
            for call in post_order(keys, worker_id, self._raw, self._timeout_ms)
        ]
        if calls:
            yield calls

    def read(self) -> Operation[None]:
        """Read the replies that have arrived."""
        homes = {keys.base: keys for keys in self._waits_for.values()}
        starts = [self._read.get(base, 0) for base in homes]
        calls = [read_replies(keys, self._order.id, start) for keys, start in zip(homes.values(), starts, strict=True)]
        found: list[list[Reply | None]] = yield calls
        for base, start, replies in zip(homes, starts, found, strict=True):
            self._read[base] = start + len(replies)
            for reply in replies:
                if reply is not None and self._waits_for.pop(reply.worker, None) is not None:
                    if reply.error:
                        self.answers.errors[reply.worker] = reply.error
                    else:
                        self.answers.replies[reply.worker] = reply.value

    def end(self) -> Operation[Answers]:
        """Withdraw the order from the workers that have not replied, and return the answers."""
        if self._waits_for:
            calls = [withdraw_order(keys, worker_id, self._raw) for worker_id, keys in self._waits_for.items()]
            removed: list[bool] = yield calls
            withdrawn = dict(zip(self._waits_for, removed, strict=True))
            yield from self.read()  # those that have replied meanwhile
            for worker_id in self._waits_for:
                (self.answers.withdrawn if withdrawn[worker_id] else self.answers.unanswered).append(worker_id)
        if self._order.name in {"active", "reserved"}:
            yield from self._add_names()
        return self.answers

    def _add_names(self) -> Operation[None]:
        """Add the names and arguments of jobs: the supervisors do not know them, but Redis does."""
        jobs = [job for value in self.answers.replies.values() for job in value if job["id"]]
        calls: list[Call[list[bytes | None]]] = [
            command("HMGET", f"{job['key']}:{job['id']}", "name", "data") for job in jobs
        ]
        rows: list[list[bytes | None]] = (yield calls) if calls else []
        for job, (name, data) in zip(jobs, rows, strict=True):
            arguments = _decoded(data)
            job["name"] = None if name is None else name.decode(errors="replace")
            job["args"] = arguments if isinstance(arguments, list) else []
            job["kwargs"] = arguments if isinstance(arguments, dict) else {}


def _silent_workers(prefix: str, database: int) -> Operation[set[str]]:
    """Return the workers of bulltask that have been connected for so long that they must have a state."""
    rows: list[ClientRow] = []
    with suppress(BrokerAuthError):  # CLIENT LIST is not permitted
        rows = yield from execute(named_connections(prefix, database))
    connected = workers_of(rows, prefix)
    return {worker.name for worker in connected if pid_of_worker(worker.name) and worker.age_s >= SILENT_S}


def _concerns(order: Order, state: WorkerState) -> bool:
    """Whether a worker has the queue and the task that an order names, as far as its state says."""
    queue, task = order.arguments.get("queue"), order.arguments.get("task_name")
    if order.name == "add_consumer":
        return not state.is_short and queue in state.cancelled
    has_queue = queue is None or state.is_short or queue in state.queues
    return has_queue and (task is None or state.is_short or state.tasks_left_out > 0 or task in state.tasks)


def _matches(worker_id: str, name: str) -> bool:
    """Whether a name is that of a worker: its ``--hostname``, its id, a pattern, or the id without the process id."""
    given = worker_id.rpartition("@")[0] or worker_id
    return name in {worker_id, worker_id.rsplit("-", 2)[0], given} or fnmatchcase(worker_id, name)


class ControlledApp(Protocol):
    """What ``Control`` needs of an app."""

    name: str
    tasks: Any

    @property
    def _config(self) -> Any: ...

    def _queue_context(self, name: str, default_job_options: AddOptions | None) -> QueueContext: ...

    def queue(self, name: str) -> Queue:
        """Return a queue."""

    def aqueue(self, name: str) -> AsyncQueue:
        """Return a queue for asyncio."""

    def AsyncResult(self, job_id: str) -> AsyncResult[Any]:
        """Return a handle for a job whose queue is not known."""


class _Named:
    """Says what to use instead of Celery's other methods."""

    _place: ClassVar[str]
    _instead: ClassVar[Mapping[str, str]]

    if not TYPE_CHECKING:  # type checkers would accept any name

        def __getattr__(self, name: str) -> object:
            known = [known for known in dir(type(self)) if not known.startswith("_")]
            match = nearest(name, known)
            hint = self._instead.get(name) or (f"did you mean {match}()?" if match else f"it has {', '.join(known)}")
            raise AttributeError(f"{self._place} has no {name!r}: {hint}", name=name, obj=self)


class ControlBase(_Named):
    """What ``Control`` and ``AsyncControl`` share.

    Args:
        app: The app, whose server, prefix and queues are used.
    """

    _place = "app.control"
    _instead: ClassVar[Mapping[str, str]] = {
        "election": "workers need no leader",
        "heartbeat": "workers write their state every few seconds",
        **dict.fromkeys(
            ("cancel_tasks_by_headers", "revoke_by_stamped_headers", "terminate_by_stamped_headers"),
            "revoke jobs by their ids, revoke([id, …])",
        ),
        **dict.fromkeys(("disable_events", "enable_events"), "events are always on; app.events(queue) reads them"),
    }

    def __init__(self, app: ControlledApp) -> None:
        self._app = app

    @property
    def _context(self) -> QueueContext:
        return self._app._queue_context(self._app._config.default_queue, None)  # noqa: SLF001 - its app's

    def _conversation(
        self, name: str, arguments: Mapping[str, Any], destination: Destination, timeout: Duration | None
    ) -> Operation[Conversation]:
        """Send an order; without a timeout, it is not waited for, and stays in Redis until its worker takes it."""
        timeout_ms = _DURABLE_MS if timeout is None else to_ms(timeout, "timeout")
        context = self._context
        order = Order(
            id=uuid4().hex,
            name=name,
            arguments={key: value for key, value in arguments.items() if value is not None},
            sender=this_user(),
            app=self._app.name,
            expires_ms=context.now_ms() + timeout_ms,
        )
        conversation = Conversation(order, timeout_ms, destination)
        queues = yield from self._known_queues(context)
        yield from conversation.send(queues, context.now_ms(), context.broker.endpoint.url.database)
        return conversation

    def _own_queues(self) -> list[str]:
        """Return the queues of the app: the default one, and those of its tasks."""
        return list(dict.fromkeys([self._app._config.default_queue, *self._app.tasks.queues]))

    def _known_queues(self, context: QueueContext) -> Operation[list[QueueKeys]]:
        """Return the queues in the registry and those of the app, in which workers may be found."""
        config = context.broker.config
        with_tag = [bullmq_name(queue, hash_tag=config.queue_hash_tag) for queue in self._own_queues()]
        names = yield from registered_queues(config.prefix, _MAX_QUEUES)
        return [QueueKeys(config.prefix, name) for name in sorted({*with_tag, *names})]


class InspectBase(_Named):
    """What ``Inspect`` and ``AsyncInspect`` share."""

    _place = "app.control.inspect()"
    _instead: ClassVar[Mapping[str, str]] = {
        "clock": "workers need no logical clock",
        "hello": "workers do not talk to each other",
        "memdump": "kill -USR1 logs what a worker is doing; use memray for its memory",
        "memsample": "kill -USR1 logs what a worker is doing; use memray for its memory",
        "objgraph": "use memray for a worker's memory",
        "query_task": "app.queue(name).get_job(id) reads a job",
        "report": "use stats() and conf()",
        "revoked": "a revoked job has failed: app.queue(name).get_failed()",
        "scheduled": "delayed jobs are in Redis, not in workers: app.queue(name).get_delayed()",
    }


def _decoded(data: bytes | None) -> object:
    try:
        return None if data is None else codec.decode(data, what="data of a job")
    except BulltaskError:
        return None


def check_routing(
    queue: str,
    exchange: str | None,
    exchange_type: str | None,
    routing_key: str | None,
    options: Mapping[str, Any] | None,
) -> None:
    """Raise ``ConfigError`` if arguments of Celery's ``add_consumer`` route jobs otherwise than by a queue's name."""
    check_queue_name(queue)
    given = {"exchange": exchange, "exchange_type": exchange_type, "routing_key": routing_key, "options": options}
    allowed = {"exchange": queue, "exchange_type": "direct", "routing_key": queue}
    if other := [name for name, value in given.items() if value and value != allowed.get(name)]:
        raise ConfigError(
            f"add_consumer({queue!r:.200}) cannot use {', '.join(other)}: Redis has no exchanges or routing keys, so "
            "jobs are sent to a queue by its name; name only the queue"
        )


def this_user() -> str:
    """Return ``user@host``, with which orders and pauses are signed."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a user without a name, as in some containers
        name = "unknown"
    return f"{name}@{socket.gethostname()}"


def change_rate_limit(queue: Queue, limit: RateLimit | None) -> None:
    """Set or remove the global rate limit; if it changes, the period of the one before ends, which may last for hours.

    The methods of queues change only the limit, as in BullMQ.
    """
    before = queue.get_global_rate_limit()
    if limit is None:
        queue.remove_global_rate_limit()
    else:
        queue.set_global_rate_limit(limit.max, limit.duration)
    if before not in {None, limit}:
        queue.remove_rate_limit_key()
