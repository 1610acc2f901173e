# Generated from bulltask/queue/aio/flow.py by tools/generate_sync.py (make sync): do not edit.
"""``FlowProducer``: add and read flows, trees of jobs in which a parent runs after its child jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from bulltask.jobs.errors import BrokerNotReadyError, BrokerUnavailableError
from bulltask.jobs.job import ParentLike, PlannedJob
from bulltask.queue.context import AddOptions, checked
from bulltask.queue.flows import FlowBase, FlowJob, FlowNode
from bulltask.queue.sync.job import Job
from bulltask.registry.canvas import Signature
from bulltask.transport.call import Call
from bulltask.transport.produce import traced_flow

__all__ = ["FlowProducer"]


@checked
class FlowProducer(FlowBase):
    """Adds and reads flows; created by ``app.flows()``.

    ::

        flows.add(
            FlowJob("report", "reports", {"month": 5}, children=[
                FlowJob("load", "loads", {"part": 1}),
                FlowJob("load", "loads", {"part": 2}, {"ignore_dependency_on_failure": True}),
            ])
        )

    A flow's jobs may be in any queues, with workers in Python or Node. A job runs when all its child jobs have
    completed, or have failed and the failure is ignored: see :class:`bulltask.queue.flows.ChildOptions`.
    """

    def add(
        self,
        flow: FlowJob | Signature[Any, Any],
        *,
        parent: ParentLike | None = None,
        queue_defaults: Mapping[str, AddOptions] | None = None,
    ) -> FlowNode[Job]:
        """Add a flow: all of its jobs, or none of them.

        Args:
            flow: The tree.
            parent: Another job that waits for the tree's root. In a task, pass ``self.request`` to add child jobs to
                the running job, then call ``self.move_to_waiting_children()``.
            queue_defaults: Options by queue, for jobs that do not set them (Node's ``queuesOptions``).

        Returns:
            The jobs as they were sent, in the same tree. If a root is deduplicated, nothing was added, and the tree
            contains only the existing job.

        Raises:
            TypeError, ConfigError, InvalidNameError, EncodeError, PayloadTooLargeError: Nothing was sent.
            BrokerConfigError: The server is a node of a Redis Cluster, but the URL is not ``redis+cluster://``.
            ParentNotFoundError: ``parent`` does not exist.
            ParentConflictError: A job with a custom id exists and belongs to another parent that is still waiting for
                it.
            BrokerError: All retries have failed; it is not known whether the flow was added.
        """
        nodes = self.add_bulk([flow], parent=parent, queue_defaults=queue_defaults)
        return nodes[0]

    def add_bulk(
        self,
        flows: Iterable[FlowJob | Signature[Any, Any]],
        *,
        parent: ParentLike | None = None,
        queue_defaults: Mapping[str, AddOptions] | None = None,
    ) -> list[FlowNode[Job]]:
        """Add several flows in one transaction: all of their jobs, or none. Arguments as for :meth:`add`."""
        roots = self._plan(flows, parent, queue_defaults)
        self.add_planned(roots)
        return self._nodes(roots, Job)

    def add_planned(self, roots: Sequence[PlannedJob], also: Sequence[Call[Any]] = ()) -> None:
        """Add jobs that have already been built, such as those of a canvas; raises the errors of :meth:`add`.

        Args:
            roots: The trees; each job's ``result`` is set.
            also: Further calls for the same transaction; without ``roots``, they must be safe to repeat.
        """
        with traced_flow(roots):
            sender, attempt = self._sender(roots, also), 0
            while roots or also:
                try:
                    self._context.run(sender.try_once())
                    break
                except (BrokerUnavailableError, BrokerNotReadyError) as exc:
                    self._context.sleep(self._retry_delay_s(attempt, exc))
                    attempt += 1

    def get_flow(self, queue: str, job_id: str, depth: int = 10, max_children: int = 20) -> FlowNode[Job] | None:
        """Read a stored flow.

        Args:
            queue: The root's queue. The root may be any job in a larger flow.
            job_id: The root's id.
            depth: Number of levels, including the root's.
            max_children: How many children of each kind (completed, pending, failed, ignored) are read per job.

        Returns:
            The tree, ``None`` if there is no such job. Children that were removed are left out.

        Raises:
            InvalidNameError, ConfigError: The queue's name or a number is invalid.
        """
        reader = self._reader(queue, job_id, depth, max_children)
        return self._tree(self._context.run(reader.read()), Job)

    def wait_until_ready(self) -> None:
        """Connect now instead of at the first call, so that an unreachable server is noticed early."""
        self._context.connect()

    def close(self) -> None:
        """Close idle connections, unless an app owns them."""
        self._context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
