"""The supervisor's loop: one thread, no user code."""

from __future__ import annotations

from collections.abc import Callable

from bulltask.clock import mono_ms
from bulltask.config.config import Config
from bulltask.events import (
    ConcurrencyChanged,
    SignalIgnored,
    WorkerPaused,
    WorkerResumed,
    WorkerStopped,
    WorkerStopping,
)
from bulltask.events.bus import Bus
from bulltask.worker.exit_codes import ExitCode
from bulltask.worker.states import ProcessState
from bulltask.worker.supervisor.call_limits import CallLimits
from bulltask.worker.supervisor.child_pool import ChildBootError, ChildPool
from bulltask.worker.supervisor.process_spec import ProcessSpec
from bulltask.worker.supervisor.recovery import Recovery
from bulltask.worker.supervisor.services import Ticker

__all__ = ["SIGNAL_PATIENCE_MS", "Supervisor"]

_IDLE_MS = 1_000
_CLOSE_TIMEOUT_MS = 5_000
SIGNAL_PATIENCE_MS = 250
"""How long a call may wait for Redis when a signal to stop arrives; only then does the supervisor handle the signal."""
_KILL_PATIENCE_MS = 50
"""How long a call may wait for Redis at the deadline of a warm shutdown."""
_RELEASE_PATIENCE_MS = 300
"""How long Redis may leave the supervisor without a reply while it releases the jobs of killed children."""
_AFTER_KILL_MS = 700
"""When the worker's helper processes must have stopped, after the children were killed: less than a second, so that the
whole stop takes less than a second more than ``shutdown_timeout``."""
_STOPPING = "the worker is stopping"


