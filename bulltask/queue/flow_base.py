"""Base class of ``FlowProducer`` and ``AsyncFlowProducer``: everything except I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from bulltask.config.urls import SecretUrl, secret_url
from bulltask.jobs.backoff import reconnect_delay_ms
from bulltask.jobs.flow import PlannedJob, in_order
from bulltask.jobs.names import check_reference
from bulltask.jobs.options import ParentLike
from bulltask.queue.add_options import AddOptions
from bulltask.queue.context import QueueContext
from bulltask.queue.flow_plan import FlowJob, FlowNode, plan
from bulltask.queue.flow_read import FlowReader, ReadNode
from bulltask.queue.flow_send import FlowSender, ServerFacts
from bulltask.queue.job_fields import JobFields, sent_job
from bulltask.registry.signature import Signature
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call

__all__ = ["FlowBase"]

J = TypeVar("J", bound=JobFields)

_ANY_QUEUE = "flows"  # a producer belongs to no queue, and nothing uses this name


class FlowBase:
    """Plans and rebuilds trees of jobs.

    Args:
        broker_url: The server's URL, for a producer without an app; ``BULLTASK_BROKER_URL`` takes precedence.
        broker: Returns the connection of an app's producer.
        settings: Any other setting of ``bulltask.config.settings``: ``prefix``, ``queue_hash_tag`` …

    Raises:
        ConfigError: A setting is unknown or has an invalid value.
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
        self._server_facts = ServerFacts()

    def _plan(
        self,
        flows: Iterable[FlowJob | Signature[Any, Any]],
        parent: ParentLike | None,
        queue_defaults: Mapping[str, AddOptions] | None,
    ) -> list[PlannedJob]:
        return plan(list(flows), parent, queue_defaults or {}, self._context.broker.config)

    def _sender(self, roots: Sequence[PlannedJob], also: Sequence[Call[Any]] = ()) -> FlowSender:
        return FlowSender(roots, self._context.broker, self._server_facts, also)

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
