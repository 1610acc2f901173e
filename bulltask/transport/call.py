"""A call to Redis as a value (:class:`Call`), the clients that make calls, and the names of all keys in Redis.

Every script has one function in ``transport/scripts`` that builds its call, with the parser of its reply; the sync and
the asyncio clients only send calls, so BullMQ's protocol is implemented once.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Generic, Protocol, TypeVar

import hiredis
import msgpack

from bulltask.jobs.clock import value_class
from bulltask.jobs.codec import ON_SURROGATE
from bulltask.jobs.errors import (
    BrokerError,
    BulltaskError,
    EncodeError,
    FailedChildrenError,
    JobError,
    JobNotFoundError,
    JobStateError,
    LockMismatchError,
    LockMissingError,
    ParentConflictError,
    ParentNotFoundError,
    PendingChildrenError,
    SchedulerBusyError,
    SchedulerCollisionError,
    SchedulerJobError,
)
from bulltask.lua import wrappers
from bulltask.lua.loader import Script

__all__ = [
    "AllNodesCall",
    "AnyAsyncClient",
    "Arg",
    "BullKeys",
    "Call",
    "Fetched",
    "FetchedJob",
    "NoJob",
    "OptionalCall",
    "PackedCall",
    "QueueKeys",
    "SyncClient",
    "as_is",
    "beat_queues",
    "by_name",
    "command",
    "dashboard_audit",
    "error_parser",
    "guard_key",
    "is_wait_for_replicas",
    "known_queues",
    "named_keys",
    "nothing",
    "packed_chunks",
    "packed_with_sources",
    "parse_fetched",
    "queue_consumers",
    "raise_for",
    "result_parser",
    "saved_group",
    "schedule_versions",
    "script_call",
    "text",
    "texts",
    "texts_by_name",
    "to_msgpack",
]


# hiredis's type stub declares wrong types for the arguments and the result.
_hiredis_pack: Callable[[tuple[Arg, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]

_LARGEST: Final = sys.float_info.max
_CACHED_KEYS: Final = 11
"""How many of a script's first keys are cached in packed form; ``moveToFinished``'s twelfth key contains a job id."""

_KEY_POSITION: Final = 4
"""``EVALSHA``, the script's hash, the number of keys, and the first key; of a plain command, some of its arguments."""

_FIRST_CHUNK_BYTES: Final = 8_192
"""A few jobs, so that Redis starts early; each chunk is twice as long as the one before."""
_CHUNK_BYTES: Final = 65_536
"""About a hundred small jobs; smaller chunks need more system calls."""

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Arg = bytes | str | int | float


def as_is(reply: Any) -> Any:
    """Return the reply unchanged: the default parser."""
    return reply


@value_class
class Call(Generic[R_co]):
    """One command or script call.

    Attributes:
        args: A command and its arguments; for a script what follows its hash (key count, keys, arguments).
        parse_reply: Converts the raw reply to the result, or raises the error for a negative error code.
        script: The script to run, ``None`` for a plain command.
        cached: Number of trailing arguments of a plain command that many calls have in common; they are cached in
            packed form.
    """

    args: tuple[Arg, ...]
    parse_reply: Callable[[Any], R_co]
    script: Script | None = None
    cached: int = 0

    @property
    def keys(self) -> tuple[Arg, ...]:
        """The keys of a script call (``KEYS``)."""
        assert self.script is not None
        return self.args[1 : self.script.key_count + 1]

    @property
    def argv(self) -> tuple[Arg, ...]:
        """The arguments of a script call (``ARGV``)."""
        assert self.script is not None
        return self.args[self.script.key_count + 1 :]

    def packed(self) -> bytes:
        """Return the bytes to send: ``EVALSHA``, or the plain command."""
        if self.script is None:
            if not self.cached:
                return _pack(self.args)
            first = len(self.args) - self.cached
            uncached, cached = _pack_without_count(self.args[:first]), _pack_cached(self.args[first:])
            return b"*%d\r\n%b%b" % (len(self.args), uncached, cached)
        first = min(self.script.key_count, _CACHED_KEYS) + 1
        cached = _pack_cached((self.script.by_sha, self.script.sha, *self.args[:first]))
        return b"*%d\r\n%b%b" % (len(self.args) + 2, cached, _pack_without_count(self.args[first:]))

    @property
    def known_sha(self) -> str | None:
        """The hash of the script, if :meth:`packed_with_source` knows its source; ``None`` for a plain command."""
        return None if self.script is None else self.script.sha

    def packed_with_source(self) -> bytes:
        """Return the bytes to send when the server does not have the script: ``EVAL`` runs and caches it."""
        assert self.script is not None
        return _pack((self.script.by_source, self.script.source, *self.args))


