"""``FlowProducer``: trees of jobs, added all at once; a job runs when the jobs below it have ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from bulltask.config.urls import SecretUrl, secret_url
from bulltask.errors import BrokerNotReadyError, BrokerUnavailableError
from bulltask.jobs.backoff import reconnect_delay_ms
from bulltask.jobs.options import ParentLike
from bulltask.queue.ajob import AsyncJob
from bulltask.queue.fields import JobFields, record_of
from bulltask.queue.flow_plan import FlowJob, FlowNode, Planned, in_order, plan
from bulltask.queue.flow_read import FlowReader, ReadNode
from bulltask.queue.flow_send import FlowMemory, FlowSending
from bulltask.queue.job import Job
from bulltask.queue.link import Link
from bulltask.queue.options import AddOptions
from bulltask.registry.task import Signature
from bulltask.transport.broker import Broker

__all__ = ["AsyncFlowProducer", "FlowJob", "FlowNode", "FlowProducer"]

J = TypeVar("J", bound=JobFields)

_AGAIN: Final = (BrokerUnavailableError, BrokerNotReadyError)
_ANY_QUEUE: Final = "flows"  # a producer belongs to no queue; the name is used for nothing


class _Flows:
    """What the sync and the async producer have in common.

    Args:
        broker_url: the server, when there is no app; the environment's ``BULLTASK_BROKER_URL`` wins.
        broker: gives the way to Redis, where there is an app.
        settings: any other setting of ``bulltask.config.settings``: ``prefix``, ``queue_hash_tag`` …

    Raises:
        ConfigError: a setting is wrong.
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
            self._link = Link.to(_ANY_QUEUE, broker_url, settings, None)
        else:
            self._link = Link(_ANY_QUEUE, broker, None)
        self._memory = FlowMemory()

    def _plan(
        self,
        flows: Iterable[FlowJob | Signature[Any]],
        parent: ParentLike | None,
        queue_defaults: Mapping[str, AddOptions] | None,
    ) -> list[Planned]:
        return plan(list(flows), parent, queue_defaults or {}, self._link.broker.config)

    def _sending(self, roots: Sequence[Planned]) -> FlowSending:
        return FlowSending(roots, self._link.broker, self._memory)

    def _pause_s(self, attempt: int, exc: Exception) -> float:
        """Seconds before the next attempt; raises ``exc`` when there is none."""
        config = self._link.broker.config
        if attempt >= config.publish_retries:
            raise exc
        first_ms, cap_ms = config.reconnect_delay_ms, config.reconnect_delay_max_ms
        return reconnect_delay_ms(attempt + 1, first_ms=first_ms, cap_ms=cap_ms) / 1000

    def _added(self, roots: Sequence[Planned], kind: Callable[[Link, Any], J]) -> list[FlowNode[J]]:
        links: dict[str, Link] = {}
        made: dict[Planned, FlowNode[J]] = {}
        for planned in reversed(list(in_order(roots))):  # children before their parents
            job = planned.job
            if not isinstance(planned.result, str):
                continue
            link = links.setdefault(job.queue, Link(job.queue, lambda: self._link.broker, None))
            below = tuple(made[child] for child in planned.children if child in made)
            made[planned] = FlowNode(kind(link, record_of(job, planned.result)), below)
        return [made[root] for root in roots]

    def _reader(self, queue: str, job_id: str, depth: int, max_children: int) -> FlowReader:
        return FlowReader(lambda: self._link.broker, queue, job_id, depth, max_children)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


