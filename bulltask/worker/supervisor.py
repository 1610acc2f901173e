"""The supervisor: one thread that calls its services at their intervals, and runs no user code.

Begin with :class:`Supervisor` and :class:`Ticker`. Services that concern more than timing are in ``recovery``,
``locks``, ``limits``, ``fleet`` and ``child_pool``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Final, Protocol, TypeVar, cast

from bulltask.config.config import Config
from bulltask.config.parsers import Autoscale
from bulltask.jobs.clock import mono_ms
from bulltask.jobs.errors import (
    BrokerAuthError,
    BrokerError,
    BrokerNotReadyError,
    BrokerOutOfMemoryError,
    BrokerUnavailableError,
)
from bulltask.observe.bus import Bus
from bulltask.observe.events import (
    ConcurrencyChanged,
    ServiceFailed,
    SignalIgnored,
    WorkerPaused,
    WorkerResumed,
    WorkerStopped,
    WorkerStopping,
)
from bulltask.transport import discovery
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call, QueueKeys, SyncClient, command
from bulltask.transport.endpoint import Endpoint, KnownPrimary
from bulltask.transport.orders import has_requests
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.child_pool import ChildBootError, ChildPool
from bulltask.worker.health import ServiceManager
from bulltask.worker.recovery import Recovery
from bulltask.worker.slots import ControlPage, ExitCode, ProcessState, WakeupPipe

__all__ = [
    "SIGNAL_METHODS",
    "SIGNAL_PATIENCE_MS",
    "STOP_METHODS",
    "SUPERVISOR_TIMEOUT_MS",
    "Autoscaler",
    "BurstCheck",
    "CallLimits",
    "MaxJobsCheck",
    "NamedConnections",
    "PrimaryCheck",
    "ProcessSpec",
    "Service",
    "SignalQueue",
    "Supervisor",
    "Ticker",
]


class Service(Protocol):
    """Periodic work of the supervisor. A tick is short, makes few calls, and never raises ``BrokerError``."""

    @property
    def interval_ms(self) -> int:
        """Milliseconds between ticks."""
        ...

    def tick(self, now_ms: int, missed: int, /) -> None:
        """Run once, now; ``missed`` ticks were skipped because an earlier tick, or another service, took too long."""
        ...


class Ticker:
    """Runs services when they are due, the most urgent first, such as the renewal of locks; ticks never overlap.

    All services tick at multiples of their intervals since the start, so that they share a wake-up of the process: at
    times of their own, they would wake an idle worker several times as often. A service may change its interval at any
    time, for example because a child needs it.
    """

    def __init__(self, services: Sequence[Service], backoff: ReconnectBackoff, bus: Bus) -> None:
        self._services = services
        self._backoff = backoff
        self._bus = bus
        self._failures = [0] * len(services)
        self._started_ms: int | None = None
        self._ticked_ms = [0] * len(services)

    @property
    def is_exhausted(self) -> bool:
        """True after more than ``broker_connection_max_retries`` failed attempts to reach Redis."""
        return self._backoff.is_exhausted

    def wait_ms(self, max_ms: int) -> int:
        """Return the milliseconds until the next service is due, at most ``max_ms``."""
        now_ms = mono_ms()
        return max(0, min([max_ms, *(self._due_ms(index) - now_ms for index in range(len(self._services)))]))

    def run_due(self) -> None:
        """Run every service that is due."""
        is_first = self._started_ms is None
        if self._started_ms is None:
            self._started_ms = mono_ms()
        for index, service in enumerate(self._services):
            now_ms = mono_ms()
            due_ms = now_ms if is_first else self._due_ms(index)
            if now_ms < due_ms:
                continue
            missed = (now_ms - due_ms) // service.interval_ms
            self._ticked_ms[index] = self._started_ms if is_first else now_ms
            try:
                service.tick(now_ms, missed)
            except Exception as exc:  # noqa: BLE001 - running jobs need the other services
                self._failures[index] += 1
                self._bus.emit(ServiceFailed(type(service).__name__, self._failures[index], exc))

    def _due_ms(self, index: int) -> int:
        """Return when a service ticks next: missed ticks are skipped."""
        if self._started_ms is None:
            return 0
        interval_ms, ticked_ms = self._services[index].interval_ms, self._ticked_ms[index] - self._started_ms
        return self._started_ms + (ticked_ms // interval_ms + 1) * interval_ms


SIGNAL_METHODS: Final[Mapping[signal.Signals, str]] = {
    signal.SIGTERM: "warm_shutdown",
    signal.SIGINT: "warm_shutdown",
    signal.SIGQUIT: "cold_shutdown",
    signal.SIGHUP: "restart",
    signal.SIGTSTP: "pause",
    signal.SIGCONT: "resume",
    signal.SIGTTIN: "grow",
    signal.SIGTTOU: "shrink",
    signal.SIGUSR1: "dump_stacks",
    signal.SIGUSR2: "ignore",
    signal.SIGCHLD: "child_changed",
}
"""The supervisor's method for each signal (docs/reference/signals.md). A second TERM or INT makes a shutdown cold."""

