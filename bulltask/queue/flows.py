"""Flows, trees of jobs: what ``FlowProducer`` and ``AsyncFlowProducer`` do except I/O.

A flow is built from the tree that the user wrote, added as a whole and exactly once, and read level by level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypedDict, TypeVar, Unpack, cast

from bulltask.config.config import Config
from bulltask.config.urls import SecretUrl, secret_url
from bulltask.jobs import codec
from bulltask.jobs.backoff import reconnect_delay_ms
from bulltask.jobs.codec import Json, int_field
from bulltask.jobs.errors import (
    BrokerError,
    BulltaskError,
    ConfigError,
    InvalidNameError,
    JobError,
    ParentConflictError,
    ParentNotFoundError,
)
from bulltask.jobs.failure_reasons import plain_reason
from bulltask.jobs.job import FAILURE_FLAGS, NewJob, ParentLike, PlannedJob, in_order, link_to_parent, stored_options
from bulltask.jobs.names import FAN_OUT, address_of, bullmq_name, check_queue_name, check_reference, name_in_app
from bulltask.jobs.stored_job import StoredJob
from bulltask.queue.context import AddOptions, QueueContext, build_job
from bulltask.queue.fields import JobFields, sent_job
from bulltask.registry.canvas import Signature, is_call
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call, QueueKeys, command, text
from bulltask.transport.cluster import check_one_slot
from bulltask.transport.operation import Operation, execute, transaction
from bulltask.transport.produce import PROTOCOL_VERSION, wait_for_replicas
from bulltask.transport.scripts.add import add_job, write_queue_meta
from bulltask.transport.scripts.flow import (
    KINDS,
    ExistingJob,
    add_dependency,
    children,
    existing_job,
    get_dependency_counts,
    key_exists,
    was_added,
)
from bulltask.transport.scripts.job import job_fields, read_job

__all__ = [
    "ChildOptions",
    "FlowBase",
    "FlowJob",
    "FlowNode",
    "Workflow",
    "WorkflowJob",
    "add_flow_once",
    "plan",
    "read_workflow",
]


T = TypeVar("T")

_NO_OPTIONS: Final[AddOptions] = {}


class ChildOptions(TypedDict, total=False):
    """How a job's failure affects its parent; at most one of these options.

    Without any of them, the parent waits until the child is retried and completes.

    Attributes:
        fail_parent_on_failure: The parent fails immediately. If the parent itself has this option, its own parent
            fails, too.
        continue_parent_on_failure: The parent runs immediately; ``get_failed_children`` returns the reason.
        ignore_dependency_on_failure: The parent runs after its other child jobs; ``get_failed_children`` returns the
            reason.
        remove_dependency_on_failure: The parent runs after its other child jobs; the failure is not recorded in it.
    """

    fail_parent_on_failure: bool
    continue_parent_on_failure: bool
    ignore_dependency_on_failure: bool
    remove_dependency_on_failure: bool


@dataclass(frozen=True, slots=True)
class FlowJob:
    """A job in a flow, and the child jobs it waits for.

    Attributes:
        name: The job's name; a bulltask worker runs the task with that name.
        queue: Its queue; a flow's jobs may be in different queues.
        data: Plain JSON (default: ``{}``, as in Node).
        options: As for ``Queue.add``, see :class:`bulltask.queue.context.AddOptions`. A child may also have
            :class:`ChildOptions`.
        children: Jobs or task calls (``add.s(1, 2)``).
        call: A task call, instead of name, queue, data and options; set by :meth:`of`.
    """

    name: str
    queue: str
    data: Json = field(default_factory=dict)
    options: AddOptions = field(default_factory=AddOptions)
    children: Sequence[FlowJob | Signature[Any, Any]] = ()
    call: Signature[Any, Any] | None = None

    @classmethod
    def of(
        cls,
        call: Signature[Any, Any],
        children: Sequence[FlowJob | Signature[Any, Any]] = (),
        **failure: Unpack[ChildOptions],
    ) -> FlowJob:
        """Create a job from a task call, with the task's queue and options.

        ::

            FlowJob.of(total.s(), [price.s("a"), FlowJob.of(price.s("b"), ignore_dependency_on_failure=True)])

        Args:
            call: The call.
            children: Jobs or calls that it waits for.
            failure: How its failure affects its parent.
        """
        return cls(call.task.name, "", {}, cast("AddOptions", failure), children, call)


@dataclass(frozen=True, slots=True)
class FlowNode(Generic[T]):
    """A job in a flow that was added or read, and its child jobs."""

    job: T
    children: tuple[FlowNode[T], ...] = ()

    def walk(self) -> Iterator[FlowNode[T]]:
        """Iterate over this node and all nodes below it, parents before their children."""
        todo = [self]
        while todo:
            node = todo.pop()
            yield node
            todo += reversed(node.children)


def plan(
    flows: Sequence[FlowJob | Signature[Any, Any]],
    parent: ParentLike | None,
    defaults: Mapping[str, AddOptions],
    config: Config,
) -> list[PlannedJob]:
    """Check flows and return the jobs that will be sent, without sending them.

    The roots of the trees may have a ``parent``; ``defaults`` are options by queue, for jobs that do not set them.

    Raises:
        TypeError: A node is neither a ``FlowJob`` nor a call, or an option is unknown.
        ConfigError: A job in a flow has two parents, or another option is invalid.
    """
    roots: list[PlannedJob] = []
    todo: list[tuple[FlowJob | Signature[Any, Any], PlannedJob | None]] = [(flow, None) for flow in flows]
    for item, above in todo:  # the loop appends to todo; no recursion, as the tree may exceed Python's recursion limit
        node = FlowJob.of(item) if is_call(item) else item
        if not isinstance(node, FlowJob):
            raise TypeError(f"a flow consists of FlowJobs and calls such as task.s(…), not {node!r:.200}")
        waits = parent if above is None else {"id": above.job.id, "queue": above.job.queue}
        planned = _plan_job(node, waits, defaults, config)
        if above is not None and "parent" in node.options:
            raise ConfigError(f"job {node.name} is the child of another job in its flow and cannot have another parent")
        (roots if above is None else above.children).append(planned)
        todo += [(child, planned) for child in node.children]
    _check_ids(roots, config)
    return roots


def _plan_job(
    node: FlowJob, parent: ParentLike | None, defaults: Mapping[str, AddOptions], config: Config
) -> PlannedJob:
    if node.call is None:
        options: dict[str, Any] = {**defaults.get(node.queue, _NO_OPTIONS), **node.options}
        job = build_job(check_queue_name(node.queue), node.name, node.data, options, config)
        has_custom_id = options.get("job_id") is not None
    else:
        if unknown := sorted(set(node.options) - set(FAILURE_FLAGS)):
            raise TypeError(f"unknown option {unknown[0]!r:.200} of a call in a flow; set it with the call's .set()")
        job = node.call.job()
        job = replace(job, options=replace(job.options, more={**job.options.more, **stored_options(node.options)}))
        has_custom_id = node.call.options.job_id is not None
    if parent is not None:
        job = _with_parent(job, parent, config)
    if job.parent is not None and job.options.deduplication_id is not None:
        raise ConfigError(
            f"job {job.name} is the child of another job, so it cannot be deduplicated: its parent would not wait for "
            "the existing job, and might wait forever for this job"
        )
    return PlannedJob(replace(job, has_children=bool(node.children)), has_custom_id)


def _with_parent(job: NewJob, parent: ParentLike, config: Config) -> NewJob:
    stored = dict(job.options.more)
    link = link_to_parent(parent, stored, prefix=config.prefix, hash_tag=config.queue_hash_tag)
    return replace(job, parent=link, options=replace(job.options, more=stored))


def _check_ids(roots: Sequence[PlannedJob], config: Config) -> None:
    seen: set[tuple[str, str]] = set()
    for planned in in_order(roots):
        job = planned.job
        key = (bullmq_name(job.queue, hash_tag=config.queue_hash_tag), job.id)
        if key in seen:
            raise ConfigError(
                f"two jobs in the flow have the job_id {job.id!r:.200} in queue {job.queue}; use a different id "
                "for each job"
            )
        seen.add(key)


_CLOCK_MARGIN_MS: Final = 2_000


class FlowSender:
    """Adds flows, and makes further calls (``also``), in one transaction.

    An attempt whose reply was lost may have succeeded. Redis executes a transaction as a whole or not at all, so a
    single job that did not exist before (the probe) shows whether the attempt succeeded. If it did, the flow must not
    be added again, because a parent would count its children twice.
    """

    def __init__(
        self, roots: Sequence[PlannedJob], broker: Broker, queues_with_meta: set[str], also: Sequence[Call[Any]] = ()
    ) -> None:
        self._roots = roots
        self._broker = broker
        self._queues_with_meta = queues_with_meta  # of the producer, which remembers them
        self._also = also
        self._all = list(in_order(roots))
        self._probe: PlannedJob | None = None
        self._replication = wait_for_replicas(broker.config, self._keys(roots[0].job.queue)) if roots else []
        self._first_attempt_ms = 0
        self._completed: set[PlannedJob] = set()

    def try_once(self) -> Operation[None]:
        """Add the flows and set each job's ``result``. May be retried after ``BrokerUnavailableError``.

        An error before the transaction means that nothing was sent: the queues are in several slots of a Redis Cluster,
        a root's parent does not exist, or an existing job belongs to another parent.
        """
        if self._broker.topology is not None:
            check_one_slot((self._keys(planned.job.queue), planned.job) for planned in self._all)
        if (yield from self._check_existing()):
            for planned in self._all:
                planned.result = planned.job.id
            return
        now_ms = self._broker.clock.now_ms()
        order = self._order()
        for planned in order:
            if planned.job.timestamp_ms is None:
                planned.job = replace(planned.job, timestamp_ms=now_ms)
        calls: list[Call[Any]] = [add_job(self._keys(it.job.queue), it.job, now_ms) for it in order]
        calls += [self._wait_for(planned, dependent) for planned in order for dependent in planned.dependents]
        calls += self._also
        self._first_attempt_ms = self._first_attempt_ms or now_ms
        results = yield from transaction(calls, self._broker.endpoint.safe_url, self._replication)
        for planned, result in zip(order, results, strict=False):  # the results of the other calls do not matter
            planned.result = result
        self._raise_rejection()

    def _check_existing(self) -> Operation[bool]:
        """Check parents and existing jobs; true if an earlier attempt has added the flows."""
        with_custom_id = [planned for planned in self._all if planned.has_custom_id]
        parents = [root for root in self._roots if root.job.parent is not None]
        batch = _Batch()
        queues = {planned.job.queue for planned in self._all} - self._queues_with_meta
        for queue in sorted(queues):
            batch.add(write_queue_meta(self._keys(queue), PROTOCOL_VERSION, self._broker.config.max_events))
        traces = batch.add(self._traces())
        batch.add(self._replication if self._first_attempt_ms else [])
        parent_exists = batch.add([key_exists(root.job.parent.key) for root in parents if root.job.parent])
        existing = batch.add(
            [call for planned in with_custom_id for call in existing_job(self._keys(planned.job.queue), planned.job.id)]
        )
        if batch.calls:
            results: list[Any] = yield batch.calls
            self._queues_with_meta |= queues
            if any(traces(results)):
                return True
            for root, exists in zip(parents, parent_exists(results), strict=True):
                if not exists:
                    raise ParentNotFoundError(root.job.id, self._keys(root.job.queue).name, "Nothing was added.")
            replies = existing(results)
            pairs = zip(replies[::2], replies[1::2], strict=True)
            yield from self._check_custom_ids(dict(zip(with_custom_id, pairs, strict=True)))
        elif self._all and not self._first_attempt_ms:
            self._probe = self._all[0]
        return False

    def _traces(self) -> list[Call[bool]]:
        """Return calls that detect an earlier attempt, by the probe or by its ``added`` event."""
        if not self._first_attempt_ms or self._probe is None:
            return []
        job = self._probe.job
        keys = self._keys(job.queue)
        return [key_exists(keys.job(job.id)), was_added(keys, job.id, self._first_attempt_ms - _CLOCK_MARGIN_MS)]

    def _check_custom_ids(self, chosen: dict[PlannedJob, tuple[ExistingJob, bool]]) -> Operation[None]:
        self._completed = {planned for planned, (_, completed) in chosen.items() if completed}
        if not self._first_attempt_ms:
            new = (planned for planned in self._all if planned not in chosen or not chosen[planned][0].exists)
            self._probe = next(new, None)
        others = [planned for planned, (existing, _) in chosen.items() if _has_other_parent(planned, existing)]
        if not others:
            return
        exists: list[bool] = yield [key_exists(chosen[planned][0].parent_key) for planned in others]
        for planned, parent_exists in zip(others, exists, strict=True):
            if parent_exists:
                raise ParentConflictError(planned.job.id, self._keys(planned.job.queue).name, "Nothing was added.")

    def _order(self) -> list[PlannedJob]:
        """Return the jobs level by level; children with a custom id that have already completed come last.

        BullMQ's script runs a parent as soon as it has no pending child. If a completed child came first, the parent
        would run before the next child was added to it.
        """
        for planned in self._all:
            planned.children.sort(key=lambda child: child in self._completed)
        return list(in_order(self._roots))

    def _raise_rejection(self) -> None:
        """Raise a rejected job's error; children missing because their root was deduplicated are not errors."""
        expected = {
            child
            for root in self._roots
            if isinstance(root.result, str) and root.result != root.job.id
            for child in in_order(root.children)
        }
        rejected = [it for it in self._all if isinstance(it.result, BulltaskError) and it not in expected]
        if not rejected:
            return
        added = sum(isinstance(planned.result, str) for planned in self._all)
        error = next((it.result for it in rejected if isinstance(it.result, BrokerError)), rejected[0].result)
        assert isinstance(error, BulltaskError)
        if added == 0:
            raise error
        more = f"{added} of the {len(self._all)} jobs sent with it were added."
        if isinstance(error, JobError):
            raise type(error)(error.job_id, error.queue, more) from error
        raise BrokerError(f"{error}; {more}") from error

    def _wait_for(self, planned: PlannedJob, dependent: PlannedJob) -> Call[Any]:
        """Return the call that makes ``dependent`` also wait for ``planned``, which is not its child."""
        return add_dependency(
            self._keys(dependent.job.queue), dependent.job.id, self._keys(planned.job.queue), planned.job.id
        )

    def _keys(self, queue: str) -> QueueKeys:
        return self._broker.keys(queue)


