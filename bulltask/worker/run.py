"""Starts a worker: checks the server, then builds the supervisor's objects. Begin with :func:`run_worker`.

This module, ``app.py``, ``child.py`` and ``in_process.py`` create the long-lived objects and connect them.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bulltask.app import App
from bulltask.config.celery_settings import CELERY_SETTINGS
from bulltask.config.config import SETTINGS, Config
from bulltask.config.process import anonymous_file, life_line, memory_kib, name_process
from bulltask.config.settings import CONFIG_VARIABLE, ENV_PREFIX, FILE_VARIABLES
from bulltask.config.urls import redact_command
from bulltask.jobs.clock import mono_ms
from bulltask.jobs.errors import (
    BrokerAuthError,
    BrokerConfigError,
    BrokerError,
    ConfigError,
    ScriptIntegrityError,
    did_you_mean,
)
from bulltask.jobs.fields import KEEP_FAILED
from bulltask.jobs.names import EVERY_QUEUE, bullmq_name, check_queue_name
from bulltask.lua import loader
from bulltask.observe.bus import Bus
from bulltask.observe.counters import MetricsListener, MetricsMemory
from bulltask.observe.events import ChildStarted, RedisReconnected, WorkerRestarting, WorkerStarted, WorkerStopping
from bulltask.observe.log import LogListener, configure_logging, listener_errors, worker_id
from bulltask.observe.signals import worker_init
from bulltask.registry.task import close_connections
from bulltask.transport.broker import (
    MIN_REDIS_VERSION,
    ServerSettings,
    count_runnable_jobs,
    count_unfinished_jobs,
    read_queue_versions,
    read_server_settings,
)
from bulltask.transport.call import QueueKeys, SyncClient
from bulltask.transport.permissions import CLUSTER, check_permissions, metrics_commands, worker_commands
from bulltask.transport.produce import PROTOCOL_VERSION
from bulltask.transport.scripts.add import write_queue_meta
from bulltask.worker.async_loop import jobs_per_child, slots_per_child
from bulltask.worker.beat import Beat, BeatWorker, read_entries
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.child import (
    ChildPlan,
    child_bus,
    find_executors,
    forget_exit_handlers,
    metrics_memory,
    renew_executors,
    run_child,
)
from bulltask.worker.child_pool import (
    ChildPool,
    Descendants,
    ForkLauncher,
    IdleCheck,
    Launcher,
    MemoryCheck,
    SpawnLauncher,
    StackCollector,
    choose_launcher,
    reap_inherited,
)
from bulltask.worker.fleet import IncompatibleJobs, QueueCheck, RateLimitCheck, StateReport, own_version
from bulltask.worker.health import SLOTS_NAME, HealthReport, Pulse, Vitals
from bulltask.worker.helpers import GuardProcess, HelperProcess, HookProcess, MetricsProcess, OutboxProcess, WorkerInfo
from bulltask.worker.limits import Canceller, RevocationCheck, TimeLimitCheck
from bulltask.worker.locks import Heartbeat, StalledCheck
from bulltask.worker.orders import OrderCheck, Orders
from bulltask.worker.recovery import Recovery, Takeover
from bulltask.worker.slots import BUSY, ExitCode, ProcessState, Slots, WakeupPipe
from bulltask.worker.spark_tasks import missing_dependencies
from bulltask.worker.spawned import SpawnSpec
from bulltask.worker.supervisor import (
    SIGNAL_PATIENCE_MS,
    STOP_METHODS,
    SUPERVISOR_TIMEOUT_MS,
    Autoscaler,
    BurstCheck,
    CallLimits,
    MaxJobsCheck,
    NamedConnections,
    PrimaryCheck,
    ProcessSpec,
    Service,
    Supervisor,
    Ticker,
)

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

__all__ = ["StartupCheck", "StopConditions", "default_queues", "run_worker"]


_BULLMQ: Final = re.compile(r"bullmq:(\d+)\.")
NON_SETTING_VARIABLES: Final = (
    *(f"{ENV_PREFIX}{name}" for name in ("APP", "DASHBOARD_", "TEST_")),
    CONFIG_VARIABLE,
    *FILE_VARIABLES.values(),
)
"""Prefixes of environment variables that are not settings."""


class StartupCheck:
    """Connects to Redis and checks it before the first child starts.

    Attributes:
        max_clients: How many clients the server allows, if that is known.
        version: The server's version.
    """

    def __init__(
        self,
        client: SyncClient,
        keys: Sequence[QueueKeys],
        config: Config,
        logger: FilteringBoundLogger,
        backoff: ReconnectBackoff,
        connections: int = 1,
    ) -> None:
        self._client = client
        self._keys = keys
        self._config = config
        self._logger = logger
        self._backoff = backoff
        self._connections = connections
        self.max_clients: int | None = None
        self.version = ""

    def run(self, wait: Callable[[float], None], stopped: Callable[[], bool]) -> ExitCode | None:
        """Wait for Redis, check it, and store the queues' metadata; return an exit code if the worker cannot start.

        ``wait`` takes milliseconds, and ends with a signal; ``stopped`` says whether the worker was asked to stop.
        """
        if not self._check_scripts():
            return ExitCode.FAILED
        self._check_environment()
        self._check_lock_settings()
        while True:
            try:
                self._check_redis()
            except (BrokerAuthError, BrokerConfigError) as exc:
                # One line for the operator; a traceback would not help.
                rejected = isinstance(exc, BrokerAuthError)
                event = "Redis rejected this worker" if rejected else "This worker cannot use this Redis server"
                self._logger.error(event, error=str(exc))  # noqa: TRY400
                return ExitCode.BROKER_UNUSABLE
            except BrokerError as exc:
                pause_ms = self._backoff.record_failure(exc)
                if self._backoff.is_exhausted:
                    return ExitCode.BROKER_UNREACHABLE
                wait(pause_ms)
            else:
                self._backoff.reset()
                return None
            if stopped():
                return ExitCode.OK

    def _check_redis(self) -> None:
        server = read_server_settings(self._client)
        self.version = ".".join(map(str, server.version))
        if server.version < MIN_REDIS_VERSION:
            self._logger.warning("Redis is older than 6.2; upgrade it", version=self.version)
        if server.eviction != "noeviction":
            self._logger.warning(
                "Redis may evict jobs silently when it is out of memory; set maxmemory-policy to noeviction",
                maxmemory_policy=server.eviction,
            )
        needed = worker_commands() + (() if self._config.metrics_port is None else metrics_commands())
        if self._config.broker_url.kind == "cluster":
            needed += CLUSTER
        check_permissions(self._client, self._keys[0], needed)
        self._check_connections(server)
        self.check_queues(self._keys)

    def check_queues(self, queues: Sequence[QueueKeys]) -> bool:
        """Store the queues' metadata, and warn of what their other clients do; return False if all of them are new."""
        max_events = self._config.max_events
        written = self._client.run_many(
            [call for keys in queues for call in write_queue_meta(keys, PROTOCOL_VERSION, max_events)]
        )
        self._check_hash_tags(queues)
        for keys, bullmq in zip(queues, read_queue_versions(self._client, queues), strict=True):
            self._check_other_versions(keys, bullmq)
        return not all(written)

    def _check_connections(self, server: ServerSettings) -> None:
        """Raise ``BrokerConfigError`` if this worker's connections would shut other clients out."""
        self.max_clients = server.max_clients
        if server.max_clients is None or server.max_clients - server.connected >= self._connections:
            return
        raise BrokerConfigError(
            f"This worker needs {self._connections} connections, but Redis at {self._client.safe_url} allows "
            f"{server.max_clients} (maxclients), and {server.connected} clients are connected: raise maxclients, "
            "reduce worker_concurrency, or start fewer workers"
        )

    def _check_scripts(self) -> bool:
        """Check all Lua scripts now: if a modified script were noticed later, outcomes could not be written."""
        try:
            loader.all_scripts()
        except ScriptIntegrityError as exc:
            self._logger.error("A Lua script in the bulltask package was modified", error=str(exc))  # noqa: TRY400
            return False
        return True

    def _check_lock_settings(self) -> None:
        if self._config.renew_ms > self._config.lock_ms // 2:
            self._logger.warning(
                "lock_renew_time is more than half of lock_duration: reduce it, or a few failed renewals lose a lock",
                lock_renew_time=self._config.renew_ms / 1000,
                lock_duration=self._config.lock_ms / 1000,
            )

    def _check_environment(self) -> None:
        """Warn about misspelled environment variables, which would otherwise be ignored silently."""
        for variable in sorted(os.environ):
            name = variable.removeprefix(ENV_PREFIX).lower()
            if name in SETTINGS or not variable.startswith(ENV_PREFIX) or variable.startswith(NON_SETTING_VARIABLES):
                continue
            celery = CELERY_SETTINGS.get(name)
            hint = f": {celery.reason}" if celery else did_you_mean(name, SETTINGS)
            self._logger.warning(f"An environment variable matches no setting and is ignored{hint}", variable=variable)

    def _check_hash_tags(self, queues: Sequence[QueueKeys]) -> None:
        """Warn about jobs in ``{emails}`` if this worker processes ``emails``, and vice versa: these are two queues."""
        tagged = self._config.queue_hash_tag
        processed = [keys for keys in queues if "{" not in keys.queue]
        others = [QueueKeys(keys.prefix, bullmq_name(keys.queue, hash_tag=not tagged)) for keys in processed]
        try:
            counts = count_unfinished_jobs(self._client, others)
        except BrokerAuthError:  # a user for these queues may not read the other ones, and needs not
            return
        for keys, other, jobs in zip(processed, others, counts, strict=True):
            if jobs:
                self._logger.warning(
                    f"Jobs are waiting in the queue of the same name {'without' if tagged else 'with'} a hash tag, "
                    "which this worker does not process; if other clients use that name, set "
                    f"queue_hash_tag={not tagged} (BULLTASK_QUEUE_HASH_TAG)",
                    queue=keys.queue,
                    processed=keys.base,
                    other=other.base,
                    jobs=jobs,
                )

    def _check_other_versions(self, keys: QueueKeys, version: str) -> None:
        """Warn about BullMQ 6 clients, which pause queues differently: mixed with BullMQ 5, jobs can be lost."""
        if (match := _BULLMQ.match(version)) and int(match[1]) > 5:
            self._logger.warning(
                "A client with BullMQ 6 or newer is using this queue. If the queue is paused, resume it only with "
                "bulltask or with that client: if a BullMQ 5 client resumes it, jobs may be lost "
                "(docs/reference/mixed-versions.md)",
                queue=keys.queue,
                version=version,
            )


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a worker stops without a signal.

    Attributes:
        burst: Stop when no job in the queues can run now, and the worker is not running any.
        max_jobs: Stop when the children have started this many jobs and these have finished; ``None`` for no limit.
    """

    burst: bool = False
    max_jobs: int | None = None


def run_worker(
    app: App,
    queues: Sequence[str] = (),
    *,
    app_spec: str | None = None,
    process_spec: ProcessSpec | None = None,
    until: StopConditions = StopConditions(),
) -> ExitCode:
    """Run a worker in this process until it is stopped, as ``bulltask worker`` does.

    Args:
        app: The app. This function freezes its settings and imports its tasks.
        queues: The queues' names in the app. If empty: the default queue and the queues of the app's tasks.
        app_spec: The value of ``-A`` for this app, from which spawned children import it.
        process_spec: How the process was started. Create it before the app is imported, if possible.
        until: When the worker stops without a signal.

    Returns:
        The exit code. After ``HUP`` the function does not return: the process runs its command line again.

    Raises:
        ConfigError: A setting is invalid.
        InvalidNameError: A queue name is invalid.
    """
    for queue in queues:
        check_queue_name(queue)
    process_spec = process_spec or ProcessSpec()
    app._load_tasks()
    names = list(dict.fromkeys([*(queues or default_queues(app)), *process_spec.added_queues]))
    return _Assembly(app, names, app_spec, process_spec, until).run()


def default_queues(app: App) -> tuple[str, ...]:
    """Return ``task_queues``, or the default queue and the queues of the app's tasks."""
    if app._config.queues:
        return tuple(dict.fromkeys(app._config.queues))
    queues = list(app.tasks.queues)
    if app._config.routes is not None:
        queues += app._config.routes.queues(task.name for task in app.tasks.values() if not task._options.queue)
    return tuple(dict.fromkeys([app._config.default_queue, *queues]))


