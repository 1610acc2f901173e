"""The jobs of a canvas: which job waits for which, and how results reach the next call.

BullMQ has only one kind of dependency: a parent job runs after its child jobs. Thus, ``a | b`` is a parent ``b`` with a
child ``a``, and ``group(a, b) | c`` is a parent ``c`` with the children ``a`` and ``b``. A parent reads the results of
its child jobs from BullMQ (:mod:`bulltask.jobs.fields`), and fails if one of them fails.

A job can have only one parent. If several jobs wait for the same one, as in ``a | group(b, c)``, a *fan-out job* is
inserted between them. It receives the result of ``a``. When a worker completes the fan-out job, its dependents, ``b``
and ``c``, become ready to run atomically.

:func:`plan_canvas` is the way in: steps are expanded from the end of the canvas to its beginning, and become jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from bulltask.config.config import Config
from bulltask.jobs import codec
from bulltask.jobs.clock import value_class
from bulltask.jobs.errors import ConfigError
from bulltask.jobs.fields import NO_RESULTS, ChildResults, Replacement, Shape, member_id
from bulltask.jobs.job import (
    BULLTASK_KEY,
    FAILURE_FLAGS,
    JobOptions,
    JobRef,
    NewJob,
    ParentLink,
    PlannedJob,
    in_order,
    link_to_parent,
    new_job_id,
)
from bulltask.jobs.names import FAN_OUT, bullmq_name, qualified_name
from bulltask.jobs.stored_job import ETA, OF_CHORD, Errback, stored_errbacks
from bulltask.registry.call import FAN_OUT_PARAMETER, build_job
from bulltask.registry.canvas import EMPTY_CHAIN, Canvas, Chain, Chord, Group, Signature
from bulltask.registry.options import CallOptions, TaskOptions
from bulltask.registry.protocols import ResultReader
from bulltask.registry.results import AsyncResult, GroupResult

__all__ = ["Node", "Step", "leaves", "plan_canvas", "plan_replacement"]


@dataclass(slots=True, eq=False)
class Step:
    """A call that becomes a job, or a fan-out job (without a call).

    Attributes:
        queue: The queue, if the job exists already.
        parent: The job that waits for it and receives its result.
        receives: The structure of the results that it receives, ``None`` if it has no preceding step.
        dependents: The other jobs that wait for it, if it is a fan-out job.
        errbacks: Error callbacks of the chain that it ends; they are also called if an earlier step failed.
        chord_errbacks: Those of the chord whose body it is; they are also called if a member of its header failed.
        links: The results of its callbacks.
    """

    id: str
    call: Signature[Any, Any] | None = None
    queue: str = ""
    parent: Step | None = None
    children: list[Step] = field(default_factory=list)
    receives: Node | None = None
    dependents: list[Step] = field(default_factory=list)
    errbacks: list[Signature[Any, Any]] = field(default_factory=list)
    chord_errbacks: list[Signature[Any, Any]] = field(default_factory=list)
    links: list[Node] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ResultList:
    """The results of a group, in order; ``id`` is that of the job that receives them, or of the group."""

    id: str
    items: list[Node]


Node = Step | ResultList


def leaves(node: Node) -> list[Step]:
    """Return the steps whose results are those of ``node``, in order."""
    return [node] if isinstance(node, Step) else [leaf for item in node.items for leaf in leaves(item)]


def step_origins(steps: Iterable[Step], sent_by: Mapping[str, str]) -> dict[Step, Mapping[str, str]]:
    """Return the ids of the parent and the root of each call, as they are stored.

    As in Celery, the parent is the previous step; for the body of a chord, one of the members. The root is the first of
    the preceding steps. ``sent_by`` are those of the first calls, if a task sends the canvas; empty for none.
    """
    found: dict[Step, Mapping[str, str]] = {}
    for step in steps:
        chain = [step]  # no recursion, as a chain may exceed Python's recursion limit
        while chain[-1] not in found and (before := _call_before(chain[-1])) is not None:
            chain.append(before)
        first = chain.pop()
        origin = found.setdefault(first, sent_by)
        while chain:
            parent, first = first, chain.pop()
            origin = found[first] = {"parent": parent.id, "root": origin.get("root", parent.id)}
    return found


def _call_before(step: Step) -> Step | None:
    """Return the call before a step, ``None`` for the first one."""
    found: Step | None = step
    while found is not None and (found is step or found.call is None):
        received = [] if found.receives is None else leaves(found.receives)
        # After an empty group, the step before that group is among the children.
        found = next(reversed([*found.children, *received]), None)
    return found


_FAILS_PARENT: Final = FAILURE_FLAGS["fail_parent_on_failure"]


@value_class
class _Target:
    """Where a canvas's result goes: the job that receives it, the result's id, and that of its list, for a group."""

    parent: Step | None
    id: str
    list_id: str


@value_class
class _Expanded:
    """The jobs of a canvas.

    Attributes:
        entries: The jobs that receive the result of the step that precedes the canvas.
        result: The jobs whose results are the result of the canvas, for its handle.
        source: The jobs from which the next step receives this result: those of ``result`` or, after a call with
            callbacks, its fan-out job.
        before: The results of a chain's steps, except the last one.
    """

    entries: list[Step]
    result: Node
    source: Node
    before: list[Node] = field(default_factory=list)


@value_class
class CanvasPlan:
    """A canvas that is ready to be sent: trees of jobs, for one transaction."""

    roots: list[PlannedJob]
    _result: Node
    _before: list[Node]

    def result(self, reader: ResultReader, sent_ms: int) -> AsyncResult[Any] | GroupResult[Any]:
        """Return the handle of the canvas, after it was sent; ``sent_ms`` is the server's time before that."""
        queues = {planned.job.id: planned.job.queue for planned in in_order(self.roots)}
        parent: AsyncResult[Any] | GroupResult[Any] | None = None
        for node in self._before:
            parent = _handle(node, reader, sent_ms, queues, parent)
        return _handle(self._result, reader, sent_ms, queues, parent)


