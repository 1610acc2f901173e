"""Adds flows as a whole and exactly once, even if the connection to Redis fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from bulltask.errors import (
    BrokerError,
    BulltaskError,
    JobError,
    ParentConflictError,
    ParentNotFoundError,
)
from bulltask.jobs.flow import PlannedJob, in_order
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation
from bulltask.transport.produce import PROTOCOL_VERSION, wait_for_replicas
from bulltask.transport.scripts.add import add_job, write_queue_meta
from bulltask.transport.scripts.flow import (
    ExistingJob,
    add_dependency,
    existing_job,
    key_exists,
    was_added,
)
from bulltask.transport.scripts.one_slot import check_one_slot
from bulltask.transport.transaction import transaction

__all__ = ["FlowSender", "ServerFacts"]

_CLOCK_MARGIN_MS: Final = 2_000


@dataclass(slots=True)
class ServerFacts:
    """What a producer remembers about the server.

    Attributes:
        queues_with_meta: Queues whose ``meta`` was written.
    """

    queues_with_meta: set[str] = field(default_factory=set)


class FlowSender:
    """Adds flows in one transaction.

    An attempt whose reply was lost may have succeeded. Redis executes a transaction as a whole or not at all, so a
    single job that did not exist before (the probe) shows whether the attempt succeeded. If it did, the flow must not
    be added again, because a parent would count its children twice.

    Args:
        roots: The flows.
        broker: Keys, clock and settings.
        facts: The producer's cache.
        also: Further calls for the same transaction.
    """

    def __init__(
        self, roots: Sequence[PlannedJob], broker: Broker, facts: ServerFacts, also: Sequence[Call[Any]] = ()
    ) -> None:
        self._roots, self._broker, self._facts, self._also = roots, broker, facts, also
        self._all = list(in_order(roots))
        self._probe: PlannedJob | None = None
        self._replication = wait_for_replicas(broker.config, self._keys(roots[0].job.queue)) if roots else []
        self._first_attempt_ms = 0
        self._completed: set[PlannedJob] = set()

    def try_once(self) -> Operation[None]:
        """Add the flows and set each job's ``result``. May be retried after ``BrokerUnavailableError``.

        Raises:
            ConfigError: The queues are in several slots of a Redis Cluster. Nothing was sent.
            ParentNotFoundError, ParentConflictError: A root's parent does not exist, or an existing job belongs to
                another parent.
            BrokerError: The server returned an error.
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
        queues = {planned.job.queue for planned in self._all} - self._facts.queues_with_meta
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
            self._facts.queues_with_meta |= queues
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