_INSTALLED_LATE: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGCHLD})
"""Signals that keep their default action until the worker is running: before that there is nothing to shut down."""

_STOP_SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP})

STOP_METHODS: Final = frozenset({"warm_shutdown", "cold_shutdown"})
"""The methods that stop the worker without a restart."""


class SignalQueue:
    """Queues signals for the supervisor's loop: a handler only records the number, so it interrupts nothing.

    Attributes:
        on_stop: Called in the handler of a signal that stops the worker.
    """

    def __init__(self) -> None:
        self._wakeup_pipe: WakeupPipe | None = None
        self.on_stop: Callable[[], None] | None = None
        self._arrived: deque[int] = deque()

    def install_early(self) -> None:
        """Record the signals that do not stop the worker, while the worker is still being loaded."""
        if os.getpid() == 1:  # there, the kernel ignores a signal without a handler
            for number in (signal.SIGTERM, signal.SIGQUIT):
                signal.signal(number, lambda number, _: os._exit(128 + number))
        self._handle(number for number in SIGNAL_METHODS if number not in _INSTALLED_LATE)

    def install(self, wakeup_pipe: WakeupPipe) -> None:
        """Handle all signals, which end a wait."""
        self._wakeup_pipe = wakeup_pipe
        self._handle(SIGNAL_METHODS)

    def _handle(self, numbers: Iterable[signal.Signals]) -> None:
        for number in numbers:
            # With nohup a worker continues when its terminal is closed, like any other program.
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        # After a restart, the worker starts with all these signals blocked.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNAL_METHODS)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._arrived.append(number)
        if self.on_stop is not None and number in _STOP_SIGNALS:
            self.on_stop()

    def wait(self, timeout_ms: float) -> None:
        """Return after ``timeout_ms``, or as soon as a signal has arrived."""
        assert self._wakeup_pipe is not None, "call install() first"
        self._wakeup_pipe.wait(timeout_ms)

    def contains(self, names: Collection[str]) -> bool:
        """Whether a signal for one of these methods is in the queue."""
        return any(SIGNAL_METHODS[signal.Signals(number)] in names for number in tuple(self._arrived))

    def pop_all(self) -> list[str]:
        """Return the methods to call, in order of arrival, and empty the queue."""
        names = []
        while self._arrived:
            names.append(SIGNAL_METHODS[signal.Signals(self._arrived.popleft())])
        return names


_ADDED_QUEUES: Final = "_BULLTASK_ADDED_QUEUES"


class ProcessSpec:
    """The command, directory and environment of a worker, recorded before any of the app's code runs.

    The app may change the directory and environment while it is being imported, but a restart needs the original ones.
    Also, a second ``HUP`` must not kill a worker that is importing the app after a restart: signals are recorded from
    the start, except those that stop the worker.

    Attributes:
        added_queues: Queues that were added to the running worker, which a restart passes on.
    """

    def __init__(self) -> None:
        self.signals = SignalQueue()
        self.signals.install_early()
        self._directory = _directory()
        # Not an argument: the command line, which ps shows, stays the operator's. No program of the app inherits it.
        self.added_queues: list[str] = json.loads(os.environ.pop(_ADDED_QUEUES, "[]"))
        self._environ = dict(os.environ)
        self.manager = ServiceManager(os.environ)
        self._terminals = [fd for fd in range(3) if os.isatty(fd)]

    @property
    def terminal_closed(self) -> bool:
        """True if the worker was started in a terminal that has been closed."""
        return bool(self._terminals) and not any(os.isatty(fd) for fd in self._terminals)

    @property
    def command(self) -> list[str]:
        """The program and arguments that started this process, with ``-m`` and the interpreter's options."""
        return [sys.executable, *sys.orig_argv[1:]]

    def restart(self) -> None:
        """Run the same command again in this process (``exec``); returns only if a stop signal has arrived.

        The kernel closes all descriptors that Python has opened (``O_CLOEXEC``). All children must already have exited.
        """
        # From now on, signals are pending until the new program has installed its handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNAL_METHODS)
        if self.signals.contains(STOP_METHODS):
            return
        sys.stdout.flush()
        sys.stderr.flush()
        if self._directory:
            os.chdir(self._directory)
        added = {_ADDED_QUEUES: json.dumps(self.added_queues)} if self.added_queues else {}
        os.execve(sys.executable, self.command, self._environ | added)  # noqa: S606 - this worker's command line