class AllNodesCall(Call[R]):
    """A call without keys, made on every node of a cluster that has slots; ``merge`` combines their results."""

    __slots__ = ("merge",)

    def __init__(self, call: Call[R], merge: Callable[[list[R]], R]) -> None:
        super().__init__(call.args, call.parse_reply)
        self.merge = merge


class OptionalCall(Call[R]):
    """A call whose error reply is ignored: its result is then ``None``. Only for a single server."""

    __slots__ = ()


class PackedCall(Call[Any]):
    """A call that another process has packed: of a script, or of a command whose first argument is its key.

    Its result is the raw reply. ``args`` are those up to the first key, by which the call is routed in a cluster.
    """

    __slots__ = ("_packed", "_parts")

    def __init__(self, packed: bytes) -> None:
        reader = hiredis.Reader()
        reader.feed(packed)  # a call has the form of a reply: an array of strings
        self._parts: list[bytes] = reader.gets()
        first = (part.decode("utf-8", ON_SURROGATE) for part in self._parts[:_KEY_POSITION])
        super().__init__(tuple(first), as_is)
        self._packed = packed

    @property
    def known_sha(self) -> str | None:
        """The hash of the script, if it is one of :func:`bulltask.lua.wrappers.outcome_scripts`."""
        sha = str(self.args[1])
        return sha if sha in wrappers.outcome_scripts() else None

    def packed(self) -> bytes:
        """Return the bytes to send."""
        return self._packed

    def packed_with_source(self) -> bytes:
        """Return the same bytes with ``EVAL`` and the script's source in place of ``EVALSHA`` and its hash."""
        script = wrappers.outcome_scripts()[str(self.args[1])]
        return _pack((script.by_source, script.source, *self._parts[2:]))


def _pack(args: tuple[Arg, ...]) -> bytes:
    return b"*%d\r\n%b" % (len(args), _pack_without_count(args))


def _pack_without_count(args: tuple[Arg, ...]) -> bytes:
    try:
        packed = _hiredis_pack(args)
    except UnicodeEncodeError:
        # An id from another client may not be UTF-8, so it is sent as it was received (see text()).
        packed = _hiredis_pack(
            tuple(arg.encode("utf-8", ON_SURROGATE) if isinstance(arg, str) else arg for arg in args)
        )
    return packed.partition(b"\r\n")[2]


# Half of a script call's arguments are the same in all calls for a queue. Packing them for each call would take 3 to 5%
# of a send's instructions, and 4% of a job's.
_pack_cached = lru_cache(maxsize=500)(_pack_without_count)


def packed_with_sources(calls: Sequence[Call[Any]]) -> list[bytes]:
    """Return the bytes to send when the server does not have the calls' scripts; each script's source is sent once.

    Later calls of a script find it loaded by the first one. Another ``SCRIPT FLUSH`` may come in between, but every
    round trip executes at least the calls that contain the source. Plain commands are sent unchanged.
    """
    seen: set[str | None] = {None}
    packed = []
    for call in calls:
        packed.append(call.packed() if call.known_sha in seen else call.packed_with_source())
        seen.add(call.known_sha)
    return packed