def plan_replacement(
    canvas: Canvas[Any, Any], config: Config, job: JobRef, sent_by: Mapping[str, str], *, retries: int = 0
) -> tuple[list[PlannedJob], Replacement]:
    """Return the jobs of a canvas by which the task of ``job`` replaces itself, and how to read their results.

    If the canvas is the next attempt of the job in another queue, ``retries`` is the number of retries before it.
    Raises ``ConfigError`` for an empty chain, and the errors of :func:`plan_canvas`.
    """
    if isinstance(canvas, Chain) and not canvas.steps:
        raise ConfigError("Cannot replace with an empty chain: pass a chain with at least one step")
    parent, base_id = Step(job.id, queue=job.queue), new_job_id()
    expansion = _Expansion(errbacks_in_headers=config.errbacks_in_chord_headers)
    expanded = expansion.expand(canvas, _Target(parent, base_id, base_id))
    builder = _JobBuilder(config, sent_by)
    roots = builder.build([*parent.children, *expansion.roots])
    _check_ids(roots)
    if retries:
        roots[0].job = replace(roots[0].job, options=replace(roots[0].job.options, retries=retries))
    return roots, Replacement(base_id, builder.shape(expanded.source, base_id))


def plan_canvas(canvas: Canvas[Any, Any], config: Config, sent_by: Mapping[str, str]) -> CanvasPlan:
    """Return the jobs of a canvas, without sending them.

    ``sent_by`` are the ids of the job whose task sends it, and of that job's root; empty for none. Raises ``TypeError``
    if the arguments of a call do not match its task, or the error for a call that cannot be stored.
    """
    expansion = _Expansion(errbacks_in_headers=config.errbacks_in_chord_headers)
    expanded = expansion.expand(canvas, _root_target())
    roots = _JobBuilder(config, sent_by).build(expansion.roots)
    _check_ids(roots)
    return CanvasPlan(roots, expanded.result, expanded.before)