def _directory() -> str:
    """Return the working directory, without resolving symbolic links.

    If it is a link to the current release, a restart must follow the link again.
    """
    pwd = os.environ.get("PWD", "")
    try:
        return pwd if pwd and os.path.samefile(pwd, ".") else os.getcwd()  # noqa: PTH109, PTH121
    except OSError:  # the directory was removed
        return ""


class BurstCheck:
    """Stops a worker when its queues have no job that it could run, and its children have none.

    The children are checked before and after the queues, because a child may take the last job in between, and that
    job may send others; and in two ticks, because a child may have received a job that it has not started yet.
    """

    interval_ms = 100

    def __init__(
        self, pool: ChildPool, count_jobs: Callable[[], int], backoff: ReconnectBackoff, finish: Callable[[str], None]
    ) -> None:
        self._pool = pool
        self._count_jobs = count_jobs
        self._backoff = backoff
        self._finish = finish
        self._idle_slots: tuple[tuple[str, int], ...] = ()

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Check the children and the queues."""
        last = self._idle_slots
        before = self._pool.idle_slots()
        self._idle_slots = before
        if not before or before != last or self._backoff.is_active or self._pool.is_paused:
            return
        try:
            if self._count_jobs() == 0 and self._pool.idle_slots() == before:
                self._finish("burst")
        except BrokerError as exc:
            self._backoff.record_failure(exc)


class MaxJobsCheck:
    """Stops a worker whose children have started the maximum number of jobs."""

    interval_ms = 50

    def __init__(self, control: ControlPage, max_jobs: int, finish: Callable[[str], None]) -> None:
        self._control = control
        self._max_jobs = max_jobs
        self._finish = finish

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Check the number of started jobs."""
        if self._control.permits_used >= self._max_jobs:
            self._finish("max_jobs")