def packed_chunks(calls: Iterable[Call[Any]]) -> Iterator[tuple[list[Call[Any]], list[bytes]]]:
    """Pack calls while ``calls`` builds them; yield them with their bytes, in parts that are worth a system call."""
    chunk: list[Call[Any]] = []
    packed: list[bytes] = []
    size, enough = 0, _FIRST_CHUNK_BYTES
    for call in calls:
        chunk.append(call)
        packed.append(call.packed())
        size += len(packed[-1])
        if size >= enough:
            yield chunk, packed
            chunk, packed, size, enough = [], [], 0, min(2 * enough, _CHUNK_BYTES)
    if chunk:
        yield chunk, packed


def is_wait_for_replicas(call: Call[Any]) -> bool:
    """Return whether the call is a ``WAIT``, which covers what its connection has written before it."""
    return call.args[0] == "WAIT"


def command(*args: Arg, parse_reply: Callable[[Any], R] = as_is) -> Call[R]:
    """Build the call for a plain command."""
    return Call(args, parse_reply)


def script_call(
    script: Script, keys: tuple[Arg, ...], args: tuple[Arg, ...], parse_reply: Callable[[Any], R] = as_is
) -> Call[R]:
    """Build the call for a script; raises ``TypeError`` unless it has as many keys as the script's file name says."""
    if len(keys) != script.key_count:
        raise TypeError(f"script {script.name} takes {script.key_count} keys, not {len(keys)}")
    return Call((script.key_count, *keys, *args), parse_reply, script)


def to_msgpack(value: object) -> bytes:
    """Return ``value`` as MessagePack for BullMQ's scripts; it may contain any value that another client has stored.

    Integers of more than 64 bits become floats, as in Node. Bytes become strings, because Redis cannot read
    MessagePack's type for bytes. Raises ``EncodeError`` if the value is nested too deeply.
    """
    try:
        packed: bytes = msgpack.packb(value, default=_as_float, unicode_errors=ON_SURROGATE, use_bin_type=False)
    except (ValueError, TypeError, OverflowError, RecursionError) as exc:
        raise EncodeError(f"options cannot be packed for Redis: {exc}") from exc
    return packed


def _as_float(value: object) -> float:
    if not isinstance(value, int):
        raise TypeError(f"a value of type {type(value).__name__}")
    return float(max(-_LARGEST, min(value, _LARGEST)))


T = TypeVar("T")


class SyncClient(Protocol):
    """:class:`~bulltask.transport.client.Client` or :class:`~bulltask.transport.cluster.ClusterClient`.

    The latter sends every call to the node that has its keys. An error of one node affects only the calls to that node.
    """

    @property
    def safe_url(self) -> str:
        """The server's URL without its password."""

    @property
    def database(self) -> int:
        """The number of the database."""

    def set_deadline(self, deadline_ms: int | None) -> None:
        """Limit all calls, and connecting, to ``deadline_ms`` (``mono_ms``); ``None``: the endpoint's timeouts."""

    def connect(self) -> None:
        """Connect now instead of on the first call, which sets the clock; raises the errors of :meth:`run`."""

    def run(self, call: Call[R]) -> R:
        """Make one call.

        Raises:
            BrokerError: The server could not be reached or returned an error reply. After ``BrokerUnavailableError`` it
                is unknown whether the call was executed.
            JobError: The script returned an error code.
        """

    def run_many(self, calls: Iterable[Call[Any]]) -> list[Any]:
        """Make several calls in one round trip (to each node), and return their results in order.

        If ``calls`` is an iterator, a single server executes the first calls while it builds the next. The first call
        that failed raises the errors of :meth:`run`; the others were made, too, unless their node is unreachable.
        """

    def run_on_all_nodes(self, call: Call[R]) -> list[R]:
        """Make a call without keys on every server that has keys, and return all results; raises the first error."""

    def try_many(self, calls: Sequence[Call[Any]], packed: Sequence[bytes] | None = None) -> list[Any]:
        """Make independent calls, perhaps already packed (:meth:`pack`); the result of a failed call is its error.

        Raises ``BrokerUnavailableError`` if the connection broke; it is unknown which calls were executed. In a
        cluster, it is raised only if no node replies: otherwise, it is the result of the calls for the node, whose name
        it contains.
        """

    def start_many(self, calls: Sequence[Call[Any]], packed: Sequence[bytes]) -> Callable[[], list[Any]]:
        """Send independent calls, as :meth:`try_many` does, without waiting for their replies if possible.

        Return a function that waits for the replies and returns the results, or raises, as :meth:`try_many` does. Other
        calls may be made meanwhile: they read these replies first.
        """

    def pack(self, call: Call[Any]) -> bytes:
        """Return the bytes that :meth:`send_packed` sends for a call."""

    def send_packed(self, packed: Sequence[bytes]) -> list[Any]:
        """Make calls that another process has packed, in one round trip; return the raw replies, or errors."""

    def wait(self, call: Call[R], wait_ms: int, ping: Callable[[], object]) -> R:
        """Make a call that blocks for up to ``wait_ms``, which is also its timeout, to the millisecond.

        Redis checks the timeouts of blocked clients only ten times a second, and whenever it receives a command:
        therefore, ``ping`` sends one to the same server on another connection.
        """

    def wait_then(
        self, call: Call[R], then: Call[T], wait_ms: int, ping: Callable[[], object]
    ) -> tuple[R, T | BulltaskError]:
        """Make a call that blocks, as :meth:`wait` does, and one after it, which Redis runs as soon as the first ends.

        Both replies arrive together, so this process wakes up once. If the second call fails, its result is the error.
        The keys of both calls are in the same slot.
        """

    def dry_run(self, calls: Sequence[Call[Any]]) -> list[Any] | None:
        """Queue calls in a transaction and discard it; the replies show which calls Redis would reject.

        Returns ``None`` if the server rejects transactions. Raises the errors of :meth:`run` if the connection breaks.
        """

    def close(self) -> None:
        """Close all connections. A later call opens new ones."""

    def close_if_dead(self) -> None:
        """Close connections that the server has closed (a restart, an idle timeout); the next call opens new ones."""

    def interrupt(self) -> None:
        """Abort the call that another thread is waiting for; it raises ``BrokerUnavailableError`` immediately."""