class _Expansion:
    """Turns a canvas into steps, from its end to its beginning, because a job must know its parent.

    With ``errbacks_in_headers``, the members of a chord's header have the error callbacks of the chord.
    """

    def __init__(self, *, errbacks_in_headers: bool) -> None:
        self._errbacks_in_headers = errbacks_in_headers
        self.roots: list[Step] = []

    def expand(self, canvas: Canvas[Any, Any], target: _Target) -> _Expanded:
        """Return the steps of a canvas whose result goes to ``target``."""
        match canvas:
            case Chain():
                return self._expand_chain(canvas, target)
            case Group():
                return self._expand_group(canvas, target)
            case Signature():
                return self._expand_call(canvas, target)
            case _:
                raise TypeError(f"{canvas!r:.200} is not a signature, chain or group")

    def _expand_call(self, call: Signature[Any, Any], target: _Target) -> _Expanded:
        links = [self.expand(callback, _root_target()) for callback in call.links]
        entries = [entry for link in links for entry in link.entries]
        own_id = call.options.job_id or call.planned_id
        if not entries:
            step = self._place(Step(own_id or target.id, call), target)
            return _Expanded([step], step, step)
        if target.parent is None and len(entries) == 1:
            step = self._place(Step(own_id or target.id, call), _before(entries[0]))
            _deliver(entries, step)
            step.links += [link.result for link in links]
            return _Expanded([step], step, step)
        passed_on = self._place(Step(target.id, dependents=entries), target)
        step = self._place(Step(own_id or new_job_id(), call), _before(passed_on))
        _deliver([passed_on], step)
        _deliver(entries, passed_on)
        step.links += [link.result for link in links]
        return _Expanded([step], step, passed_on)

    def _expand_chain(self, canvas: Chain[Any, Any], target: _Target) -> _Expanded:
        if not canvas.steps:
            raise TypeError(EMPTY_CHAIN)
        *others, last = canvas.steps
        following = self.expand(last, target)
        result, source, before, entries = following.result, following.source, following.before, following.entries
        for part in reversed(others):
            fan_in = self._fan_in(entries)
            expanded = self.expand(part, _root_target() if fan_in is None else _before(fan_in))
            if self._errbacks_in_headers and isinstance(canvas, Chord):
                for step in leaves(expanded.result):
                    step.errbacks += canvas.header_errbacks
            if fan_in is not None:
                _deliver([fan_in], expanded.source)
            if fan_in is not None and fan_in.dependents:
                _deliver(entries, fan_in)
            before[:0] = [*expanded.before, expanded.result]
            # An empty group has no jobs, so the step after it follows the step before it.
            entries = expanded.entries or ([] if fan_in is None else [fan_in])
        for step in leaves(result):
            is_body = isinstance(canvas, Chord) and step in following.entries
            (step.chord_errbacks if is_body else step.errbacks).extend(canvas.errbacks)
        return _Expanded(entries, result, source, before)

    def _fan_in(self, entries: list[Step]) -> Step | None:
        """Return the job that receives the preceding step's result: the only entry, a new fan-out job, or ``None``."""
        if len(entries) < 2:
            return entries[0] if entries else None
        return self._place(Step(new_job_id(), dependents=entries), _root_target())

    def _expand_group(self, canvas: Group[Any, Any], target: _Target) -> _Expanded:
        links = [self.expand(callback, _root_target()) for callback in canvas.links]
        linked = [entry for link in links for entry in link.entries]
        passed_on: Step | None = None
        group_id = (canvas.planned_id if target.parent is None else "") or target.list_id
        list_id = group_id if target.parent is None else target.list_id
        if linked:  # the job that receives the list, from whose id those of the members are derived
            if target.parent is not None or len(linked) > 1:
                passed_on = self._place(Step(target.id, dependents=linked), target)
            target = _before(passed_on or linked[0])
            list_id = target.list_id
        members = []
        for index, member in enumerate(canvas.members):
            member_of = member_id(list_id, index)
            members.append(self.expand(member, _Target(target.parent, member_of, member_of)))
        entries = [entry for member in members for entry in member.entries]
        result = ResultList(group_id, [member.result for member in members])
        source = ResultList(list_id, [member.source for member in members])
        if passed_on is not None:
            _deliver([passed_on], source)
            _deliver(linked, passed_on)
            return _Expanded(entries or [passed_on], result, passed_on)
        _deliver(linked, source)
        return _Expanded(entries, result, source)

    def _place(self, step: Step, target: _Target) -> Step:
        step.parent = target.parent
        (self.roots if target.parent is None else target.parent.children).append(step)
        return step


def _deliver(entries: Sequence[Step], value: Node) -> None:
    """Set the result that steps receive, unless it is set already: a step after an empty group receives its result."""
    for entry in entries:
        entry.receives = entry.receives or value


