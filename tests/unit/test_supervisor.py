"""How the supervisor handles signals, without real children."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bulltask.config.settings import Settings
from bulltask.events import Bus, ConcurrencyChanged, Event, SignalIgnored, WorkerStopped, WorkerStopping
from bulltask.jobs.clock import mono_ms
from bulltask.worker.recovery import Recovery
from bulltask.worker.slots import ExitCode
from bulltask.worker.supervisor import Supervisor


class Worker:
    """A supervisor that receives one signal per round. This object is also its signals, child pool and recovery."""

    target, max_children, is_exhausted = 1, 4, False

    def __init__(self, *names: str, terminal_closed: bool = False, rounds_of_recovery: int = 0) -> None:
        self.names, self.alive, self.rounds_of_recovery = list(names), 1, rounds_of_recovery
        self.waits: list[int] = []
        self.events: list[Event] = []
        self.stacks = SimpleNamespace(collect=lambda: None)
        bus = Bus()
        bus.subscribe(Event, self.events.append)
        fake: Any = self
        process: Any = SimpleNamespace(signals=self, terminal_closed=terminal_closed)
        self.limits_ms: list[int | None] = []
        limits: Any = SimpleNamespace(
            end_calls_in=self.limits_ms.append,
            end_calls_without_reply_in=self.limits_ms.append,
            has_given_up=False,
            beat=lambda: None,
        )
        self.supervisor = Supervisor(fake, fake, fake, process, Settings({}, {}).freeze(), bus, limits)
        self.exit_code = self.supervisor.run()

    def events_of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    # Signals.

    def wait(self, wait_ms: int) -> None:
        self.waits.append(wait_ms)

    def pop_all(self) -> list[str]:
        if self.names:
            return [self.names.pop(0)]
        self.alive = 0
        return []

    # The child pool.

    def running(self) -> int:
        return 3

    def reap(self) -> list[Any]:
        return []

    def close(self, *, finishing: bool = False) -> None:
        pass

    def kill(self) -> None:
        pass

    def start_missing(self) -> None:
        pass

    def set_paused(self, paused: bool) -> None:
        pass

    def grow(self) -> bool:
        self.target += 1
        return self.target <= self.max_children

    def shrink(self) -> bool:
        return False

    # The services and the recovery.

    def run_due(self) -> None:
        pass

    def wait_ms(self, longest_ms: int) -> int:
        return longest_ms

    @property
    def pending(self) -> bool:
        self.rounds_of_recovery -= 1
        return self.rounds_of_recovery >= 0


@pytest.mark.parametrize(
    ("signals", "restarting", "stops"),
    [
        (["warm_shutdown"], False, ["warm"]),
        (["warm_shutdown", "warm_shutdown"], False, ["warm", "cold"]),
        (["cold_shutdown"], False, ["cold"]),
        (["cold_shutdown", "cold_shutdown"], False, ["cold"]),
        (["restart"], True, ["restart"]),
        (["restart", "warm_shutdown"], False, ["restart"]),
        (["restart", "cold_shutdown"], False, ["restart", "cold"]),
    ],
)
def test_signals_stop_a_worker(signals: list[str], restarting: bool, stops: list[str]) -> None:
    worker = Worker(*signals)
    assert worker.exit_code is ExitCode.OK
    assert worker.supervisor.restarting == restarting
    assert [event.mode for event in worker.events_of(WorkerStopping)] == stops
    assert {event.running for event in worker.events_of(WorkerStopping)} == {3}


def test_a_worker_whose_terminal_is_closed_does_not_restart() -> None:
    worker = Worker("restart", terminal_closed=True)
    assert not worker.supervisor.restarting
    assert [event.mode for event in worker.events_of(WorkerStopping)] == ["warm"]


def test_a_stopping_worker_ignores_and_reports_other_signals() -> None:
    worker = Worker("warm_shutdown", "pause", "restart", "grow", "shrink")
    assert [event.signal for event in worker.events_of(SignalIgnored)] == ["SIGTSTP", "SIGHUP", "SIGTTIN", "SIGTTOU"]
    assert not worker.supervisor.restarting


def test_children_are_added_up_to_the_maximum() -> None:
    worker = Worker("grow", "grow", "grow", "grow", "warm_shutdown")
    assert [event.children for event in worker.events_of(ConcurrencyChanged)] == [2, 3, 4]
    assert [event.signal for event in worker.events_of(SignalIgnored)] == ["SIGTTIN"]


def test_a_worker_exits_after_the_jobs_of_its_children_have_ended() -> None:
    worker = Worker("warm_shutdown", rounds_of_recovery=3)
    assert worker.waits.count(Recovery.interval_ms) == 3


@pytest.mark.parametrize(("signals", "seconds"), [(["warm_shutdown"], 2), (["pause", "resume", "cold_shutdown"], 4)])
def test_a_worker_that_has_stopped_says_how_long_it_has_run(
    monkeypatch: pytest.MonkeyPatch, signals: list[str], seconds: int
) -> None:
    now_ms = 5_000

    def wait_a_second(_worker: Worker, _wait_ms: int) -> None:
        nonlocal now_ms
        now_ms += 1_000

    monkeypatch.setattr("bulltask.worker.supervisor.mono_ms", lambda: now_ms)
    monkeypatch.setattr(Worker, "wait", wait_a_second)
    (stopped,) = Worker(*signals).events_of(WorkerStopped)
    assert (stopped.exit_code, stopped.uptime_ms) == (ExitCode.OK, seconds * 1_000)


def test_helper_processes_have_more_than_half_a_second_to_stop_after_the_children_were_killed() -> None:
    killed_ms = mono_ms()
    end_by_ms = Worker("cold_shutdown").supervisor.end_by_ms
    assert end_by_ms is not None
    assert killed_ms + 500 <= end_by_ms < mono_ms() + 1_000