class AnyAsyncClient(Protocol):
    """:class:`~bulltask.transport.async_client.AsyncClient`, or that of a cluster; any number of tasks share it."""

    async def run(self, call: Call[R]) -> R:
        """Make one call; raises the same errors as :meth:`SyncClient.run`."""

    async def run_many(self, calls: Sequence[Call[Any]], deadline_ms: int | None = None) -> list[Any]:
        """Make several calls in one round trip (to each node), until ``deadline_ms``; errors as in ``SyncClient``."""

    async def try_many(self, calls: Sequence[Call[Any]], deadline_ms: int | None = None) -> list[Any]:
        """:meth:`run_many` for independent calls; the result of a failed call is its error."""

    async def connect(self, deadline_ms: int | None = None) -> None:
        """Connect now instead of on the first call; ``deadline_ms`` as in :meth:`run_many`."""

    async def close(self) -> None:
        """Close the connections. Calls that are waiting fail with ``BrokerUnavailableError``."""


_BULLTASK_ROOT: Final = "bulltask"


def beat_queues(prefix: str, app: str) -> str:
    """Return the key of a set: the queues in which an app's ``beat_schedule`` has created job schedulers."""
    return f"{_BULLTASK_ROOT}:beat:{prefix}:{app}"


def schedule_versions(prefix: str, app: str) -> str:
    """Return the key of a hash: the workers of an app, and the version of its schedule that each of them runs."""
    return f"{_BULLTASK_ROOT}:schedule-versions:{prefix}:{app}"


def queue_consumers(prefix: str, app: str) -> str:
    """Return the key of a hash: the workers of an app with their queues, and when each queue last had a worker."""
    return f"{_BULLTASK_ROOT}:queue-consumers:{prefix}:{app}"


def known_queues(prefix: str) -> str:
    """Return the key of a sorted set: the queues that workers and senders use, by when they were last used."""
    return f"{_BULLTASK_ROOT}:queues" if prefix == "bull" else f"{_BULLTASK_ROOT}:{prefix}:queues"