def _follows_group(step: Step) -> bool:
    """Return whether a step is the body of a chord, or one of the calls in it."""
    received = step.receives
    while isinstance(received, Step) and received.call is None:
        received = received.receives
    return isinstance(received, ResultList)


def _before(step: Step) -> _Target:
    """Return the target of a result that ``step`` receives."""
    return _Target(step, new_job_id(), step.id)


def _root_target() -> _Target:
    new_id = new_job_id()
    return _Target(None, new_id, new_id)


class _JobBuilder:
    """Turns steps into jobs; ``sent_by`` are the parent and the root of the first calls."""

    def __init__(self, config: Config, sent_by: Mapping[str, str]) -> None:
        self._config = config
        self._sent_by = sent_by
        self._origins: dict[Step, Mapping[str, str]] = {}
        self._jobs: dict[Step, tuple[NewJob, str]] = {}

    def build(self, roots: Sequence[Step]) -> list[PlannedJob]:
        """Return the trees of jobs."""
        steps = list(roots)
        for step in steps:  # the loop appends to steps; no recursion, as a chain may exceed Python's recursion limit
            steps += step.children
        for step in steps:
            if step.call is not None:
                self._jobs[step] = self._bind(step, step.call)
        self._origins = step_origins((step for step in steps if step.call is not None), self._sent_by)
        planned = {step: self._plan(step) for step in steps}
        for step, job in planned.items():
            job.children += [planned[child] for child in step.children]
            job.dependents += [planned[dependent] for dependent in step.dependents]
        waiting = {dependent for step in steps for dependent in step.dependents}
        for step in steps:
            if step.children or step in waiting:
                planned[step].job = replace(planned[step].job, has_children=True)
        return [planned[root] for root in roots]

    def _bind(self, step: Step, call: Signature[Any, Any]) -> tuple[NewJob, str]:
        """Return a call's job, and the parameter that receives the result of the previous step."""
        options, parameter = call.options, ""
        if step.receives is None or call.immutable:
            data = call.task._codec.encode(call.args, call.kwargs, options.serializer)
        else:
            data, (parameter,) = call.task._codec.encode_after(1, call.args, call.kwargs, options.serializer)
        job = call.task._build(data, options)
        if step.parent is not None and options.parent is not None:
            raise ConfigError(
                f"{call!r:.200} is followed by another step, which is its parent; remove its option `parent`"
            )
        if options.deduplication is not None and (step.parent or step.children or step.receives):
            raise ConfigError(
                f"{call!r:.200} is part of a chain or chord, so it cannot be deduplicated: other calls wait for it"
            )
        return replace(job, id=step.id), parameter

    def _plan(self, step: Step) -> PlannedJob:
        if step.call is None:
            job, parameter = self._fan_out_job(step), FAN_OUT_PARAMETER
        else:
            job, parameter = self._jobs[step]
        receives = step.receives is not None and not (step.call and step.call.immutable)
        canvas: dict[str, object] = {}
        if step.receives is not None:
            canvas = ChildResults(parameter, self.shape(step.receives, "")).to_wire() if receives else dict(NO_RESULTS)
        if errbacks := self._errbacks(step):
            canvas["errbacks"] = stored_errbacks(errbacks)
        options = replace(job.options, canvas=canvas, origin=self._origins.get(step, {}))
        if step.parent is not None:
            link, more = self._link(step.parent, options.more)
            job, options = replace(job, parent=link), replace(options, more=more)
        has_custom_id = step.call is not None and step.call.options.job_id is not None
        return PlannedJob(replace(job, options=options), has_custom_id)

    def _errbacks(self, step: Step) -> list[Errback]:
        own = [] if step.call is None else step.call.errbacks
        # A call after a group is the body of a chord: its callbacks are those of the chord, as in Celery.
        errbacks = [self._errback(call, cascades=OF_CHORD if _follows_group(step) else False) for call in own]
        errbacks += [self._errback(call, cascades=OF_CHORD) for call in step.chord_errbacks]
        return errbacks + [self._errback(call, cascades=True) for call in step.errbacks]

    def _errback(self, call: Signature[Any, Any], *, cascades: bool | str) -> Errback:
        data, parameters = _bind_errback(call)
        job = call.task._build(data, call.options)
        if call.links or call.errbacks:
            raise ConfigError(
                f"the error callback {call!r:.200} cannot have callbacks; let its task send the other calls"
            )
        queue = qualified_name(job.queue, self._config.prefix, hash_tag=self._config.queue_hash_tag)
        return Errback(queue, job.name, codec.decode(job.data), _errback_opts(job.options), tuple(parameters), cascades)

    def _link(self, parent: Step, more: Mapping[str, object]) -> tuple[ParentLink | None, dict[str, object]]:
        if others := sorted(set(more) & set(FAILURE_FLAGS.values()) - {_FAILS_PARENT}):
            raise ConfigError(
                f"a step of a chain or chord cannot have the option {others[0]!r}: if it fails, the steps after it fail"
            )
        stored = {**more, _FAILS_PARENT: True}
        parent_like = {"id": parent.id, "queue": self._queue(parent)}
        config = self._config
        return link_to_parent(parent_like, stored, prefix=config.prefix, hash_tag=config.queue_hash_tag), stored

    def _fan_out_job(self, step: Step) -> NewJob:
        keys = [self._key(dependent) for dependent in step.dependents]
        call = CallOptions(queue=self._queue(step))
        return replace(build_job(FAN_OUT, {"dependents": keys}, TaskOptions(), call, self._config), id=step.id)

    def _queue(self, step: Step) -> str:
        if step.call is not None:
            return self._jobs[step][0].queue
        return step.queue or self._config.canvas_queue or self._queue(step.dependents[0])

    def _key(self, step: Step) -> str:
        return f"{self._config.prefix}:{self._address(step)}"

    def _address(self, step: Step) -> str:
        return f"{bullmq_name(self._queue(step), hash_tag=self._config.queue_hash_tag)}:{step.id}"

    def shape(self, node: Node, expected_id: str) -> Shape:
        """Return the structure of results. The job with the id ``expected_id`` is represented by ``None``."""
        if isinstance(node, Step):
            return None if node.id == expected_id else self._address(node)
        parts = [self.shape(item, member_id(node.id, index)) for index, item in enumerate(node.items)]
        return len(parts) if all(part is None for part in parts) else parts