_STARTING_TURN_MS: Final = 1_000


class _Assembly:
    """The parts of one worker, created in the order of their dependencies."""

    def __init__(
        self,
        app: App,
        queues: list[str],
        app_spec: str | None,
        process_spec: ProcessSpec,
        until: StopConditions,
    ) -> None:
        config = app._config
        self.entries = read_entries(app)
        self.until = until
        self.app = app
        # Many parts have these two lists, which grow when a queue is added (_add_queue): its index never changes.
        self.queues = queues
        self.queues_at_start = tuple(queues)
        self.app_spec = app_spec
        self.config = config
        self.worker_id = worker_id(config.worker_name)
        name_process("")
        self.logger = configure_logging(level=config.log_level, worker_id=self.worker_id, log_format=config.log_format)
        self.wakeup_pipe = WakeupPipe()
        self.process_spec = process_spec
        self.signals = process_spec.signals
        self.bus = Bus(on_error=listener_errors(self.logger))
        self.log = LogListener(self.logger)
        self.log.attach(self.bus)
        self.backoff = ReconnectBackoff(self.bus, config)
        self.broker = app._broker
        self.keys = [self.broker.keys(queue) for queue in queues]
        self.beat: Beat | None = None
        self.orders: Orders | None = None
        self.broker.clock.on_change = self._report_clock_change
        # Includes room for children that TTIN adds, because the shared memory cannot grow.
        self.max_children = 2 * (config.autoscale.maximum if config.autoscale else config.children) + 2
        self.slots_fd = anonymous_file(SLOTS_NAME)
        self.slots = Slots(self.max_children, slots_per_child(app), self.slots_fd)
        self.slots.health.open(self.worker_id)
        self.pulse = Pulse(self.slots.health, process_spec.manager)
        self.limits = CallLimits(self.broker.endpoint.primary, self.pulse.beat)
        self.client = self._client()
        self.named_connections = NamedConnections(self._client, self.broker, queues, self.worker_id, self.backoff)
        self.info = WorkerInfo(self.worker_id, app, self.queues_at_start, config.concurrency)
        self.hook_process = HookProcess(self.info, self.bus, self._is_ready, self._close_inherited, self.logger)
        self.outbox_process = OutboxProcess(app, self._close_inherited, self.logger)
        self.guard = GuardProcess(self.worker_id, self.slots, self.slots_fd, self._close_inherited, self.logger)
        self.metrics_fd = None if config.metrics_port is None else anonymous_file("bulltask-metrics")
        self.memory = self._metrics_memory()
        self.counts = None if self.memory is None else self.memory.block(0)
        if self.counts is not None:
            MetricsListener(self.counts, self.queues).attach(self.bus)
        self.exporter = self._exporter()
        self.redis_version = ""
        self.end_by_ms: int | None = None
        self.executors: Sequence[Any] = ()
        self.primary_check = self._primary_check()  # before the first connection, which would use a thread otherwise

    def run(self) -> ExitCode:
        worker_init.send(self.info)
        close_connections()  # those that the app's modules or receivers have opened
        self.signals.install(self.wakeup_pipe)
        self.signals.on_stop = lambda: self.limits.end_calls_in(SIGNAL_PATIENCE_MS)
        try:
            if self.exporter is not None:
                self.exporter.start()  # so that metrics and probes do not wait for Redis
            self.startup_check = StartupCheck(
                self.client, self.keys, self.config, self.logger, self.backoff, self._needed_connections()
            )
            failure = self.startup_check.run(self._wait_for_redis, self._is_asked_to_stop)
            self.redis_version = self.startup_check.version
            if failure is None:
                self._limit_named_connections(self.startup_check.max_clients)
                self.hook_process.start()
                code, restart = self._supervise()
            else:
                code, restart = failure, not self.signals.contains(STOP_METHODS) and self.signals.contains({"restart"})
        finally:
            self.limits.end_calls_in(None)  # the timer would survive a restart
            for helper in self._helpers():
                helper.request_stop()
            for helper in self._helpers():
                helper.wait(self.end_by_ms)
            self._close_inherited()
        return self._restart() if restart else code

    def _is_asked_to_stop(self) -> bool:
        return self.signals.contains({*STOP_METHODS, "restart"})

    def _wait_for_redis(self, timeout_ms: float) -> None:
        """Wait before the next attempt to reach Redis at the start, and do meanwhile what cannot wait for it."""
        self.pulse.report(Vitals(failing_since_ms=self.backoff.failing_since_ms))
        until_ms = mono_ms() + timeout_ms
        while not self._is_asked_to_stop():
            self.pulse.beat()
            if self.exporter is not None:
                self.exporter.tick(0, 0)
            reap_inherited({helper.pid for helper in self._helpers()})
            if (left_ms := until_ms - mono_ms()) <= 0:
                return
            self.signals.wait(min(left_ms, _STARTING_TURN_MS))

    def _report_clock_change(self, changed_ms: int) -> None:
        if changed_ms < 0 and self.beat is not None:
            self.beat.check_now()
        self.logger.warning(
            "The clock of Redis was set, or this machine was suspended",
            seconds=changed_ms / 1000,
            hint="Delayed jobs and schedules follow the clock: "
            + ("some start early" if changed_ms > 0 else "most wait until it has reached their time again"),
        )

    def _needed_connections(self) -> int:
        """Return how many connections the worker has if it waits for jobs, with one that Node.js sees."""
        children = self.config.children if self.config.autoscale is None else self.config.autoscale.maximum
        beside = [self.exporter is not None, bool(self.app._outboxes) and self.config.outbox_relay]
        return 2 * children + 2 + sum(beside)

    def _limit_named_connections(self, max_clients: int | None) -> None:
        if missing := self.named_connections.limit(max_clients):
            self.logger.info(
                "Not all queues have a connection: Node.js's getWorkers() does not list this worker for the others",
                queues=len(self.queues),
                connections=len(self.queues) - missing,
                hint="Start several workers with fewer queues each if you need it there",
            )

    def _is_ready(self) -> bool:
        return any(block.run_state is ProcessState.RUN for block in self.slots.children)

    def _restart(self) -> ExitCode:
        self.bus.emit(WorkerRestarting(redact_command(self.process_spec.command)))
        if self.orders is not None:
            before, cancelled = self.process_spec.added_queues, self.orders.cancelled
            added = [*before, *self.queues[len(self.queues_at_start) :]]
            self.process_spec.added_queues = [queue for queue in added if queue not in cancelled]
        try:
            self.process_spec.restart()
        except OSError as exc:
            self.logger.error("The worker could not restart", error=str(exc))  # noqa: TRY400 - a traceback would not help
            return ExitCode.FAILED
        return ExitCode.OK  # a stop signal arrived just before the restart

    def _supervise(self) -> tuple[ExitCode, bool]:
        config, bus, backoff, keys, client = self.config, self.bus, self.backoff, self.keys, self.client
        launcher = self._launcher()
        take_notes = (lambda index: memory.block(index + 1).take_notes()) if (memory := self.memory) else lambda _: ()
        stacks = StackCollector(bus)
        pool = ChildPool(self.slots, launcher, stacks, bus, config.children, self._descendants(), take_notes)
        recovery = Recovery(keys, client, self.broker.clock, config, bus, backoff, self.counts)
        heartbeat = Heartbeat(keys, pool.views, client, config, bus, backoff)
        stalled_check = StalledCheck(self.broker, keys, heartbeat.has_renewed, client, bus, backoff)
        if self.app.conf.is_url_from_celery:
            self.logger.info("broker_url comes from the environment variable CELERY_BROKER_URL")
        self._list_tasks()
        self._warn_about_unregistered_tasks()
        self._warn_about_unknown_queues()
        self._warn_about_missing_spark()
        self._warn_about_memory_limits()
        if config.keep_failed == KEEP_FAILED:
            self.logger.info(
                "Failed jobs are removed after a week, and the oldest beyond 100,000 of a queue",
                hint="Set remove_on_fail to false to keep them all, as BullMQ does, or to {'age': seconds, 'count': n}",
            )
        self.beat = beat = self._create_beat()
        queue_check = QueueCheck(self.app, self.queues, self.worker_id, client, backoff, self.logger)
        report = StateReport(
            self.app,
            keys,
            self.worker_id,
            pool,
            self.slots.control,
            self.until.max_jobs,
            client,
            backoff,
            self.logger,
        )
        canceller = Canceller(pool, bus)
        time_limits = TimeLimitCheck(pool, canceller.cancel)
        has_requests = lambda: self.named_connections.has_requests  # noqa: E731
        revocation_check = RevocationCheck(self.broker, keys, canceller.cancel_jobs, client, bus, backoff, has_requests)
        bus.subscribe(WorkerStopping, self.pulse.stopping)
        bus.subscribe(ChildStarted, lambda _: self.pulse.beat())  # forking many children of a large app takes long
        rate_limit_check = RateLimitCheck(self.app, keys, self.worker_id, client, backoff, self.logger)
        autoscaler = self._autoscaler(pool)
        incompatible_jobs = IncompatibleJobs(
            keys, list(self.app.tasks), client, self.broker.clock, backoff, self.logger
        )
        parts = (self.named_connections, revocation_check, incompatible_jobs, rate_limit_check, report)
        self.orders = orders = Orders(
            self.app,
            self.queues,
            pool,
            self.slots.control,
            self.log,
            bus,
            lambda: supervisor,
            next(iter(autoscaler), None),
            rate_limit_check.store_changed,
            lambda queue: self._add_queue(queue, [part.add_queue for part in parts]),
        )
        services: list[Service] = [
            heartbeat,
            Takeover(pool.blocks, self.slots.control, keys, client, backoff),
            time_limits,
            canceller,
            *([] if config.hard_memory_kib is None else [MemoryCheck(pool, config.hard_memory_kib)]),
            self.named_connections,
            revocation_check,
            recovery,
            *([] if config.skip_stalled_check else [stalled_check]),
            *self.primary_check,
            beat,
            incompatible_jobs,
            rate_limit_check,
            queue_check,
            OrderCheck(keys[0], self.worker_id, has_requests, orders.execute, client, self.broker.clock, backoff, bus),
            report,  # after the orders, so that it knows at once what they have changed
            *self._helpers(),
            IdleCheck(pool, config, lambda: backoff.is_active),
            HealthReport(self.pulse, lambda: self._vitals(pool)),
            *autoscaler,
            *self._stopping(pool, lambda reason: supervisor.finish(reason)),  # noqa: PLW0108 - defined below
        ]
        ticker = Ticker(services, backoff, bus)
        url = self.broker.endpoint.safe_url
        children, versions = config.threads or config.children, tuple(self._versions())
        bus.emit(WorkerStarted(self.worker_id, self.app.name, self.queues_at_start, children, url, versions))
        supervisor = Supervisor(pool, ticker, recovery, self.process_spec, config, bus, self.limits)
        code = supervisor.run()
        self.limits.end_calls_in(SIGNAL_PATIENCE_MS)
        beat.leave()
        queue_check.leave()
        report.leave()
        self.end_by_ms = supervisor.end_by_ms
        return code, supervisor.restarting

    def _add_queue(self, queue: str, add: Sequence[Callable[[QueueKeys], None]]) -> bool:
        """Process another queue, too, once the children are replaced; return False if no client has used it yet.

        A child is not told of the queue, but replaced: what it does for one queue differs from what it does for
        several, and so do its connections. The supervisor continues, because if it restarted, it would interrupt jobs
        that take longer than ``shutdown_timeout``, and forget all other orders.
        """
        keys = self.broker.keys(queue)
        is_known = self.startup_check.check_queues([keys])
        if self.memory is not None and not self.memory.add_queue(queue):
            raise ConfigError("no more queues can be added: restart this worker with all of them in -Q")
        self.queues.append(queue)
        self.keys.append(keys)
        for add_to_part in add:
            add_to_part(keys)
        self._limit_named_connections(self.startup_check.max_clients)
        if self.exporter is not None:
            self.exporter.renew()
        return is_known

    def _vitals(self, pool: ChildPool) -> Vitals:
        return Vitals(
            started=True,
            closing=self.slots.control.stopping,
            paused=pool.is_paused,
            children=pool.target,
            ready=pool.ready,
            stopped_pid=next((pid for pid, state in pool.halted.items() if state == "stopped"), 0),
            failing_since_ms=self.backoff.failing_since_ms,
        )

    def _versions(self) -> Iterator[tuple[str, str]]:
        yield "bulltask", own_version()
        yield "python", platform.python_version()
        yield "redis", self.redis_version
        package = (self.app_spec or "").partition(":")[0].partition(".")[0]
        with suppress(PackageNotFoundError, ValueError):  # most apps are not installed as packages
            yield "app", str(getattr(sys.modules.get(package), "__version__", None) or version(package))

    def _create_beat(self) -> Beat:
        worker = BeatWorker(self.worker_id, self.queues, self._program())
        beat = Beat(self.app, self.entries, self.client, self.backoff, self.logger, worker)
        self.bus.subscribe(RedisReconnected, beat.check_now)
        return beat

    def _program(self) -> str:
        """Return what identifies the program of an app without a name: machine, directory and import path."""
        directory = ""
        with suppress(OSError):  # it was deleted
            directory = str(Path.cwd())
        return "\0".join((socket.gethostname(), directory, self.app_spec or sys.argv[0]))

    def _client(self, name: str | None = None) -> SyncClient:
        """Return a client of the supervisor."""
        return self.limits.client(self.broker.worker_client(name, timeout_ms=SUPERVISOR_TIMEOUT_MS))

    def _helpers(self) -> list[HelperProcess]:
        return [self.outbox_process, self.hook_process, self.guard, *([] if self.exporter is None else [self.exporter])]

    def _primary_check(self) -> list[Service]:
        endpoint = self.broker.endpoint
        return (
            []
            if endpoint.primary is None
            else [PrimaryCheck(endpoint, endpoint.primary, self.slots.control, self.limits)]
        )

    def _autoscaler(self, pool: ChildPool) -> list[Autoscaler]:
        limits, keepalive_ms = self.config.autoscale, self.config.autoscale_keepalive_ms
        if limits is None:
            return []
        per_child = jobs_per_child(self.app)
        return [Autoscaler(pool, limits, keepalive_ms, per_child, self._count_jobs, self.bus, self.backoff)]

    def _stopping(self, pool: ChildPool, finish: Callable[[str], None]) -> list[Service]:
        services: list[Service] = []
        if self.until.max_jobs is not None:
            self.slots.control.limit_jobs(self.until.max_jobs)
            services.append(MaxJobsCheck(self.slots.control, self.until.max_jobs, finish))
        if self.until.burst:
            services.append(BurstCheck(pool, self._count_jobs, self.backoff, finish))
        return services

    def _count_jobs(self) -> int:
        cancelled = () if self.orders is None else self.orders.cancelled
        keys = [keys for keys in self.keys if keys.queue not in cancelled]
        return count_runnable_jobs(self.client, keys, self.broker.clock.now_ms())

    def _list_tasks(self) -> None:
        if names := sorted(self.app.tasks):
            self.logger.info("Registered tasks", tasks=names)
        else:
            self.logger.warning(
                "This app has no tasks, so this worker cannot run any jobs: import its task modules with include, -I "
                "or autodiscover_tasks",
                app=self.app.name,
            )

    def _warn_about_unregistered_tasks(self) -> None:
        for entry in self.entries or ():
            if self.app.tasks.get(entry.job.name) is None:
                self.logger.warning(
                    "The task of a beat_schedule entry is not registered in this app",
                    entry=entry.name,
                    task=entry.job.name,
                    hint="Check the task's name, or import its module: its jobs wait until a worker has the task",
                )

    def _warn_about_unknown_queues(self) -> None:
        # Only a warning, because the settings belong to the app, and another worker of the app may process the queue.
        for queue in (self.config.limits or {}).keys() - {EVERY_QUEUE, *self.queues, *default_queues(self.app)}:
            self.logger.warning(
                "A queue in limiter is used neither by this worker nor by a task of this app",
                queue=queue,
                hint="Check the queue's name: the limit applies only to jobs in this queue",
            )

    def _warn_about_missing_spark(self) -> None:
        tasks = [task.name for task in self.app.tasks.values() if task._options.spark]
        if tasks and (missing := missing_dependencies()):
            self.logger.warning("Tasks with spark=True will fail in this worker", tasks=tasks, error=missing)

    def _warn_about_memory_limits(self) -> None:
        used_kib = memory_kib()  # a fork begins with the same memory
        for name, limit_kib, effect in (
            ("worker_max_memory_per_child", self.config.max_memory_kib, "every child is replaced after one job"),
            ("worker_hard_memory_limit", self.config.hard_memory_kib, "every child is killed when it runs a job"),
        ):
            if limit_kib is not None and limit_kib <= used_kib:
                self.logger.warning(
                    "A child exceeds this limit before its first job",
                    setting=name,
                    limit_kib=limit_kib,
                    memory_kib=used_kib,
                    hint=f"Raise the limit: {effect}",
                )

    def _descendants(self) -> Descendants:
        self.guard.start()
        return Descendants(self.worker_id, lambda: [helper.pid for helper in self._helpers()])

    def _launcher(self) -> Launcher:
        self.executors = find_executors()
        spawn = None if self.app_spec is None or self.slots_fd is None else SpawnLauncher(self._write_spawn_spec)
        return choose_launcher(self.config.start_method, ForkLauncher(self._run_child), spawn, self.logger.warning)

    def _run_child(self, index: int, parent_pid: int) -> None:
        plan = ChildPlan(
            app=self.app,
            queues=self.queues,
            worker_id=self.worker_id,
            index=index,
            block=self.slots.children[index],
            control=self.slots.control,
            memory=self.memory,
            bus=lambda counts: child_bus(self.logger, counts, self.queues, self.app),
            close_inherited=self._leave_supervisor,
        )
        run_child(plan, parent_pid)

    def _write_spawn_spec(self, index: int) -> tuple[int, tuple[int, ...]]:
        assert self.app_spec is not None
        assert self.slots_fd is not None
        spec = SpawnSpec(
            app=self.app_spec,
            overrides=self.app.conf.overrides(),
            path=sys.path,
            queues=list(self.queues_at_start),
            added=self.queues[len(self.queues_at_start) :],
            worker_id=self.worker_id,
            index=index,
            parent_pid=os.getpid(),
            slots_fd=self.slots_fd,
            children=self.max_children,
            per_child=self.slots.per_child,
            metrics_fd=self.metrics_fd,
            parent_fd=life_line(),
        )
        shared = (spec.slots_fd, spec.metrics_fd, spec.parent_fd)
        return spec.write(), tuple(fd for fd in shared if fd is not None)

    def _leave_supervisor(self) -> None:
        """Part with what a forked child has inherited."""
        forget_exit_handlers()
        renew_executors(self.executors)
        self._close_inherited()

    def _close_inherited(self) -> None:
        """Close the supervisor's connections and pipes; a forked child calls this too."""
        self.client.close()
        self.named_connections.close()
        self.broker.close()  # open if the app sent jobs while it was being imported
        self.wakeup_pipe.close()
        for helper in self._helpers():
            helper.close_inherited()

    def _metrics_memory(self) -> MetricsMemory | None:
        """Return the counters of all processes; ``None`` when metrics are off."""
        if self.config.metrics_port is None:
            return None
        return metrics_memory(self.app, self.queues, self.max_children, self.metrics_fd)

    def _slots_in_use(self) -> tuple[int, int]:
        """Return how many jobs the running children can run at a time, and how many they are running."""
        running = [block for block in self.slots.children if block.pid]
        busy = sum(slot.state in BUSY for block in running for slot in block.slots())
        return len(running) * jobs_per_child(self.app), busy

    def _exporter(self) -> MetricsProcess | None:
        if self.memory is None:
            return None
        from bulltask.queue.overview import read_figures  # noqa: PLC0415 - only for metrics

        client = self.broker.worker_client(timeout_ms=SUPERVISOR_TIMEOUT_MS)
        return MetricsProcess(
            self.config,
            self.memory,
            self.worker_id,
            lambda: read_figures(client, self.keys),
            self._slots_in_use,
            {"/livez": self.slots.health.not_alive, "/readyz": self.slots.health.not_ready},
            self._close_inherited,
            self.logger,
        )