class Supervisor:
    """Runs a worker: handles signals, dead children, services, and missing children.

    Args:
        pool: The children.
        ticker: The services, most urgent first.
        recovery: Recovers the jobs of dead children.
        process_spec: The signals, and whether the terminal is still open.
        config: The settings, for the timeout of a warm shutdown.
        bus: Receives an event for every command.
        limits: The limits of all clients of the services.

    Attributes:
        restarting: After :meth:`run`, whether the worker should start again.
        end_by_ms: When the worker must have stopped (monotonic time); ``None`` if there is no deadline.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - one for each part that it connects
        self,
        pool: ChildPool,
        ticker: Ticker,
        recovery: Recovery,
        process_spec: ProcessSpec,
        config: Config,
        bus: Bus,
        limits: CallLimits,
    ) -> None:
        self._pool, self._ticker, self._recovery, self._limits = pool, ticker, recovery, limits
        self._process_spec, self._signals, self._config, self._bus = process_spec, process_spec.signals, config, bus
        self.restarting = False
        self._paused_since_ms: int | None = None
        self._state = ProcessState.INIT
        self._signalled_ms = 0
        self._kill_at_ms: int | None = None
        self.end_by_ms: int | None = None
        self._close_at_ms: int | None = None
        self._exit_code = ExitCode.OK
        self._finishing = False

    def run(self) -> ExitCode:
        """Run until the worker is stopped; return the exit code."""
        self._advance(ProcessState.RUN)
        if self._config.paused:
            self.pause()
        wait_ms = 0
        self._signals.on_stop = self._limit_current_call
        while self._state is not ProcessState.CLOSED:
            self._signals.wait(wait_ms)
            if names := self._signals.pop_all():
                for name in names:
                    getattr(self, name)()
                self._limit_calls()
            self._reap()
            self._ticker.run_due()
            wait_ms = self._maintain()
        self._bus.emit(WorkerStopped(int(self._exit_code)))
        return self._exit_code

    def warm_shutdown(self) -> None:
        """Acquire no more jobs; running jobs may finish until the deadline. A second call is a cold shutdown."""
        if self.restarting:
            self.restarting = False  # the worker is stopping already; only the restart is cancelled
        elif self._state is ProcessState.RUN or self._finishing:
            self._start_shutdown("warm")
        else:
            self.cold_shutdown()

    def finish(self, reason: str) -> None:
        """Acquire no more jobs, and stop when the running ones have finished, however long they take.

        A signal sets the usual deadline.

        Args:
            reason: ``"burst"`` or ``"max_jobs"``.
        """
        if self._state is ProcessState.RUN:
            self._start_shutdown(reason, finishing=True)
            self._finishing, self._kill_at_ms, self.end_by_ms = True, None, None
            self._pool.interrupt_at_ms = None
            self._limit_calls()

    def cold_shutdown(self) -> None:
        """Kill the children; their jobs are released."""
        self.restarting = False
        self._kill()

    def restart(self) -> None:
        """Stop as :meth:`warm_shutdown` does, then start again with newly loaded code.

        Closing a terminal sends the same signal; in that case the worker only stops.
        """
        if self._state is not ProcessState.RUN:
            self._bus.emit(SignalIgnored("SIGHUP", _STOPPING))
            return
        self.restarting = not self._process_spec.terminal_closed
        self._start_shutdown("restart" if self.restarting else "warm")

    def pause(self) -> None:
        """Acquire no jobs until :meth:`resume`; running jobs continue, and their locks are renewed."""
        if self._state is not ProcessState.RUN:
            self._bus.emit(SignalIgnored("SIGTSTP", _STOPPING))
        elif self._paused_since_ms is None:
            self._paused_since_ms = mono_ms()
            self._pool.set_paused(True)
            self._bus.emit(WorkerPaused(self._pool.running()))

    def resume(self) -> None:
        """Acquire jobs again. Does nothing if the worker is not paused (``CONT`` also follows a ``SIGSTOP``)."""
        if self._paused_since_ms is not None and self._state is ProcessState.RUN:
            self._pool.set_paused(False)
            self._bus.emit(WorkerResumed(mono_ms() - self._paused_since_ms))
            self._paused_since_ms = None

    def grow(self) -> None:
        """Add a child."""
        self._resize("SIGTTIN", self._pool.grow, f"the maximum number of children is {self._pool.max_children}")

    def shrink(self) -> None:
        """Remove a child when its jobs have ended."""
        self._resize("SIGTTOU", self._pool.shrink, "only one child is left")

    def dump_stacks(self) -> None:
        """Log the stacks of all processes."""
        self._pool.stacks.dump_supervisor()
        self._pool.request_stacks()

    def ignore(self) -> None:
        """Log that the signal does nothing; its default action would kill the worker silently."""
        self._bus.emit(SignalIgnored("SIGUSR2", "a supervisor does not use this signal"))

    def child_changed(self) -> None:
        """Do nothing, because the signal only ends the wait; the loop collects dead children in every round."""

    def _start_shutdown(self, mode: str, *, finishing: bool = False) -> None:
        self._advance(ProcessState.CLOSE)
        self._finishing = False
        running = self._pool.running()
        self._pool.close(finishing=finishing)
        # After close(), because the event means that no more jobs are acquired.
        self._bus.emit(WorkerStopping(mode, running))
        # The services run until this time, so that running jobs keep their locks.
        started_ms = mono_ms() if finishing or not self._signalled_ms else self._signalled_ms
        self._kill_at_ms = started_ms + self._config.shutdown_timeout_ms
        self.end_by_ms = self._kill_at_ms + _AFTER_KILL_MS
        notice_ms, timeout_ms = self._config.shutdown_notice_ms, self._config.shutdown_timeout_ms
        if notice_ms:
            self._pool.interrupt_at_ms = self._kill_at_ms - (notice_ms if notice_ms < timeout_ms else timeout_ms // 2)

    def _kill(self) -> None:
        if self._state is ProcessState.TERMINATE:
            return
        self._advance(ProcessState.TERMINATE)
        self._bus.emit(WorkerStopping("cold", self._pool.running()))
        self._pool.kill()
        self._kill_at_ms, self.end_by_ms = None, mono_ms() + _AFTER_KILL_MS
        self._limits.end_calls_without_reply_in(_RELEASE_PATIENCE_MS)

    def _limit_current_call(self) -> None:
        """Let the call that the supervisor is waiting for end soon; called in the handler of a signal to stop."""
        self._signalled_ms = mono_ms()
        if self._state < ProcessState.TERMINATE:
            self._limits.end_calls_in(SIGNAL_PATIENCE_MS)

    def _limit_calls(self) -> None:
        """Let calls end when the running jobs have no more time."""
        if self._state < ProcessState.TERMINATE:
            left_ms = None if self._kill_at_ms is None else self._kill_at_ms + _KILL_PATIENCE_MS - mono_ms()
            self._limits.end_calls_in(left_ms)

    def _resize(self, name: str, change: Callable[[], bool], limit_reason: str) -> None:
        if self._state is not ProcessState.RUN:
            self._bus.emit(SignalIgnored(name, _STOPPING))
        elif self._config.autoscale is not None:
            self._bus.emit(SignalIgnored(name, "worker_autoscale sets the number of children"))
        elif change():
            self._bus.emit(ConcurrencyChanged(self._pool.target, "signal"))
        else:
            self._bus.emit(SignalIgnored(name, limit_reason))

    def _reap(self) -> None:
        try:
            for dead in self._pool.reap():
                self._recovery.recover(dead)
        except ChildBootError:
            self._exit_code = ExitCode.BOOT_FAILED
            self.cold_shutdown()

    def _maintain(self) -> int:
        """Start, kill or wait for children, depending on the state; return how long the loop may wait."""
        max_wait_ms = min(_IDLE_MS, self._pool.stacks.collect() or _IDLE_MS)
        if self._state is ProcessState.RUN:
            if self._ticker.is_exhausted:
                self._exit_code = ExitCode.BROKER_UNREACHABLE
                self.cold_shutdown()
            else:
                max_wait_ms = min(max_wait_ms, self._pool.start_missing() or max_wait_ms)
        elif self._pool.alive == 0:
            self._close()
            return 0
        elif self._kill_at_ms is not None:
            max_wait_ms = min(max_wait_ms, self._kill_at_ms - mono_ms())
            if max_wait_ms <= 0:
                self._kill()
        return self._ticker.wait_ms(max_wait_ms)

    def _close(self) -> None:
        """Close when the jobs of all children are settled, or after a timeout if Redis is unavailable."""
        if self._close_at_ms is None:
            self._close_at_ms = mono_ms() + _CLOSE_TIMEOUT_MS
            if self.end_by_ms is not None:
                self._close_at_ms = min(self._close_at_ms, self.end_by_ms)
        if self._recovery.pending and mono_ms() < self._close_at_ms and not self._limits.has_given_up:
            self._signals.wait(min(Recovery.interval_ms, self._close_at_ms - mono_ms()))
        else:
            self._advance(ProcessState.CLOSED)

    def _advance(self, state: ProcessState) -> None:
        assert state >= self._state, f"a worker cannot change from {self._state.name} to {state.name}"
        self._state = state