def _errback_opts(options: JobOptions) -> dict[str, object]:
    """Return the stored options of an error callback, whose times count from the moment when it is added."""
    wire = replace(options, eta_ms=None, expires_in_ms=None).to_wire(0)
    own: dict[str, object] = {}
    if options.eta_ms is not None:
        own[ETA] = options.eta_ms
    if options.expires_in_ms is not None:
        own["ttl"] = options.expires_in_ms  # counts from the time at which the job is added, and from its delay
    return {**wire, BULLTASK_KEY: {**cast(dict[str, object], wire[BULLTASK_KEY]), **own}}


def _bind_errback(call: Signature[Any, Any]) -> tuple[Any, list[str]]:
    """Return an error callback's own arguments, and the parameters that receive the failure: three, one, or none."""
    if call.immutable:
        return call.task._codec.encode(call.args, call.kwargs, call.options.serializer), []
    try:
        return call.task._codec.encode_after(3, call.args, call.kwargs, call.options.serializer)
    except TypeError:
        return call.task._codec.encode_after(1, call.args, call.kwargs, call.options.serializer)


def _handle(
    node: Node, reader: ResultReader, sent_ms: int, queues: Mapping[str, str], parent: Any
) -> AsyncResult[Any] | GroupResult[Any]:
    if isinstance(node, Step):
        decode = None if node.call is None else node.call.task._codec.result_decoder
        handle: AsyncResult[Any] = AsyncResult(node.id, queues[node.id], reader, sent_ms, decode, parent)
        for link in node.links:
            _handle(link, reader, sent_ms, queues, handle)  # it becomes one of the handle's children
        return handle
    return GroupResult(node.id, [_handle(item, reader, sent_ms, queues, parent) for item in node.items], parent)


def _check_ids(roots: Sequence[PlannedJob]) -> None:
    seen: set[JobRef] = set()
    for planned in in_order(roots):
        if planned.job.ref in seen:
            raise ConfigError(
                f"two calls of a canvas have the job_id {planned.job.id!r:.200} in queue {planned.job.queue}; "
                "use a different id for each"
            )
        seen.add(planned.job.ref)