class _Batch:
    """Calls for one round trip, in groups; :meth:`add` returns a function that returns the group's replies."""

    def __init__(self) -> None:
        self.calls: list[Call[Any]] = []

    def add(self, calls: Sequence[Call[Any]]) -> Callable[[list[Any]], list[Any]]:
        start = len(self.calls)
        self.calls += calls
        return lambda results: results[start : start + len(calls)]


def _has_other_parent(planned: PlannedJob, existing: ExistingJob) -> bool:
    parent = planned.job.parent
    return parent is not None and existing.parent_key not in {"", parent.key}


@dataclass(slots=True, eq=False)
class ReadNode:
    """A job in a stored flow, ``None`` if it has been removed; ``keys`` are those of its child jobs, by outcome."""

    context: QueueContext
    job_id: str
    stored: StoredJob | None = None
    keys: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    children: list[ReadNode] = field(default_factory=list)


_ANY_QUEUE = "flows"  # a producer belongs to no queue, and nothing uses this name


class _OtherNamingContext(QueueContext):
    """A queue whose name does not match this app's ``prefix`` or ``queue_hash_tag``."""

    def __init__(self, keys: QueueKeys, broker: Callable[[], Broker]) -> None:
        super().__init__(_ANY_QUEUE, broker, None)
        self.queue = keys.name  # which no client may accept as a name
        self._keys = keys

    @property
    def keys(self) -> QueueKeys:
        """The queue's keys, taken from the keys of its jobs."""
        return self._keys


