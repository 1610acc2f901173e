"""Job schedulers of a queue: operations, each written once, and the two classes that carry them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC
from typing import Final, Unpack

from bulltask.errors import ConfigError
from bulltask.jobs.codec import Json
from bulltask.jobs.job import NewJob
from bulltask.jobs.names import check_scheduler_id
from bulltask.queue.link import Link
from bulltask.queue.options import AddOptions
from bulltask.schedule.repeat import Repeat, Rule, Scheduler, iteration_options
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation, execute
from bulltask.transport.produce import PROTOCOL_VERSION
from bulltask.transport.scripts.add import write_queue_meta
from bulltask.transport.scripts.schedule import (
    Iteration,
    add_job_scheduler,
    count_schedulers,
    get_job_scheduler,
    list_schedulers,
    read_scheduler,
    remove_job_scheduler,
)

__all__ = ["AsyncJobSchedulers", "JobSchedulers", "list_all", "put"]

_READ_AT_ONCE: Final = 1_000
_REFUSED: Final = {
    "job_id": "the scheduler makes the ids of its jobs",
    "delay": "the scheduler says when its jobs run",
    "timestamp": "the scheduler says when its jobs run",
    "deduplication": "a scheduler has one next job at a time",
    "parent": "a scheduler's job has no parent",
}


def put(
    keys: QueueKeys, scheduler_id: str, rule: Repeat, job: NewJob, own: Mapping[str, object], now_ms: int
) -> Operation[str | None]:
    """Make or change a scheduler; the result is the id of its next job, ``None`` where its rule allows none.

    Args:
        keys: the queue.
        scheduler_id: the scheduler.
        rule: when its jobs run; a pattern's time zone is said.
        job: the template: name, data and options of its jobs.
        own: more of what only bulltask knows, for the template.
        now_ms: the server's time.
    """
    rule = _from_first_slot(rule, now_ms)
    first_ms = _first_ms(rule, now_ms)
    if first_ms is None or (rule.end_ms is not None and first_ms > rule.end_ms):
        return None
    if rule.every_ms is not None:
        first_ms = None  # the script's own affair: it knows the moment of a scheduler that exists already
    template = job.options.to_template(**own)
    options = iteration_options(template, {**rule.to_wire(), "count": 1}, scheduler_id, first_ms, now_ms)
    call = add_job_scheduler(
        keys, scheduler_id, rule, (job.name, template), Iteration(first_ms, job.data, options), now_ms
    )
    job_id, _ = yield from execute(call)
    return job_id


def list_all(keys: QueueKeys, start: int, end: int, *, asc: bool) -> Operation[list[Scheduler]]:
    """Read schedulers by the moment of their next job, a thousand a round trip."""
    rows: Sequence[tuple[str, int]] = yield from execute(list_schedulers(keys, start, end, asc=asc))
    found: list[Scheduler] = []
    for first in range(0, len(rows), _READ_AT_ONCE):
        found += yield [read_scheduler(keys, *row) for row in rows[first : first + _READ_AT_ONCE]]
    return found


def _first_ms(rule: Repeat, now_ms: int) -> int | None:
    if rule.pattern is None:
        return max(now_ms, rule.start_ms or 0)
    return now_ms if rule.immediately else rule.next_ms(now_ms, UTC)


def _from_first_slot(rule: Repeat, now_ms: int) -> Repeat:
    """With an offset the first job runs at the first multiple of the interval, plus the offset, that is to come."""
    if rule.every_ms is None or rule.offset_ms is None:
        return rule
    begin_ms = max(now_ms, rule.start_ms or 0) - rule.offset_ms
    return replace(rule, start_ms=-(-begin_ms // rule.every_ms) * rule.every_ms + rule.offset_ms)


class _Schedulers:
    """What both classes have in common: what is asked, not who asks.

    Args:
        link: the queue's way to Redis.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    def _upsert(
        self, scheduler_id: str, rule: Rule, name: str | None, data: Json, options: AddOptions | None
    ) -> Operation[Scheduler | None]:
        link = self._link
        checked = self._rule(rule)
        job = self._template(check_scheduler_id(scheduler_id), name, data, options)
        return self._put(link.keys, scheduler_id, checked, job)

    def _put(self, keys: QueueKeys, scheduler_id: str, rule: Repeat, job: NewJob) -> Operation[Scheduler | None]:
        now_ms = self._link.now_ms()
        if rule.end_ms is not None and rule.end_ms < now_ms:
            raise ConfigError(f"end of scheduler {scheduler_id!r} has passed")
        yield write_queue_meta(keys, PROTOCOL_VERSION, self._link.broker.config.max_events)
        if (yield from put(keys, scheduler_id, rule, job, {}, now_ms)) is None:
            return None
        return (yield from execute(get_job_scheduler(keys, scheduler_id)))

    def _rule(self, said: Rule) -> Repeat:
        rule = Repeat.of(**said)
        if rule.pattern is None or rule.tz is not None:
            return rule
        # Said in any case: a worker that does not know this app would take its own machine's zone.
        return replace(rule, tz=self._link.broker.config.timezone)

    def _template(self, scheduler_id: str, name: str | None, data: Json, options: AddOptions | None) -> NewJob:
        # No backoff is said with None: such a job is retried at once.
        said = {key: value for key, value in (options or {}).items() if value is not None or key == "backoff"}
        for option, why in _REFUSED.items():
            if option in said:
                raise ConfigError(f"the jobs of scheduler {scheduler_id!r} cannot have the option {option}: {why}")
        return self._link.build(name or scheduler_id, {} if data is None else data, said)