class Autoscaler:
    """Scales the number of children between the minimum and the maximum of ``worker_autoscale``.

    The number grows when jobs are waiting but no child is waiting for a job. Each tick at most doubles it, so that a
    short backlog does not start all children. If jobs wait because of a rate limit or global concurrency, children are
    waiting, so no more are started. The number shrinks by the number of children that were not needed during the
    keepalive (30 s by default, as in Celery). Children with the fewest jobs are stopped first; they finish their jobs.

    Attributes:
        limits: The minimum and the maximum, which may be changed.
    """

    interval_ms = 1_000

    def __init__(  # noqa: PLR0913, PLR0917 - one for each part that it connects
        self,
        pool: ChildPool,
        limits: Autoscale,
        keepalive_ms: int,
        per_child: int,
        count_jobs: Callable[[], int],
        bus: Bus,
        backoff: ReconnectBackoff,
    ) -> None:
        self._pool = pool
        self.limits = limits
        self._keepalive_ms = keepalive_ms
        self._per_child = per_child
        self._count_jobs = count_jobs
        self._bus = bus
        self._backoff = backoff
        self._min_free: int | None = None
        self._shrink_at_ms = 0

    def tick(self, now_ms: int, _missed: int, /) -> None:
        """Compare the children with the jobs, and start or stop children."""
        free = self._pool.free_slots(self._per_child)
        self._resize(self._pool.target)  # the limits may have been changed
        if self._pool.is_paused or self._backoff.is_active or free is None:
            self._min_free = None
        elif free == 0:
            self._min_free = None
            self._grow()
        elif self._min_free is None:
            self._min_free = free
            self._shrink_at_ms = now_ms + self._keepalive_ms
        else:
            self._min_free = min(self._min_free, free)
            if now_ms >= self._shrink_at_ms:
                self._resize(self._pool.target - self._min_free // self._per_child)
                self._min_free = None

    def _grow(self) -> None:
        target = self._pool.target
        if target >= self.limits.maximum:
            return
        try:
            self._resize(target + min(target, self._count_jobs()))
        except BrokerError as exc:
            self._backoff.record_failure(exc)

    def _resize(self, target: int) -> None:
        target = max(self.limits.minimum, min(self.limits.maximum, target))
        if target != self._pool.target:
            self._pool.resize(target)
            self._bus.emit(ConcurrencyChanged(self._pool.target, "autoscale"))


R = TypeVar("R")
T = TypeVar("T")

_NO_TIME_LEFT: Final = "the worker is stopping, and Redis has not replied in time"


class CallLimits:
    """The time until which the supervisor's clients may wait for Redis; without a limit, for their own timeouts.

    A supervisor that waits for Redis handles no signals and kills no children, so without this a shutdown would take
    as long as the timeouts of all calls that follow each other. The timer interrupts a call that is already waiting:
    the system call ends early only if a signal handler raises an exception. A client then raises
    ``BrokerUnavailableError``.

    Attributes:
        beat: Records progress; called before each call, because a turn of the loop may make many.
    """

    def __init__(self, primary: KnownPrimary | None = None, beat: Callable[[], None] = lambda: None) -> None:
        self._primary = primary
        self.beat = beat
        self._waiting = self._is_over = False
        self._patience_ms = self._give_up_ms = 0

    def client(self, client: SyncClient) -> SyncClient:
        """Return a client whose calls these limits end, with ``BrokerUnavailableError``."""
        return cast("SyncClient", _LimitedClient(client, self))

    def end_calls_in(self, timeout_ms: int | None) -> None:
        """End all calls at that time, also those that start later; ``None`` for no limit. Replaces an earlier limit.

        A signal handler may call this.
        """
        self._is_over = False
        self._patience_ms = 0
        if timeout_ms is not None:
            signal.signal(signal.SIGALRM, self._on_alarm)
        signal.setitimer(signal.ITIMER_REAL, 0 if timeout_ms is None else max(1, timeout_ms) / 1000)

    def end_calls_without_reply_in(self, patience_ms: int) -> None:
        """End calls if Redis has not replied for that long, from now on; replaces :meth:`end_calls_in`.

        No sentinels are asked any more while Redis replies: they may hang although Redis does not.
        """
        self.end_calls_in(None)
        if self._primary is not None:
            self._primary.stop_checks()
        self._patience_ms = patience_ms
        self._give_up_ms = mono_ms() + patience_ms

    @property
    def has_given_up(self) -> bool:
        """Whether Redis has not replied within the time of :meth:`end_calls_without_reply_in`."""
        return self._patience_ms > 0 and mono_ms() >= self._give_up_ms

    def run(self, client: SyncClient, call: Callable[[], T]) -> T:
        """Make a call of a client within the limits."""
        if self._patience_ms:
            client.set_deadline(self._give_up_ms)
        result = self.interrupt(call)
        if self._patience_ms:
            self._give_up_ms = mono_ms() + self._patience_ms
        return result

    def interrupt(self, wait: Callable[[], T]) -> T:
        """Wait within the limit of :meth:`end_calls_in`, which raises ``BrokerUnavailableError``, without a client."""
        self.beat()
        if self._is_over:
            raise BrokerUnavailableError(_NO_TIME_LEFT)
        self._waiting = True
        try:
            return wait()
        except _TimeOver as exc:
            raise BrokerUnavailableError(_NO_TIME_LEFT) from exc
        finally:
            self._waiting = False

    def _on_alarm(self, _number: int, _: FrameType | None) -> None:
        self._is_over = True
        if self._waiting:
            raise _TimeOver


class _TimeOver(BaseException):
    """Ends a wait. No ``BrokerError``, after which a client would go on with another sentinel or node."""


class _LimitedClient:
    """A supervisor's client; see :class:`CallLimits`. It has the methods of ``SyncClient`` that a supervisor needs."""

    def __init__(self, client: SyncClient, limits: CallLimits) -> None:
        self._client = client
        self._limits = limits

    def run(self, call: Call[R]) -> R:
        return self._limits.run(self._client, lambda: self._client.run(call))

    def run_many(self, calls: Iterable[Call[Any]]) -> list[Any]:
        return self._limits.run(self._client, lambda: self._client.run_many(calls))

    def run_on_all_nodes(self, call: Call[R]) -> list[R]:
        return self._limits.run(self._client, lambda: self._client.run_on_all_nodes(call))

    def try_many(self, calls: Sequence[Call[Any]], packed: Sequence[bytes] | None = None) -> list[Any]:
        return self._limits.run(self._client, lambda: self._client.try_many(calls, packed))

    def send_packed(self, packed: Sequence[bytes]) -> list[Any]:
        return self._limits.run(self._client, lambda: self._client.send_packed(packed))

    def dry_run(self, calls: Sequence[Call[Any]]) -> list[Any] | None:
        return self._limits.run(self._client, lambda: self._client.dry_run(calls))

    @property
    def safe_url(self) -> str:
        return self._client.safe_url

    def close(self) -> None:
        self._client.close()


_PING_MS: Final = 10_000
"""How often the other connections are used. All are used at once while Redis is unavailable."""
_MAX_CONNECTIONS: Final = 64
_SHARE_OF_CLIENTS: Final = 16

SUPERVISOR_TIMEOUT_MS: Final = 3_000
"""Timeout of each of the supervisor's calls, during which it handles neither signals nor dead children."""


class NamedConnections:
    """Keeps one named connection per queue open, and detects when Redis is unavailable or available again.

    BullMQ identifies a queue's workers by the names of connections (``CLIENT SETNAME``), and a connection has one name.
    Of a worker with many queues, only the first ones have a connection, because the server's other clients need theirs.

    It uses the first connection twice a second, to look for requests to this worker: one command for both kinds.

    During an outage a reply does not suffice, because a Redis that is read-only or out of memory still replies to it.

    Attributes:
        has_requests: Whether there may be orders to this worker, or revoked jobs in its first queue.
    """

    interval_ms = 500

    def __init__(
        self,
        connect: Callable[[str], SyncClient],
        broker: Broker,
        queues: Sequence[str],
        worker_id: str,
        backoff: ReconnectBackoff,
    ) -> None:
        self._connect = connect
        self._broker = broker
        self._worker_id = worker_id
        self._backoff = backoff
        self._queue_count = 0
        self._most = _MAX_CONNECTIONS
        self._clients: list[SyncClient] = []
        self._pings: list[Call[object]] = []
        for queue in queues:
            self.add_queue(broker.keys(queue))
        keys = broker.keys(queues[0])
        self._write_probe: Call[object] = command("SET", keys.probe, "", "XX")
        self._look = has_requests(keys, worker_id)
        self.has_requests = True
        self._next = 1
        self._all_used = False

    def add_queue(self, keys: QueueKeys) -> None:
        """Let another queue have a connection, too, if that is possible."""
        self._queue_count += 1
        if len(self._clients) < self._most:
            self._clients.append(self._connect(keys.client_name(self._worker_id)))
            # In a cluster, a command with a key, so that only the node that has the queue shows the connection.
            is_single = self._broker.topology is None
            self._pings.append(command("PING") if is_single else command("EXISTS", keys.probe))
            self._all_used = False

    def limit(self, max_clients: int | None) -> int:
        """Limit the connections to a share of the server's clients; return how many queues have none."""
        if max_clients is not None:
            self._most = min(_MAX_CONNECTIONS, max(1, max_clients // _SHARE_OF_CLIENTS))
            del self._clients[self._most :], self._pings[self._most :]
        return self._queue_count - len(self._clients)

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Look for requests, and keep the connections open."""
        try:
            for index in self._to_use():
                try:
                    if index == 0:
                        self._look_for_requests()
                    else:
                        self._clients[index].run(self._pings[index])
                except BrokerError as exc:
                    if exc.node is None:
                        raise  # otherwise, the other nodes of the cluster may be available
        except BrokerError as exc:
            self._backoff.record_failure(exc)
        else:
            self._all_used = True
            if not self._backoff.is_active or self._accepts_writes():
                self._backoff.reset()

    def _to_use(self) -> Sequence[int]:
        """Return the indexes of the connections to use now: the first, and some of the others in turn."""
        others = len(self._clients) - 1
        if self._backoff.is_active or not self._all_used or not others:
            return range(others + 1)
        count = -(-others * self.interval_ms // _PING_MS)
        start = self._next
        self._next = start + count
        return [0, *(1 + (index - 1) % others for index in range(start, self._next))]

    def _look_for_requests(self) -> None:
        try:
            self.has_requests = self._clients[0].run(self._look)
        except BrokerAuthError as exc:
            if exc.handshake_failed:
                raise
            self.has_requests = True  # only some keys are forbidden: each service reports its own
            self._clients[0].run(self._pings[0])

    def _accepts_writes(self) -> bool:
        """Whether Redis accepts writes: ``SET … XX`` on a key that does not exist changes nothing."""
        try:
            self._clients[0].run(self._write_probe)
        except (BrokerNotReadyError, BrokerOutOfMemoryError):
            return False
        except BrokerError:
            return True  # another error, unrelated to writes
        return True

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            client.close()


_CHECK_MS: Final = 1_000


class PrimaryCheck:
    """Ends the worker's use of a primary that was replaced, even if it still replies.

    During a planned failover and in a network partition, the old primary executes calls, but its writes will be lost.
    Every client of the supervisor and of the children compares what it knew when it connected with what this service
    passes to it, after each reply.
    """

    interval_ms = 50

    def __init__(self, endpoint: Endpoint, primary: KnownPrimary, control: ControlPage, limits: CallLimits) -> None:
        self._endpoint = endpoint
        self._primary = primary
        self._limits = limits
        primary.check_ms = _CHECK_MS
        primary.publish(control.set_primary)

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Read the events of all sentinels, and ask one of them every second."""
        with suppress(BrokerUnavailableError):
            self._limits.interrupt(lambda: discovery.refresh(self._endpoint))
            self._primary.record_events()


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
        self._pool = pool
        self._ticker = ticker
        self._recovery = recovery
        self._limits = limits
        self._process_spec = process_spec
        self._signals = process_spec.signals
        self._config = config
        self._bus = bus
        self._started_ms = mono_ms()
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
            self._limits.beat()
            if names := self._signals.pop_all():
                for name in names:
                    getattr(self, name)()
                self._limit_calls()
            self._reap()
            self._ticker.run_due()
            wait_ms = self._maintain()
        self._bus.emit(WorkerStopped(int(self._exit_code), self.uptime_ms))
        return self._exit_code

    def warm_shutdown(self) -> None:
        """Acquire no more jobs; running jobs may finish until the deadline. A second call is a cold shutdown."""
        if self.restarting:
            self.restarting = False  # the worker is stopping already; only the restart is cancelled
        elif self._state is ProcessState.RUN or self._finishing:
            self._start_shutdown("warm")
        else:
            self.cold_shutdown()

    @property
    def uptime_ms(self) -> int:
        """How long ago the worker started."""
        return mono_ms() - self._started_ms

    @property
    def is_running(self) -> bool:
        """Whether the worker is not stopping."""
        return self._state is ProcessState.RUN

    def shut_down(self, *, cold: bool) -> bool:
        """Stop as after a signal, with the usual deadline; return False if the worker was stopping already."""
        if cold and self._state < ProcessState.TERMINATE:
            self.cold_shutdown()
            return True
        if self.is_running or self._finishing:
            self._start_shutdown("warm")
            self._limit_calls()
            return True
        return False

    def resize(self, target: int) -> None:
        """Change the number of children."""
        self._pool.resize(target)
        self._bus.emit(ConcurrencyChanged(self._pool.target, "control"))

    def finish(self, reason: str) -> None:
        """Acquire no more jobs, and stop when the running ones have finished, however long they take.

        A signal sets the usual deadline.
        """
        if self._state is ProcessState.RUN:
            self._start_shutdown(reason, finishing=True)
            self._finishing = True
            self._kill_at_ms = None
            self.end_by_ms = None
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
        self._kill_at_ms = None
        self.end_by_ms = mono_ms() + _AFTER_KILL_MS
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
        """Close when the jobs of all children are finished, or after a timeout if Redis is unavailable."""
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