class _Addresses:
    """Finds the queues of jobs by their full keys."""

    def __init__(self, broker: Callable[[], Broker]) -> None:
        self._broker = broker
        self._contexts: dict[str, QueueContext] = {}

    def of(self, key: str) -> tuple[QueueContext, str]:
        """Return the queue and the id of a job."""
        prefix, name, job_id = address_of(key, self._broker().config.prefix)
        base = f"{prefix}:{name}"
        if base not in self._contexts:
            self._contexts[base] = self._context(prefix, name)
        return self._contexts[base], job_id

    def _context(self, prefix: str, name: str) -> QueueContext:
        broker = self._broker()
        for queue in (name_in_app(name, hash_tag=True), name):
            with suppress(InvalidNameError):  # another program may have written anything
                if broker.keys(queue).base == f"{prefix}:{name}:":
                    return QueueContext(queue, self._broker, None)
        return _OtherNamingContext(QueueKeys(prefix, name), self._broker)


class FlowReader:
    """Reads a flow: up to ``depth`` levels, and ``max_children`` of each kind per job."""

    def __init__(self, broker: Callable[[], Broker], queue: str, job_id: str, depth: int, max_children: int) -> None:
        for name, number in (("depth", depth), ("max_children", max_children)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ConfigError(f"{name} must be an integer of 1 or more, not {number!r:.200}")
        self._broker = broker
        self._depth = depth
        self._max_children = max_children
        self._root = ReadNode(QueueContext(queue, broker, None), job_id)
        self._addresses = _Addresses(broker)

    def read(self) -> Operation[list[list[ReadNode]]]:
        """Read the flow and return its levels, the root's first."""
        levels = [[self._root]]
        while True:
            level, last = levels[-1], len(levels) == self._depth
            yield from self._read_level(level, with_children=not last)
            below = [] if last else [child for node in level for child in self._below(node)]
            if not below:
                return levels
            levels.append(below)

    def _read_level(self, level: list[ReadNode], *, with_children: bool) -> Operation[None]:
        jobs: list[Any] = yield [read_job(node.context.keys, node.job_id) for node in level]
        for node, stored in zip(level, jobs, strict=True):
            node.stored = stored
        todo = [(node, kind, ("0", 0)) for node in level if with_children and node.stored for kind in KINDS]
        while todo:
            pages: list[Any] = yield [
                children(node.context.keys, node.job_id, kind, self._max_children, cursor)
                for node, kind, cursor in todo
            ]
            unfinished = []
            for (node, kind, _), (cursor, keys, _) in zip(todo, pages, strict=True):
                node.keys[kind] += keys
                if cursor[0] != "0" and len(node.keys[kind]) < self._max_children:
                    unfinished.append((node, kind, cursor))
            todo = unfinished

    def _below(self, node: ReadNode) -> list[ReadNode]:
        # Without duplicates: a child that finishes between two pages is on both, and SSCAN may repeat a member.
        keys = dict.fromkeys(key for kind in KINDS for key in node.keys[kind][: self._max_children])
        node.children = [self._node(key) for key in keys]
        return node.children

    def _node(self, key: str) -> ReadNode:
        return ReadNode(*self._addresses.of(key))


@dataclass(frozen=True, slots=True)
class WorkflowJob:
    """A job in a workflow.

    Attributes:
        key: Its full key.
        state: Its state, under BullMQ's name; ``active`` only if a worker holds its lock.
        reason: Why its last attempt failed.
        waits_for: The keys of its child jobs that are in the workflow.
        left_out: How many child jobs it has besides: they were removed, or there are too many.
    """

    key: str
    queue: str
    id: str
    name: str
    state: str
    reason: str
    timestamp_ms: int
    processed_ms: int | None
    finished_ms: int | None
    waits_for: tuple[str, ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class Workflow:
    """A job, and all jobs to which dependencies lead from it: those that wait for it, and those it waits for.

    ``is_complete`` is false if it has more jobs than were read.
    """

    jobs: tuple[WorkflowJob, ...]
    is_complete: bool


_FIELDS: Final = ("name", "timestamp", "processedOn", "finishedOn", "failedReason", "parentKey")
_FINISHED: Final = ("completed", "failed")
_UNFINISHED: Final = ("delayed", "prioritized", "waiting-children")
_PER_ROUND_TRIP: Final = 250
_DEPENDENCIES_PER_JOB: Final = 4
"""How many dependencies of a workflow's jobs are read, on average; each job of a flow has one."""


def read_workflow(
    broker: Callable[[], Broker], queue: str, job_id: str, max_jobs: int = 1_000
) -> Operation[Workflow | None]:
    """Read the workflow of a job: the ``max_jobs`` jobs that are nearest to it; ``None`` if there is no such job.

    Unlike :class:`FlowReader`, it also reads the jobs that wait for this one, and other dependents of a fan-out job;
    and of each job only a few short fields.
    """
    return _WorkflowReader(broker, max_jobs).read(QueueContext(queue, broker, None).keys.job(check_reference(job_id)))


class _WorkflowReader:
    def __init__(self, broker: Callable[[], Broker], max_jobs: int) -> None:
        self._addresses = _Addresses(broker)
        self._max_jobs = max_jobs
        self._budget = _DEPENDENCIES_PER_JOB * max_jobs
        self._fields: dict[str, dict[bytes, bytes]] = {}
        self._children: dict[str, list[str]] = {}
        self._totals: dict[str, int] = {}

    def read(self, key: str) -> Operation[Workflow | None]:
        is_complete = yield from self._find(key)
        if key not in self._fields:
            return None
        states: dict[str, str] = {}
        keys = list(self._fields)
        for start in range(0, len(keys), _PER_ROUND_TRIP):
            states |= yield from self._read_states(keys[start : start + _PER_ROUND_TRIP])
        return Workflow(tuple(self._job(one, states[one]) for one in keys), is_complete)

    def _find(self, key: str) -> Operation[bool]:
        """Read the jobs around a job, and return whether these are all."""
        seen, todo, is_complete = {key}, [key], True
        while todo:
            page, todo = todo[:_PER_ROUND_TRIP], todo[_PER_ROUND_TRIP:]
            present, parents = yield from self._read_fields(page)
            self._children |= {one: [] for one in present}
            if parents:
                yield from self._read_children(parents)
            above = yield from self._above(present)
            near = dict.fromkeys(other for one in present for other in (*above[one], *self._children[one]))
            found = [other for other in near if other not in seen]
            added = found[: self._max_jobs - len(seen)]
            is_complete = is_complete and len(added) == len(found)
            seen.update(added)
            todo += added
        return is_complete

    def _read_fields(self, keys: list[str]) -> Operation[tuple[list[str], list[str]]]:
        """Read the jobs; return the keys of those that exist, and of those among them that have child jobs."""
        calls: list[Call[Any]] = []
        for context, job_id in map(self._addresses.of, keys):
            of = context.keys
            kinds = (of.processed(job_id), of.dependencies(job_id), of.ignored(job_id), of.unsuccessful(job_id))
            calls += [job_fields(of, job_id, _FIELDS), command("EXISTS", *kinds)]
        replies = iter((yield calls))
        parents = []
        for key, row, has_children in zip(keys, replies, replies, strict=True):
            fields = {name.encode(): value for name, value in zip(_FIELDS, row, strict=True) if value is not None}
            if fields:
                self._fields[key] = fields
                parents += [key] if has_children else []
        return [key for key in keys if key in self._fields], parents

    def _read_children(self, keys: list[str]) -> Operation[None]:
        counts: list[dict[str, int]] = yield [
            get_dependency_counts(context.keys, job_id, KINDS) for context, job_id in map(self._addresses.of, keys)
        ]
        self._totals |= {key: sum(count.values()) for key, count in zip(keys, counts, strict=True)}
        todo: list[tuple[str, str, tuple[str, int], int]] = []
        for key, count in zip(keys, counts, strict=True):
            for kind in KINDS:
                most = min(count[kind], self._max_jobs, self._budget)
                self._budget -= most
                todo += [(key, kind, ("0", 0), most)] if most else []
        while todo:
            pages: list[Any] = yield [
                children(context.keys, job_id, kind, most, cursor)
                for (key, kind, cursor, most) in todo
                for context, job_id in [self._addresses.of(key)]
            ]
            unfinished = []
            for (key, kind, _, most), (cursor, found, _) in zip(todo, pages, strict=True):
                self._children[key] += found
                if cursor[0] != "0" and cursor[1] < most:
                    unfinished.append((key, kind, cursor, most))
            todo = unfinished
        for key in keys:  # a child that finishes between two pages is on both, and SSCAN may repeat a member
            self._children[key] = list(dict.fromkeys(self._children[key]))

    def _above(self, keys: list[str]) -> Operation[dict[str, list[str]]]:
        """Return the jobs that wait for each of these jobs: its parent, and the dependents of a fan-out job."""
        above = {key: [text(self._fields[key][b"parentKey"])] for key in keys if self._fields[key].get(b"parentKey")}
        fan_outs = [key for key in keys if self._fields[key].get(b"name") == FAN_OUT.encode()]
        calls = [job_fields(context.keys, job_id, ("data",)) for context, job_id in map(self._addresses.of, fan_outs)]
        rows: list[Any] = (yield calls) if calls else []
        for key, [data] in zip(fan_outs, rows, strict=True):
            with suppress(BulltaskError, KeyError, TypeError):  # another client's job may have this name
                found = codec.decode(data or b"null")["dependents"]
                above[key] = [*above.get(key, ()), *(each for each in found if isinstance(each, str))]
        return {key: above.get(key, []) for key in keys}

    def _read_states(self, keys: list[str]) -> Operation[dict[str, str]]:
        """Read the jobs' states, without searching long lists for them; of many jobs of a queue with one call each."""
        groups: dict[tuple[QueueContext, bool], dict[str, str]] = {}
        for key in keys:
            context, job_id = self._addresses.of(key)
            groups.setdefault((context, b"finishedOn" in self._fields[key]), {})[key] = job_id
        calls: list[Call[Any]] = []
        for (context, is_finished), ids in groups.items():
            names, of = _FINISHED if is_finished else _UNFINISHED, context.keys
            calls += [command("ZMSCORE", of.base + name, *ids.values()) for name in names]
            calls.append(command("MGET", *map(of.lock, ids.values())))
        replies = iter((yield calls))
        states = {}
        for (_, is_finished), ids in groups.items():
            names = _FINISHED if is_finished else _UNFINISHED
            rows = zip(*(next(replies) for _ in (*names, "lock")), strict=True)
            for key, (*scores, lock) in zip(ids, rows, strict=True):
                found = [state for state, score in zip(names, scores, strict=True) if score is not None]
                states[key] = found[0] if found else "waiting" if lock is None else "active"
        return states

    def _job(self, key: str, state: str) -> WorkflowJob:
        context, job_id = self._addresses.of(key)
        fields = self._fields[key]
        waits_for = tuple(child for child in self._children[key] if child in self._fields)
        return WorkflowJob(
            key=key,
            queue=context.queue,
            id=job_id,
            name=codec.decode_text(fields.get(b"name")),
            state=state,
            reason=plain_reason(codec.decode_text(fields.get(b"failedReason"))) or "",
            timestamp_ms=int_field(fields, b"timestamp") or 0,
            processed_ms=int_field(fields, b"processedOn"),
            finished_ms=int_field(fields, b"finishedOn"),
            waits_for=waits_for,
            left_out=max(0, self._totals.get(key, 0) - len(waits_for)),
        )


J = TypeVar("J", bound=JobFields)


class FlowBase:
    """Plans and rebuilds trees of jobs.

    Args:
        broker_url: The server's URL, for a producer without an app; ``BULLTASK_BROKER_URL`` takes precedence.
        broker: Returns the connection of an app's producer.
        settings: Any other setting of ``bulltask.config.config``: ``prefix``, ``queue_hash_tag`` …
    """

    def __init__(
        self,
        broker_url: str | SecretUrl | None = None,
        *,
        broker: Callable[[], Broker] | None = None,
        **settings: object,
    ) -> None:
        if broker is None:
            broker_url = secret_url(broker_url)
            self._context = QueueContext.without_app(_ANY_QUEUE, broker_url, settings, None)
        else:
            self._context = QueueContext(_ANY_QUEUE, broker, None)
        self._queues_with_meta = set[str]()

    def _plan(
        self,
        flows: Iterable[FlowJob | Signature[Any, Any]],
        parent: ParentLike | None,
        queue_defaults: Mapping[str, AddOptions] | None,
    ) -> list[PlannedJob]:
        return plan(list(flows), parent, queue_defaults or {}, self._context.broker.config)

    def _sender(self, roots: Sequence[PlannedJob], also: Sequence[Call[Any]] = ()) -> FlowSender:
        return FlowSender(roots, self._context.broker, self._queues_with_meta, also)

    def _retry_delay_s(self, attempt: int, exc: Exception) -> float:
        """Return the seconds to wait before sending again; raise ``exc`` if there are no retries left."""
        config = self._context.broker.config
        if attempt >= config.publish_retries:
            raise exc
        first_ms, cap_ms = config.reconnect_delay_ms, config.reconnect_delay_max_ms
        return reconnect_delay_ms(attempt + 1, first_ms=first_ms, cap_ms=cap_ms) / 1000

    def _nodes(self, roots: Sequence[PlannedJob], job_class: Callable[[QueueContext, Any], J]) -> list[FlowNode[J]]:
        contexts: dict[str, QueueContext] = {}
        nodes: dict[PlannedJob, FlowNode[J]] = {}
        for planned in reversed(list(in_order(roots))):  # children before their parents
            job = planned.job
            if not isinstance(planned.result, str):
                continue
            context = contexts.setdefault(job.queue, QueueContext(job.queue, lambda: self._context.broker, None))
            children = tuple(nodes[child] for child in planned.children if child in nodes)
            nodes[planned] = FlowNode(job_class(context, sent_job(job, planned.result)), children)
        return [nodes[root] for root in roots]

    def _reader(self, queue: str, job_id: str, depth: int, max_children: int) -> FlowReader:
        return FlowReader(lambda: self._context.broker, queue, check_reference(job_id), depth, max_children)

    def _tree(self, levels: list[list[ReadNode]], job_class: Callable[[QueueContext, Any], J]) -> FlowNode[J] | None:
        nodes: dict[ReadNode, FlowNode[J]] = {}
        for level in reversed(levels):  # children before their parents
            for node in level:
                children = tuple(nodes[child] for child in node.children if child in nodes)
                if node.stored is not None:
                    nodes[node] = FlowNode(job_class(node.context, node.stored), children)
        return nodes.get(levels[0][0])

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


def add_flow_once(roots: Sequence[PlannedJob], broker: Broker, write_id: str, ttl_ms: int) -> Operation[bool]:
    """Return the operation that adds a flow unless the same write has already added it; and says whether it did.

    A key in Redis, which is kept for ``ttl_ms``, marks the write. The connection watches this key, and the transaction
    that adds the jobs sets it, so only one of two senders can add them; the other gets a ``BrokerNotReadyError``. After
    any error, the operation can be run again.
    """
    marker = broker.keys(roots[0].job.queue).added_ids(write_id)
    _, was_added = yield [command("WATCH", marker), key_exists(marker)]
    try:
        if not was_added:
            also: list[Call[Any]] = [command("SET", marker, 1, "PX", ttl_ms)]
            yield from FlowSender(roots, broker, set(), also).try_once()
    except BulltaskError:
        yield from _unwatch()
        raise
    yield from _unwatch()
    return not was_added


def _unwatch() -> Operation[None]:
    """Stop watching the key; otherwise, it could abort a transaction of the connection's next user."""
    with suppress(BulltaskError):  # if the connection is broken, the server has stopped watching
        yield from execute(command("UNWATCH"))
