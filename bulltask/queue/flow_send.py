"""Adding flows, each exactly once and never in part, however often the way to Redis breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from bulltask.errors import (
    BrokerAuthError,
    BrokerError,
    BulltaskError,
    ConfigError,
    JobError,
    ParentConflictError,
    ParentNotFoundError,
)
from bulltask.queue.flow_plan import Planned, in_order
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation, execute
from bulltask.transport.produce import PROTOCOL_VERSION
from bulltask.transport.scripts.add import add_job, write_queue_meta
from bulltask.transport.scripts.flow import (
    ExistingJob,
    existing_job,
    is_across_slots,
    is_cluster,
    key_exists,
    slots_of,
    was_added,
)
from bulltask.transport.transaction import transaction

__all__ = ["FlowMemory", "FlowSending"]

_CLOCK_MARGIN_MS: Final = 2_000


@dataclass(slots=True)
class FlowMemory:
    """What one producer knows of the server: it is asked once.

    Attributes:
        cluster: whether it is a node of a Redis Cluster; ``None``: not asked yet.
        described: queues whose ``meta`` was written.
    """

    cluster: bool | None = None
    described: set[str] = field(default_factory=set)


class FlowSending:
    """Responsible for adding some flows in one transaction.

    An attempt whose reply was lost may have succeeded. As a transaction is executed as a whole or not at all, one job
    that was not there before tells which: adding the flow once more could bind children to a parent that has already
    counted them.

    Args:
        roots: the flows.
        broker: keys, clock, settings.
        memory: kept from one sending to the next.
    """

    def __init__(self, roots: Sequence[Planned], broker: Broker, memory: FlowMemory) -> None:
        self._roots, self._broker, self._memory = roots, broker, memory
        self._all = list(in_order(roots))
        self._witness: Planned | None = None
        self._tried_ms = 0
        self._completed: set[Planned] = set()

    def attempt(self) -> Operation[None]:
        """Add the flows; afterwards each job has its ``result``. May be repeated after ``BrokerUnavailableError``.

        Raises:
            ConfigError: the server is a Redis Cluster, and the flows' queues are in several of its slots.
            ParentNotFoundError, ParentConflictError: a root's parent does not exist, or an existing job belongs to
                another parent.
            BrokerError: the server refused.
        """
        yield from self._check_slots()
        if (yield from self._look()):
            for planned in self._all:
                planned.result = planned.job.id
            return
        now_ms = self._broker.clock.now_ms()
        order = self._order()
        for planned in order:
            if planned.job.timestamp_ms is None:
                planned.job = replace(planned.job, timestamp_ms=now_ms)
        calls = [add_job(self._broker.keys(planned.job.queue), planned.job, now_ms) for planned in order]
        self._tried_ms = self._tried_ms or now_ms
        try:
            results = yield from transaction(calls, self._broker.endpoint.safe_url)
        except BrokerError as exc:
            if is_across_slots(exc):
                raise self._across_slots() from exc
            raise
        for planned, result in zip(order, results, strict=True):
            planned.result = result
        self._judge()

    def _look(self) -> Operation[bool]:
        """Ask about all that may stand in the way; true when an earlier attempt has added the flows."""
        chosen = [planned for planned in self._all if planned.chosen]
        parents = [root for root in self._roots if root.job.parent is not None]
        questions = _Questions()
        queues = {planned.job.queue for planned in self._all} - self._memory.described
        for queue in sorted(queues):
            questions.add(write_queue_meta(self._keys(queue), PROTOCOL_VERSION, self._broker.config.max_events))
        there = questions.add(self._traces())
        found = questions.add([key_exists(root.job.parent.key) for root in parents if root.job.parent])
        stands = questions.add(
            [call for planned in chosen for call in existing_job(self._keys(planned.job.queue), planned.job.id)]
        )
        if questions.calls:
            results: list[Any] = yield questions.calls
            self._memory.described |= queues
            if any(there(results)):
                return True
            for root, exists in zip(parents, found(results), strict=True):
                if not exists:
                    raise ParentNotFoundError(root.job.id, self._keys(root.job.queue).name, "Nothing was added.")
            said = stands(results)
            yield from self._check_standing(dict(zip(chosen, zip(said[::2], said[1::2], strict=True), strict=True)))
        elif not self._tried_ms:
            self._witness = self._all[0]
        return False

    def _traces(self) -> list[Call[bool]]:
        """What tells of an earlier attempt: the witness, or, if it has ended and is gone, the event of its adding."""
        if not self._tried_ms or self._witness is None:
            return []
        job = self._witness.job
        keys = self._keys(job.queue)
        return [key_exists(keys.job(job.id)), was_added(keys, job.id, self._tried_ms - _CLOCK_MARGIN_MS)]

    def _check_standing(self, chosen: dict[Planned, tuple[ExistingJob, bool]]) -> Operation[None]:
        self._completed = {planned for planned, (_, completed) in chosen.items() if completed}
        if not self._tried_ms:
            new = (planned for planned in self._all if planned not in chosen or not chosen[planned][0].exists)
            self._witness = next(new, None)
        others = [planned for planned, (stands, _) in chosen.items() if _belongs_elsewhere(planned, stands)]
        if not others:
            return
        alive: list[bool] = yield [key_exists(chosen[planned][0].parent_key) for planned in others]
        for planned, lives in zip(others, alive, strict=True):
            if lives:
                raise ParentConflictError(planned.job.id, self._keys(planned.job.queue).name, "Nothing was added.")

    def _order(self) -> list[Planned]:
        """Level by level; of the children of one job those last that have completed before, under their chosen ids.

        BullMQ's script lets a parent run as soon as it has no pending child, so one that begins with such a child
        would run before the next one is added to it.
        """
        for planned in self._all:
            planned.children.sort(key=lambda child: child in self._completed)
        return list(in_order(self._roots))

    def _judge(self) -> None:
        """Raise the first refusal that is not the consequence of a root that counts as another job."""
        expected = {
            child
            for root in self._roots
            if isinstance(root.result, str) and root.result != root.job.id
            for child in in_order(root.children)
        }
        refused = [it for it in self._all if isinstance(it.result, BulltaskError) and it not in expected]
        if not refused:
            return
        added = sum(isinstance(planned.result, str) for planned in self._all)
        error = next((it.result for it in refused if isinstance(it.result, BrokerError)), refused[0].result)
        assert isinstance(error, BulltaskError)
        if added == 0:
            raise self._across_slots() if is_across_slots(error) else error
        more = f"{added} of the {len(self._all)} jobs sent with it were added."
        if isinstance(error, JobError):
            raise type(error)(error.job_id, error.queue, more) from error
        raise BrokerError(f"{error}; {more}") from error

    def _check_slots(self) -> Operation[None]:
        slots = {slot for planned in self._all for slot in slots_of(self._keys(planned.job.queue), planned.job.id)}
        if len(slots) < 2:
            return
        if self._memory.cluster is None:
            try:
                self._memory.cluster = yield from execute(is_cluster())
            except BrokerAuthError:  # INFO is forbidden: the flow itself will tell
                self._memory.cluster = False
        if self._memory.cluster:
            raise self._across_slots()

    def _across_slots(self) -> ConfigError:
        queues = ", ".join(sorted({self._keys(planned.job.queue).base[:-1] for planned in self._all}))
        return ConfigError(
            f"a flow is added in one transaction, and on Redis Cluster that cannot go across slots, but the keys of "
            f"{queues} are in several; nothing was added. Let all queues share a slot with prefix='{{bull}}' in every "
            "app and every Node client"
        )

    def _keys(self, queue: str) -> QueueKeys:
        return self._broker.keys(queue)


class _Questions:
    """Calls of one round trip, in groups; each group knows its own answers."""

    def __init__(self) -> None:
        self.calls: list[Call[Any]] = []

    def add(self, calls: Sequence[Call[Any]]) -> Callable[[list[Any]], list[Any]]:
        start = len(self.calls)
        self.calls += calls
        return lambda results: results[start : start + len(calls)]


def _belongs_elsewhere(planned: Planned, stands: ExistingJob) -> bool:
    own = planned.job.parent
    return own is not None and stands.parent_key not in {"", own.key}