def dashboard_audit(prefix: str, *, refused: bool) -> str:
    """Return the key of a stream: what was done with the dashboard, or what it has refused."""
    root = _BULLTASK_ROOT if prefix == "bull" else f"{_BULLTASK_ROOT}:{prefix}"
    return f"{root}:dashboard-{'refused' if refused else 'audit'}"


def saved_group(prefix: str, group_id: str) -> str:
    """Return the key of a saved group result: the addresses of its members."""
    return f"{_BULLTASK_ROOT}:group:{prefix}:{group_id}"


def guard_key(key: str) -> str | None:
    """Return a key in the same slot of a Redis Cluster that never exists; ``None`` if ``key`` has no hash tag.

    It starts as ``key`` does, so that a user who may access ``key`` may access it, too.
    """
    start = key.find("{")
    end = key.find("}", start + 1)
    if start < 0 or end <= start + 1:
        return None
    colon = key.find(":", end)
    return f"{key if colon < 0 else key[:colon]}::guard"  # no job has an id that starts with a colon


class QueueKeys:
    """The keys of one queue; ``name`` is its name in BullMQ, with the hash tag, and ``queue`` that in the app."""

    __slots__ = tuple(
        (
            "active base bulltask_base completed delayed events failed id incompatible limiter lock_expiries "
            "marked_stalled marker meta metrics_completed metrics_failed name pause_note paused paused_schedulers pc "
            "prefix prioritized probe queue repeat replicated revoked schedulers_checked stalled stalled_check "
            "temporary wait waiting_children workers"
        ).split()
    )

    def __init__(self, prefix: str, name: str, queue: str = "") -> None:
        self.prefix = prefix
        self.name = name
        self.queue = queue or name
        self.base = base = f"{prefix}:{name}:"
        self.wait = f"{base}wait"
        self.paused = f"{base}paused"
        self.active = f"{base}active"
        self.prioritized = f"{base}prioritized"
        self.pc = f"{base}pc"
        self.delayed = f"{base}delayed"
        self.waiting_children = f"{base}waiting-children"
        self.completed = f"{base}completed"
        self.failed = f"{base}failed"
        self.stalled = f"{base}stalled"
        self.stalled_check = f"{base}stalled-check"
        self.limiter = f"{base}limiter"
        self.marker = f"{base}marker"
        self.meta = f"{base}meta"
        self.events = f"{base}events"
        self.id = f"{base}id"
        self.repeat = f"{base}repeat"
        self.metrics_completed = f"{base}metrics:completed"
        self.metrics_failed = f"{base}metrics:failed"
        # bulltask's keys do not start with BullMQ's prefix, because BullMQ's `removeOrphanedJobs` deletes
        # unknown keys with it.
        self.bulltask_base = f"{_BULLTASK_ROOT}:{name}:" if prefix == "bull" else f"{_BULLTASK_ROOT}:{prefix}:{name}:"
        self.revoked = f"{self.bulltask_base}revoked"
        self.incompatible = f"{self.bulltask_base}incompatible"  # ids of waiting jobs, by when they are due
        self.lock_expiries = f"{self.bulltask_base}lock-expiries"  # when locks expire, by job id
        self.probe = f"{self.bulltask_base}probe"  # never exists
        self.replicated = f"{self.bulltask_base}replicated"  # exists for a millisecond
        self.schedulers_checked = f"{self.bulltask_base}schedulers-checked"  # exists until the next check is due
        self.marked_stalled = f"{self.bulltask_base}marked-stalled"
        self.pause_note = f"{self.bulltask_base}pause-note"  # who has paused the queue
        self.paused_schedulers = f"{self.bulltask_base}paused-schedulers"  # ids, by the next time that each had
        self.workers = f"{self.bulltask_base}workers"  # ids of workers, by when their states expire
        # These exist only while a script runs.
        self.temporary = tuple(f"{self.bulltask_base}temporary{number}" for number in range(3))

    def job(self, job_id: str) -> str:
        """The job's hash."""
        return self.base + job_id

    def logs(self, job_id: str) -> str:
        """The job's log lines."""
        return f"{self.base}{job_id}:logs"

    def lock(self, job_id: str) -> str:
        """The job's lock."""
        return f"{self.base}{job_id}:lock"

    def dependencies(self, job_id: str) -> str:
        """Full keys of the job's pending child jobs."""
        return f"{self.base}{job_id}:dependencies"

    def processed(self, job_id: str) -> str:
        """Return values of the job's completed child jobs, by their full key."""
        return f"{self.base}{job_id}:processed"

    def ignored(self, job_id: str) -> str:
        """Failure reasons for the job's failed child jobs whose failure is ignored, by their full key."""
        return f"{self.base}{job_id}:failed"

    def unsuccessful(self, job_id: str) -> str:
        """Full keys of the job's failed child jobs whose failure fails the job."""
        return f"{self.base}{job_id}:unsuccessful"

    def scheduler(self, scheduler_id: str) -> str:
        """A job scheduler: its rule and its template."""
        return f"{self.repeat}:{scheduler_id}"

    def paused_scheduler(self, scheduler_id: str) -> str:
        """A job scheduler that bulltask has paused: the same fields, and those of the pause (bulltask's own hash)."""
        return f"{self.paused_schedulers}:{scheduler_id}"

    def deduplication(self, dedup_id: str) -> str:
        """The id of the job that owns a deduplication id."""
        return f"{self.base}de:{dedup_id}"

    def deferred(self, dedup_id: str) -> str:
        """The duplicate that BullMQ 5.72 and newer defer until the owner of a deduplication id has finished."""
        return f"{self.base}dn:{dedup_id}"

    @property
    def deprecated_priority(self) -> str:
        """A key that BullMQ 3 had in addition to ``wait``."""
        return f"{self.base}priority"

    @property
    def task_rates(self) -> str:
        """The rate limits of tasks, and the workers that have stored them (bulltask's own hash, which expires)."""
        return f"{self.bulltask_base}task-rates"

    def next_start(self, task: str) -> str:
        """When the next job of a task with a rate limit may start (bulltask's own key, which expires)."""
        return f"{self.bulltask_base}next-start:{task}"

    def throttled(self, task: str) -> str:
        """Ids of a task's jobs that its rate limit delays, in their order (bulltask's own set, which expires)."""
        return f"{self.bulltask_base}throttled:{task}"

    def added_ids(self, write_id: str) -> str:
        """Ids of the jobs that a DataFrame write or an outbox has added (bulltask's own set, which expires)."""
        return f"{self.bulltask_base}added:{write_id}"

    def worker(self, worker_id: str) -> str:
        """A worker's state (bulltask's own key, which expires)."""
        return f"{self.bulltask_base}worker:{worker_id}"

    def orders(self, worker_id: str) -> str:
        """Orders to a worker whose home queue this is (bulltask's own list, which expires)."""
        return f"{self.bulltask_base}worker:{worker_id}:orders"

    def replies(self, order_id: str) -> str:
        """Replies of the workers to an order (bulltask's own list, which expires)."""
        return f"{self.bulltask_base}reply:{order_id}"

    def client_name(self, worker: str = "") -> str:
        """The connection name that identifies a worker to Node's ``getWorkers()`` and to dashboards."""
        encoded = base64.b64encode(self.name.encode()).decode()
        return f"{self.prefix}:{encoded}:w:{worker}" if worker else f"{self.prefix}:{encoded}"

    def __repr__(self) -> str:
        return f"<QueueKeys {self.base}>"


