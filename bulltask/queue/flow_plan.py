"""A flow before it is sent: the tree that the user wrote, and the jobs that are built from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypedDict, TypeVar, Unpack, cast

from bulltask.config.config import Config
from bulltask.errors import ConfigError
from bulltask.jobs.codec import Json
from bulltask.jobs.flow import PlannedJob, in_order
from bulltask.jobs.job import NewJob
from bulltask.jobs.names import bullmq_name, check_queue_name
from bulltask.jobs.options import FAILURE_FLAGS, ParentLike, link_to_parent, stored_options
from bulltask.queue.add_options import AddOptions, build_job
from bulltask.registry.signature import Signature, is_call

__all__ = ["ChildOptions", "FlowJob", "FlowNode", "plan"]

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
        options: As for ``Queue.add``, see :class:`bulltask.queue.add_options.AddOptions`. A child may also have
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

    Args:
        flows: The trees.
        parent: A job that waits for the roots of the trees.
        defaults: Options by queue, for jobs that do not set them.
        config: The app's settings.

    Raises:
        TypeError: A node is neither a ``FlowJob`` nor a call, or an option is unknown.
        EncodeError, PayloadTooLargeError, InvalidNameError, ConfigError: A job's data, name or an option is invalid.
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
