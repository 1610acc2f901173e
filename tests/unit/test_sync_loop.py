"""How the main thread of a child finishes jobs during an outage, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bulltask.config.settings import Settings
from bulltask.errors import BrokerError, BrokerUnavailableError
from bulltask.events import Bus, JobCompleted
from bulltask.jobs.job import RunningJob
from bulltask.transport.call import Call, NoJob, QueueKeys
from bulltask.worker.attempt import IterationAdder, JobStarter
from bulltask.worker.finish import Finisher, OutcomeWriter
from bulltask.worker.outcomes import AcquiredJob, CompletedOutcome
from bulltask.worker.slots import Slots
from bulltask.worker.sync_loop import BatchCollector, SyncLoop

KEYS = QueueKeys("bull", "{mail}", "mail")
OPTS = b'{"attempts":1,"de":{"id":"only-one"}}'
FIELDS = [b"name", b"send", b"data", b"{}", b"opts", OPTS, b"timestamp", b"1", b"ats", b"1"]
CONNECTION_LOST = BrokerUnavailableError("gone")


class Child:
    """A main thread that finishes one job. Its connection returns the replies that a test sets, then ``None``."""

    may_fetch_next = has_several_queues = False
    is_active = True

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.log: list[str] = []
        self.completed: list[JobCompleted] = []
        self.client = self.backoff = self.pool = self
        self.round_robin = SimpleNamespace(after=lambda index: index)
        bus, clock = Bus(), SimpleNamespace(now_ms=lambda: 1_000)
        bus.subscribe(JobCompleted, self.completed.append)
        fake: Any = self

        finisher = Finisher(Settings({}, {}).freeze(), clock, bus, "worker")  # type: ignore[arg-type]
        (block,) = Slots(1, 1).children
        block.reset()
        (slot,) = block.slots()
        slot.activate(0, "7", 1)
        acquired = AcquiredJob(slot, 0, KEYS, RunningJob.from_hash("mail", "7", FIELDS), 0)
        OutcomeWriter(fake, finisher).write(acquired, CompletedOutcome(b"1", 1), 0.0)

    # This object is also the fetcher, its connection and its backoff.

    def run(self, call: Call[Any]) -> Any:
        self.log.append("" if call.script is None else call.script.name)
        reply = self.replies.pop(0) if self.replies else None
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def record_lost_call(self, _exc: BrokerError, _slot: object, _index: int) -> None:
        self.log.append("lost")

    def back_off(self, _exc: BrokerError) -> None:
        self.log.append("wait")

    def give_back(self, _slot: object) -> None:
        pass

    def reset(self) -> None:
        pass


def test_a_child_waits_before_it_writes_an_outcome_again() -> None:
    child = Child(CONNECTION_LOST, CONNECTION_LOST)
    write = child.log[0]
    assert child.log[:7] == [write, "lost", "wait", write, "lost", "wait", write]
    assert len(child.completed) == 1


def test_a_deferred_duplicate_is_added_after_the_outcome_despite_an_outage() -> None:
    write, *after = Child(None, CONNECTION_LOST).log
    add, pause, again = after
    assert write == "wakeNext:moveToFinished"
    assert add == again != write
    assert pause == "wait"


def test_a_deferred_duplicate_that_redis_rejects_does_not_stop_the_child() -> None:
    child = Child(None, BrokerError("OOM"))
    assert len(child.log) == 2
    assert len(child.completed) == 1


def test_the_reason_for_rescheduling_an_iteration_is_the_text_of_the_error() -> None:
    class Adder(IterationAdder):
        def __init__(self, error: Exception) -> None:
            self.error = error

        def _add(self, _: AcquiredJob) -> None:
            raise self.error

    job: Any = SimpleNamespace(job=SimpleNamespace(attempts_started=1))
    outcomes = [Adder(error).add_next(job) for error in (ValueError("no such day"), ValueError())]
    assert [outcome.reason for outcome in outcomes if outcome] == ["no such day", "ValueError"]


@pytest.mark.parametrize("in_batch", [False, True])
def test_a_job_whose_task_is_not_called_has_a_duration_of_zero(in_batch: bool) -> None:
    nothing: Any = None
    job: Any = SimpleNamespace(max_concurrent=0, job=SimpleNamespace(name="send", is_repeated=False))
    runner: Any = SimpleNamespace(begin=lambda _: CompletedOutcome(b"1", 1), counting_cpu=lambda _: nothing)
    durations: list[float] = []

    class Writer(OutcomeWriter):
        def write(self, _acquired: AcquiredJob, _outcome: object, duration_ms: float) -> None:
            durations.append(duration_ms)

        def write_many(self, ended: Sequence[tuple[AcquiredJob, object]], duration_ms: float) -> None:
            durations.extend(duration_ms for _ in ended)

    child_limits: Any = SimpleNamespace(exist=False)
    fetcher: Any = SimpleNamespace(bus=Bus())
    collector: Any = SimpleNamespace(batches={"send": (9, 0)} if in_batch else {}, collect=lambda first: [first])
    starter = JobStarter(fetcher, runner, nothing, nothing, child_limits)
    finisher: Any = SimpleNamespace(counts=None, ending=nothing, ended=nothing, limit_call=nothing)
    writer = Writer(fetcher, finisher)
    prefetch: Any = SimpleNamespace(count=SimpleNamespace(record_long_job=lambda: None))
    SyncLoop(fetcher, starter, runner, writer, nothing, child_limits, collector, prefetch, nothing)._work(job)
    assert durations == [0.0]


def test_a_batch_is_filled_as_soon_as_a_delayed_job_is_due() -> None:
    waits: list[int] = []
    fetcher: Any = SimpleNamespace(
        may_collect=True,
        pool=SimpleNamespace(take_reserved=lambda _: ["slot"], give_back=lambda *_: None),
        fetch_many=lambda *_: [NoJob(due_ms=1_200)],
        adopt=lambda *_: None,
    )

    def wait_for_queue(_index: int, wait_ms: int) -> bool:
        waits.append(wait_ms)
        fetcher.may_collect = False
        return False

    fetcher.wait_for_queue = wait_for_queue
    control: Any = SimpleNamespace(has_permits=False)
    clock: Any = SimpleNamespace(now_ms=lambda: 1_000)
    first: Any = SimpleNamespace(job=SimpleNamespace(name="send"), queue_index=0, max_concurrent=0)
    assert BatchCollector(fetcher, control, clock, {"send": (2, 60_000)}).collect(first) == [first]
    assert waits == [200]