@lru_cache(maxsize=2_000)
def named_keys(keys: QueueKeys, names: str) -> tuple[str, ...]:
    """Return several keys of a queue, in a script's order: ``named_keys(keys, "wait active")``."""
    return tuple(getattr(keys, name) for name in names.split())


class BullKeys(QueueKeys):
    """A queue's keys in Bull 1 to 4, BullMQ's predecessor; most names are BullMQ's, but the layout differs."""

    __slots__ = ("limiter_index", "meta_paused", "priority")

    def __init__(self, prefix: str, name: str) -> None:
        super().__init__(prefix, name)
        self.meta_paused = f"{self.base}meta-paused"
        self.priority = f"{self.base}priority"
        self.limiter_index = f"{self.base}limiter:index"


JOB_ERRORS: Final[Mapping[int, type[JobError]]] = {
    -1: JobNotFoundError,
    -2: LockMissingError,
    -3: JobStateError,
    -4: PendingChildrenError,
    -5: ParentNotFoundError,
    -6: LockMismatchError,
    -7: ParentConflictError,
    -8: SchedulerJobError,
    -9: FailedChildrenError,
    -10: SchedulerCollisionError,
    -11: SchedulerBusyError,
}


@value_class
class FetchedJob:
    """The job that a fetch has acquired.

    Attributes:
        job_id: The job's id.
        fields: The job's hash as a flat list of names and values.
    """

    job_id: str
    fields: Sequence[bytes]