class JobSchedulers(_Schedulers):
    """The job schedulers of a queue: each adds a job again and again, at every interval or when a pattern fires.

    Whichever worker takes a job adds the next one, in Python or in Node.js. Ticks that nobody saw, because no worker
    ran, are not made up for: one job runs as soon as a worker is there, and the next one at the next tick.
    """

    def upsert(
        self,
        scheduler_id: str,
        *,
        name: str | None = None,
        data: Json = None,
        options: AddOptions | None = None,
        **rule: Unpack[Rule],
    ) -> Scheduler | None:
        """Make a scheduler, or change the one of this id (Node's ``upsertJobScheduler``).

        A changed rule or template counts from the next job on; a job that runs already is left alone.

        Args:
            scheduler_id: its id, unique in the queue.
            name: of the jobs, for a bulltask worker the task's; the scheduler's id if left out.
            data: of the jobs; ``{}`` if left out.
            options: of the jobs, as for ``Queue.add``, but for ``job_id``, ``delay``, ``timestamp``,
                ``deduplication`` and ``parent``. ``expires`` counts from the moment for which each job was made.
            rule: ``every=300``, ``cron="0 3 * * mon-fri", tz="Europe/Berlin"`` …: see
                :class:`bulltask.schedule.repeat.Rule`.

        Returns:
            The scheduler, ``None`` when no job follows any more: the pattern does not fire before ``end``.

        Raises:
            ConfigError, InvalidNameError, TypeError, EncodeError, PayloadTooLargeError: nothing was changed.
            SchedulerCollisionError: a job for the next moment exists and cannot be replaced, because it has run.
            SchedulerBusyError: the same for the next two moments of an interval.
        """
        return self._link.run(self._upsert(scheduler_id, rule, name, data, options))

    def get(self, scheduler_id: str) -> Scheduler | None:
        """Return a scheduler, ``None`` if there is none of this id."""
        return self._link.run(execute(get_job_scheduler(self._link.keys, scheduler_id)))

    def list(self, start: int = 0, end: int = -1, *, asc: bool = False) -> Sequence[Scheduler]:
        """Return schedulers by the moment of their next job.

        Args:
            start, end: the first and the last place, counted from 0; negative ones count from the end.
            asc: the one whose job comes next is the first; else the last.
        """
        return self._link.run(list_all(self._link.keys, start, end, asc=asc))

    def remove(self, scheduler_id: str) -> bool:
        """Remove a scheduler and its next job; false if there is none. A job that waits or runs already stays."""
        return self._link.run(execute(remove_job_scheduler(self._link.keys, scheduler_id)))

    def count(self) -> int:
        """How many schedulers the queue has."""
        return self._link.run(execute(count_schedulers(self._link.keys)))


class AsyncJobSchedulers(_Schedulers):
    """:class:`JobSchedulers` for asyncio; the methods are the same."""

    async def upsert(
        self,
        scheduler_id: str,
        *,
        name: str | None = None,
        data: Json = None,
        options: AddOptions | None = None,
        **rule: Unpack[Rule],
    ) -> Scheduler | None:
        """See :meth:`JobSchedulers.upsert`."""
        return await self._link.arun(self._upsert(scheduler_id, rule, name, data, options))

    async def get(self, scheduler_id: str) -> Scheduler | None:
        """See :meth:`JobSchedulers.get`."""
        return await self._link.arun(execute(get_job_scheduler(self._link.keys, scheduler_id)))

    async def list(self, start: int = 0, end: int = -1, *, asc: bool = False) -> Sequence[Scheduler]:
        """See :meth:`JobSchedulers.list`."""
        return await self._link.arun(list_all(self._link.keys, start, end, asc=asc))

    async def remove(self, scheduler_id: str) -> bool:
        """See :meth:`JobSchedulers.remove`."""
        return await self._link.arun(execute(remove_job_scheduler(self._link.keys, scheduler_id)))

    async def count(self) -> int:
        """See :meth:`JobSchedulers.count`."""
        return await self._link.arun(execute(count_schedulers(self._link.keys)))
