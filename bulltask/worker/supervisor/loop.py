"""The supervisor: one thread, no user code, one screen."""

from __future__ import annotations

from bulltask.clock import mono_ms
from bulltask.config import Config
from bulltask.events import Bus, WorkerStopped, WorkerStopping
from bulltask.states import RUN_MOVES, RunState, advance
from bulltask.worker.exits import Exit
from bulltask.worker.supervisor.fleet import Fleet, FleetBroken
from bulltask.worker.supervisor.recovery import Recovery
from bulltask.worker.supervisor.services import Ticker
from bulltask.worker.supervisor.signals import SignalQueue

__all__ = ["Supervisor"]

_IDLE_MS = 1_000
_LAST_RECOVERY_MS = 5_000


class Supervisor:
    """Responsible for the life of a worker: it calls, it does not decide.

    Args:
        fleet: the children.
        ticker: the services, most urgent first.
        recovery: takes what dead children leave behind.
        signals: how it is spoken to.
        config: how long running jobs may take at a warm stop.
        bus: hears of the stop.
    """

    def __init__(
        self,
        fleet: Fleet,
        ticker: Ticker,
        recovery: Recovery,
        signals: SignalQueue,
        config: Config,
        bus: Bus,
    ) -> None:
        self._fleet, self._ticker, self._recovery = fleet, ticker, recovery
        self._signals, self._config, self._bus = signals, config, bus
        self._state = RunState.INIT
        self._kill_at_ms: int | None = None
        self._leave_at_ms: int | None = None
        self._exit = Exit.OK

    def run(self) -> Exit:
        """Work until stopped; return the exit code."""
        self._move(RunState.RUN)
        wait_ms = 0
        while self._state is not RunState.CLOSED:
            self._signals.wait(wait_ms)
            for name in self._signals.take():
                getattr(self, name)()
            self._reap()
            self._ticker.run_due()
            wait_ms = self._hold()
        self._bus.emit(WorkerStopped(self._exit))
        return self._exit

    def warm_shutdown(self) -> None:
        """Nobody takes new jobs; what runs may finish until the deadline. A second time: cold."""
        if self._state is not RunState.RUN:
            self.cold_shutdown()
            return
        self._move(RunState.CLOSE)
        running = self._fleet.running()
        self._fleet.quiet()
        self._bus.emit(WorkerStopping("warm", running))  # says that nobody takes jobs, so it comes after the signals
        # The loop goes on ticking until then: jobs that are still running keep their locks.
        self._kill_at_ms = mono_ms() + self._config.shutdown_timeout_ms

    def cold_shutdown(self) -> None:
        """Children are killed; their jobs go back to wait."""
        if self._state is RunState.TERMINATE:
            return
        self._move(RunState.TERMINATE)
        self._bus.emit(WorkerStopping("cold", self._fleet.running()))
        self._fleet.kill()
        self._kill_at_ms = None

    def child_changed(self) -> None:
        """A child died; the loop reaps in every round, so there is nothing to do but wake up."""

    def _reap(self) -> None:
        try:
            for orphans in self._fleet.reap():
                self._recovery.take(orphans)
        except FleetBroken:
            self._exit = Exit.BOOT_FAILED
            self.cold_shutdown()

    def _hold(self) -> int:
        """Keep the fleet as the state wants it; return how long the loop may wait."""
        longest_ms = _IDLE_MS
        if self._state is RunState.RUN:
            if self._ticker.given_up:
                self._exit = Exit.BROKER_LOST
                self.cold_shutdown()
            else:
                longest_ms = min(longest_ms, self._fleet.hold_strength() or longest_ms)
        elif self._fleet.alive == 0:
            self._close()
            return 0
        elif self._kill_at_ms is not None:
            longest_ms = min(longest_ms, self._kill_at_ms - mono_ms())
            if longest_ms <= 0:
                self.cold_shutdown()
        return self._ticker.wait_ms(longest_ms)

    def _close(self) -> None:
        """All children are gone; leave once their jobs are settled, or when Redis does not come back for it."""
        if self._leave_at_ms is None:
            self._leave_at_ms = mono_ms() + _LAST_RECOVERY_MS
        if self._recovery.pending and mono_ms() < self._leave_at_ms:
            self._signals.wait(Recovery.interval_ms)
        else:
            self._move(RunState.CLOSED)

    def _move(self, wanted: RunState) -> None:
        self._state = advance(self._state, wanted, RUN_MOVES)