class FlowProducer(_Flows):
    """Adds and reads flows; ``app.flows()`` makes one.

    ::

        flows.add(
            FlowJob("report", "reports", {"month": 5}, children=[
                FlowJob("load", "loads", {"part": 1}),
                FlowJob("load", "loads", {"part": 2}, {"ignore_dependency_on_failure": True}),
            ])
        )

    The jobs of a flow may be in any queues, on workers in Python or Node. A job runs when all its children have
    completed, or have failed in a way that it does not mind: see :class:`bulltask.queue.flow_plan.ChildOptions`.
    """

    def add(
        self,
        flow: FlowJob | Signature[Any],
        *,
        parent: ParentLike | None = None,
        queue_defaults: Mapping[str, AddOptions] | None = None,
    ) -> FlowNode[Job]:
        """Add a flow: all of its jobs, or none of them.

        Args:
            flow: the tree.
            parent: a job that waits for the tree's root as well; from inside a task ``self.request``, so that a
                running job gets children (then ``self.move_to_waiting_children()``).
            queue_defaults: options by queue, for the jobs that do not say otherwise (Node's ``queuesOptions``).

        Returns:
            The jobs as they were sent, in the same tree. Where a root counts as an earlier job (deduplication),
            nothing was added: the tree is that job alone.

        Raises:
            TypeError, ConfigError, InvalidNameError, EncodeError, PayloadTooLargeError: nothing was sent.
            ConfigError: the server is a Redis Cluster, and the queues are in several of its slots.
            ParentNotFoundError: ``parent`` is gone.
            ParentConflictError: a job of a chosen id exists and belongs to another parent that still waits.
            BrokerError: after the configured number of resends; whether the flow was added is not known then.
        """
        return self.add_bulk([flow], parent=parent, queue_defaults=queue_defaults)[0]

    def add_bulk(
        self,
        flows: Iterable[FlowJob | Signature[Any]],
        *,
        parent: ParentLike | None = None,
        queue_defaults: Mapping[str, AddOptions] | None = None,
    ) -> list[FlowNode[Job]]:
        """Add several flows in one transaction: all of their jobs, or none. Arguments as in :meth:`add`."""
        roots = self._plan(flows, parent, queue_defaults)
        sending, attempt = self._sending(roots), 0
        while roots:
            try:
                self._link.run(sending.attempt())
                break
            except _AGAIN as exc:
                threading.Event().wait(self._pause_s(attempt, exc))
                attempt += 1
        return self._added(roots, Job)

    def get_flow(self, queue: str, job_id: str, depth: int = 10, max_children: int = 20) -> FlowNode[Job] | None:
        """Read a stored flow.

        Args:
            queue: the queue of its root, which may be any job of a larger flow.
            job_id: the root's id.
            depth: how many levels, the root's included.
            max_children: how many children of each kind (completed, pending, failed, ignored) a job shows.

        Returns:
            The tree, ``None`` when there is no such job. Children that were removed are left out.

        Raises:
            InvalidNameError, ConfigError: the queue's name, or a number, is wrong.
        """
        reader = self._reader(queue, job_id, depth, max_children)
        return _tree(self._link.run(reader.read()), Job)

    def wait_until_ready(self) -> None:
        """Connect now instead of at the first call, to hear at once of a server that cannot be reached."""
        self._link.connect()

    def close(self) -> None:
        """Close idle connections, unless an app owns them."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncFlowProducer(_Flows):
    """:class:`FlowProducer` for asyncio: the same names and arguments."""

    async def add(
        self,
        flow: FlowJob | Signature[Any],
        *,
        parent: ParentLike | None = None,
        queue_defaults: Mapping[str, AddOptions] | None = None,
    ) -> FlowNode[AsyncJob]:
        """As :meth:`FlowProducer.add`."""
        return (await self.add_bulk([flow], parent=parent, queue_defaults=queue_defaults))[0]

    async def add_bulk(
        self,
        flows: Iterable[FlowJob | Signature[Any]],
        *,
        parent: ParentLike | None = None,
        queue_defaults: Mapping[str, AddOptions] | None = None,
    ) -> list[FlowNode[AsyncJob]]:
        """As :meth:`FlowProducer.add_bulk`."""
        roots = self._plan(flows, parent, queue_defaults)
        sending, attempt = self._sending(roots), 0
        while roots:
            try:
                await self._link.arun(sending.attempt())
                break
            except _AGAIN as exc:
                await asyncio.sleep(self._pause_s(attempt, exc))
                attempt += 1
        return self._added(roots, AsyncJob)

    async def get_flow(
        self, queue: str, job_id: str, depth: int = 10, max_children: int = 20
    ) -> FlowNode[AsyncJob] | None:
        """As :meth:`FlowProducer.get_flow`."""
        reader = self._reader(queue, job_id, depth, max_children)
        return _tree(await self._link.arun(reader.read()), AsyncJob)

    async def wait_until_ready(self) -> None:
        """As :meth:`FlowProducer.wait_until_ready`."""
        await self._link.aconnect()

    async def close(self) -> None:
        """Close the running loop's connection, unless an app owns it."""
        await self._link.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _tree(levels: list[list[ReadNode]], kind: Callable[[Link, Any], J]) -> FlowNode[J] | None:
    made: dict[ReadNode, FlowNode[J]] = {}
    for level in reversed(levels):
        for node in level:
            below = tuple(made[child] for child in node.children if child in made)
            if node.record is not None:
                made[node] = FlowNode(kind(node.link, node.record), below)
    return made.get(levels[0][0])