@value_class
class NoJob:
    """The reply to a fetch from a queue that has no job now.

    Attributes:
        limited_ms: Time until the queue's rate limit ends.
        due_ms: When the next delayed job is due (server time); 0 if there is none.
    """

    limited_ms: int = 0
    due_ms: int = 0


Fetched = FetchedJob | NoJob
NO_JOB: Final = NoJob()


def parse_fetched(reply: Any) -> Fetched:
    """Parse the four-element reply from ``moveToActive``, or from ``moveToFinished`` when it fetches the next job.

    Raises ``ValueError`` or ``TypeError`` if it is not such a reply.
    """
    if not isinstance(reply, list):
        return NO_JOB
    fields, job_id, limited_ms, due_ms = reply
    if fields:
        is_hash = isinstance(fields, list) and not len(fields) % 2 and set(map(type, fields)) == {bytes}
        if not is_hash or not isinstance(job_id, bytes | int):
            raise ValueError(f"not a job: {reply!r:.100}")
        return FetchedJob(text(job_id), fields)
    if limited_ms or due_ms:
        return NoJob(max(0, int(limited_ms)), max(0, int(float(due_ms))))
    return NO_JOB


def raise_for(reply: Any, job_id: str, queue: str) -> None:
    """Raise the error for a negative code, or ``BrokerError`` if it is unknown; raises nothing for other replies."""
    if isinstance(reply, int) and reply < 0:
        kind = JOB_ERRORS.get(reply)
        if kind is None:
            raise BrokerError(f"a script returned the unknown code {reply} for job {job_id} in queue {queue}")
        raise kind(job_id, queue)


def nothing(_: Any) -> None:
    """Ignore the reply: the parser of calls without a result."""


def result_parser(keys: QueueKeys, job_id: str, convert: Callable[[Any], R]) -> Callable[[Any], R]:
    """Return the parser for scripts that return an error code, or what ``convert`` converts to the result."""

    def parse_reply(reply: Any) -> R:
        raise_for(reply, job_id, keys.name)
        return convert(reply)

    return parse_reply


def error_parser(keys: QueueKeys, job_id: str) -> Callable[[Any], None]:
    """Return the parser for scripts that return only an error code."""
    return result_parser(keys, job_id, nothing)


def text(raw: bytes | str | int) -> str:
    """Return an id as text; scripts return bulk strings, or numbers for ids that are numbers."""
    return raw.decode("utf-8", "surrogateescape") if isinstance(raw, bytes) else str(raw)


def by_name(reply: Any) -> dict[str, bytes]:
    """Return the fields of a hash, which a reply in RESP2 lists one after another: name, value, name, value …"""
    return {text(name): value for name, value in zip(reply[::2], reply[1::2], strict=True)}


def texts_by_name(reply: Any) -> dict[str, str]:
    """Return the fields of a hash, or the members of a sorted set with their scores, as text."""
    return {name: text(value) for name, value in by_name(reply).items()}


def info_by_name(reply: Any) -> dict[str, str]:
    """Return the fields of ``INFO``."""
    return dict(line.partition(":")[::2] for line in text(reply).splitlines() if ":" in line)


def texts(reply: Any) -> list[str]:
    """Return several ids, each converted by :func:`text`; a script may return nil instead of an empty list."""
    return [text(item) for item in reply or ()]
