"""Orders to a live worker: ``bulltask control`` and ``inspect``, ``app.control``.

Begin with :class:`OrderCheck`, the supervisor's service that takes orders from Redis, and :class:`Orders`, whose
methods execute them. What the children must know is a :class:`Changes` in shared memory: a signal makes
:class:`ChildChanges` read it, so an order costs nothing per job, and needs no reply from a child.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from bulltask.app import App
from bulltask.config.config import LOG_LEVELS
from bulltask.config.parsers import autoscale, task_rate
from bulltask.jobs.clock import ServerClock, mono_ms
from bulltask.jobs.errors import BrokerError, BulltaskError, DecodeError, did_you_mean
from bulltask.jobs.fields import TimeLimits
from bulltask.jobs.names import check_queue_name
from bulltask.observe.bus import Bus
from bulltask.observe.events import OrderExecuted, OrderRejected, shorten
from bulltask.observe.log import LogListener
from bulltask.transport.call import Call, QueueKeys, SyncClient
from bulltask.transport.orders import Order, Reply, post_reply, take_orders
from bulltask.worker.broker_backoff import QueueBackoff, ReconnectBackoff
from bulltask.worker.slots import ControlPage, SlotState

if sys.platform != "win32":  # there, tasks that run in the test's or the caller's process import this module
    import resource

if TYPE_CHECKING:  # a spawned child does not need them
    from bulltask.worker.child_pool import ChildPool
    from bulltask.worker.supervisor import Autoscaler, Supervisor

__all__ = ["Changes", "ChildChanges", "OrderCheck", "Orders"]


_REMEMBERED: Final = 1_000
_MAX_NAMES: Final = 1_000
_MAX_JOBS: Final = 1_000
_TEXT_CHARS: Final = 500


class OrderError(Exception):
    """The order cannot be executed; the message goes to its sender."""


class OrderCheck:
    """Takes orders from Redis when there may be some, executes them, and replies.

    It needs no child, so it replies although all children are busy. An order that any client may have written cannot
    harm the worker: the number of orders and their size are limited, and an error is a reply.
    """

    interval_ms = 500

    def __init__(  # noqa: PLR0913, PLR0917 - one for each part that it connects
        self,
        keys: QueueKeys,
        worker_id: str,
        may_have: Callable[[], bool],
        execute: Callable[[str, Mapping[str, Any]], object],
        client: SyncClient,
        clock: ServerClock,
        backoff: ReconnectBackoff,
        bus: Bus,
    ) -> None:
        self._keys = keys
        self._worker_id = worker_id
        self._may_have = may_have
        self._execute = execute
        self._client = client
        self._clock = clock
        self._backoff = backoff
        self._bus = bus
        self._executed: deque[str] = deque(maxlen=_REMEMBERED)

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Execute the orders that have arrived, the oldest first; some of them if there are many."""
        if self._backoff.is_active or not self._may_have():
            return  # orders wait in Redis until they expire
        try:
            taken = self._client.run(take_orders(self._keys, self._worker_id))
        except BrokerError as exc:
            if not QueueBackoff.affects_queue(exc):  # not if only this key cannot be read
                self._backoff.record_failure(exc)
            return
        for raw in taken:
            # Each reply is sent before the next order is executed, which may take a moment.
            if calls := self._reply(raw):
                with suppress(BrokerError):
                    self._client.try_many(calls)

    def _reply(self, raw: bytes | int) -> list[Call[Any]]:
        """Execute an order, and return the calls that reply to it; none if there is nowhere to reply."""
        if isinstance(raw, int):
            self._bus.emit(OrderRejected("", "", "", f"not an order: {raw} bytes are too long"))
            return []
        try:
            order = Order.from_json(raw)
        except DecodeError as exc:
            self._bus.emit(OrderRejected("", "", "", str(exc)))
            return []
        if order.id in self._executed:
            return []  # a client has sent it twice
        self._executed.append(order.id)
        reply = self._answer(order)
        if reply.error:
            self._bus.emit(OrderRejected(order.name, order.sender, order.app, shorten(reply.error, _TEXT_CHARS)))
        elif order.name not in INSPECTIONS:
            arguments = shorten(json.dumps(order.arguments), _TEXT_CHARS)
            self._bus.emit(OrderExecuted(order.name, arguments, order.sender, order.app, str(reply.value)))
        return post_reply(self._keys, order.id, reply)

    def _answer(self, order: Order) -> Reply:
        value: object = None
        error = ""
        if order.expires_ms <= self._clock.now_ms():
            error = "the order has expired"
        else:
            try:
                value = self._execute(order.name, order.arguments)
            except (OrderError, BulltaskError) as exc:
                error = str(exc)
            except Exception as exc:  # noqa: BLE001 - whatever an order contains, the worker must survive
                error = f"{type(exc).__name__}: {exc}"
        return Reply(worker=self._worker_id, value=value, error=error)


INSPECTIONS: Final = frozenset(("active", "active_queues", "conf", "ping", "registered", "reserved", "stats"))
"""Orders that change nothing. They are not logged."""


@dataclass(slots=True)
class Changes:
    """What was changed in this worker at run time, and applies to its children, also to those that start later.

    Attributes:
        rates: The rate limits of tasks, as in the option ``rate_limit``.
        time_limits: The soft and the hard time limits of tasks in seconds, ``None`` for the app's.
        cancelled: The queues from which no jobs are fetched.
        log_level: The log level; ``""`` for the setting.
    """

    rates: dict[str, str | float] = field(default_factory=dict)
    time_limits: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    log_level: str = ""

    def to_json(self) -> bytes:
        """Return the changes as JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    def apply_to(self, app: App) -> None:
        """Change the options of the tasks in this process."""
        for name in {*self.rates, *self.time_limits}:
            task = app.tasks[name]
            changed: dict[str, Any] = {}
            if name in self.rates:
                changed["rate_limit"] = self.rates[name]
            if name in self.time_limits:
                changed["soft_time_limit"], changed["time_limit"] = self.time_limits[name]
            task._set_options(replace(task._options, **changed))


class ChildChanges:
    """Applies the changes in a child: when it starts, and whenever a signal announces others."""

    def __init__(
        self,
        control: ControlPage,
        app: App,
        cancel_queues: Callable[[Collection[str]], object],
        change_tasks: Callable[[], object],
        set_log_level: Callable[[str], object],
    ) -> None:
        self._control = control
        self._app = app
        self._cancel_queues = cancel_queues
        self._change_tasks = change_tasks
        self._set_log_level = set_log_level
        self._number = 0
        self._log_level = ""

    def apply(self) -> None:
        """Apply the changes since the last call; a signal handler calls this. It may end a wait for jobs."""
        if self._control.changes_number == self._number:
            return
        self._number = self._control.changes_number
        changes = Changes(**json.loads(self._control.changes()))
        with suppress(BulltaskError, KeyError):  # the supervisor has checked them with the same code
            changes.apply_to(self._app)
        self._change_tasks()
        if changes.log_level != self._log_level:
            self._log_level = changes.log_level
            self._set_log_level(changes.log_level)
        self._cancel_queues(changes.cancelled)


class Orders:
    """The orders, by name. Their results, and arguments, are JSON values; the names are Celery's."""

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a worker that orders concern
        self,
        app: App,
        queues: Sequence[str],
        pool: ChildPool,
        control: ControlPage,
        log: LogListener,
        bus: Bus,
        supervisor: Callable[[], Supervisor],
        autoscaler: Autoscaler | None,
        rate_changed: Callable[[str], object],
        add_queue: Callable[[str], bool],
    ) -> None:
        self._app = app
        self._config = app._config
        self._queues = queues
        self._pool = pool
        self._control = control
        self._log = log
        self._bus = bus
        self._supervisor = supervisor
        self._autoscaler = autoscaler
        self._rate_changed = rate_changed
        self._add_queue = add_queue
        self._changes = Changes()

    @property
    def cancelled(self) -> Collection[str]:
        """The queues from which no jobs are fetched at the moment."""
        return self._changes.cancelled

    def execute(self, name: str, arguments: Mapping[str, Any]) -> object:
        """Execute an order, and return its result; raises ``OrderError`` or ``ConfigError`` if that is impossible."""
        order = _ORDERS.get(name)
        if order is None:
            raise OrderError(f"this worker does not know the order {name!r:.100}{did_you_mean(name, _ORDERS)}")
        unknown = arguments.keys() - _PARAMETERS[name]
        if unknown:
            raise OrderError(f"{name} has no argument {min(unknown)!r:.100} in this worker's version of bulltask")
        return order(self, **arguments)

    # ---- questions ----

    def ping(self) -> object:
        """Reply."""
        return "pong"

    def active(self) -> object:
        """Return the jobs that the children are running, those that run longest first."""
        return self._jobs({SlotState.ACTIVE, SlotState.FINISHING})

    def reserved(self) -> object:
        """Return the jobs that children have prefetched."""
        return self._jobs({SlotState.PREFETCHED})

    def registered(self) -> object:
        """Return the names of the tasks."""
        return sorted(self._app.tasks)[:_MAX_NAMES]

    def active_queues(self) -> object:
        """Return the queues from which jobs are fetched."""
        keys = self._app._broker.keys
        return [
            {"name": queue, "key": keys(queue).base[:-1]}
            for queue in self._queues[:_MAX_NAMES]
            if queue not in self._changes.cancelled
        ]

    def conf(self, with_defaults: bool = False) -> object:
        """Return the settings, without secrets; with ``with_defaults`` also those that were not set."""
        return self._app.conf.shown(with_defaults=bool(with_defaults))

    def stats(self) -> object:
        """Return figures of the worker and its processes."""
        config, usage = self._config, resource.getrusage(resource.RUSAGE_SELF)
        limits = config.time_limits
        return {
            "pid": os.getpid(),
            "hostname": socket.gethostname(),
            "app": self._app.name,
            "uptime": self._supervisor().uptime_ms // 1000,
            "state": self._control.run_state,
            "pool": {
                "implementation": "threads" if config.threads else "prefork",
                "max-concurrency": self._pool.target,
                "processes": self._pool.pids,
                "max-tasks-per-child": config.max_tasks_per_child,
                "timeouts": [limits.soft_s, limits.hard_s],
                "autoscale": None if self._autoscaler is None else list(self._autoscaler.limits),
            },
            "broker": {"transport": "redis", "url": self._app._broker.endpoint.safe_url},
            "jobs": self._pool.running(),
            "changed": asdict(self._changes),
            "rusage": {"utime": usage.ru_utime, "stime": usage.ru_stime, "maxrss": usage.ru_maxrss},
        }

    def _jobs(self, states: Collection[SlotState]) -> list[dict[str, object]]:
        now_ms, now_epoch_ms, keys = mono_ms(), self._app._broker.clock.now_ms(), self._app._broker.keys
        found = [
            {
                "id": view.job_id,
                "queue": self._queues[view.queue_index],
                "key": keys(self._queues[view.queue_index]).base[:-1],
                "time_start": (now_epoch_ms - now_ms + view.since_ms) / 1000,
                "worker_pid": pid,
            }
            for pid, view in self._pool.views_by_pid()
            if view.state in states
        ]
        return sorted(found, key=lambda job: job["time_start"])[:_MAX_JOBS]  # type: ignore[arg-type,return-value]

    # ---- the worker ----

    def shutdown(self, cold: bool = False) -> object:
        """Stop the worker: warm, or cold, which kills the children."""
        running = self._pool.running()
        if not self._supervisor().shut_down(cold=bool(cold)):
            return "it is stopping already"
        return f"it is stopping, with {running} running jobs" if running else "it is stopping"

    def pause(self) -> object:
        """Acquire no jobs until ``resume``."""
        self._check_running()
        if self._pool.is_paused:
            return "it was paused already"
        self._supervisor().pause()
        return "it is paused: it acquires no jobs, and running jobs continue"

    def resume(self) -> object:
        """Acquire jobs again."""
        self._check_running()
        if not self._pool.is_paused:
            return "it was not paused"
        self._supervisor().resume()
        return "it acquires jobs again"

    def pool_grow(self, n: int = 1) -> object:
        """Add children."""
        return self._resize(self._pool.target + _count(n))

    def pool_shrink(self, n: int = 1) -> object:
        """Remove children when their jobs have ended."""
        return self._resize(self._pool.target - _count(n))

    def pool_restart(self) -> object:
        """Replace the children: new ones start now, and the old ones exit when their jobs have ended."""
        self._check_running()
        count = self._pool.replace()
        return f"{count} {'child is' if count == 1 else 'children are'} being replaced"

    def autoscale(self, maximum: int | None = None, minimum: int | None = None) -> object:
        """Change the limits of the number of children; ``None`` keeps one."""
        self._check_running()
        if self._autoscaler is None:
            raise OrderError(
                "this worker does not scale its children: use pool_grow or pool_shrink, or start it with --autoscale"
            )
        before = self._autoscaler.limits
        maximum = before.maximum if maximum is None else maximum
        limits = autoscale((maximum, before.minimum if minimum is None else minimum), "autoscale")
        if limits.maximum > self._pool.max_children:
            raise OrderError(
                f"this worker was started for at most {self._pool.max_children} children: restart it with --autoscale"
            )
        self._autoscaler.limits = limits
        return f"it has {limits.minimum} to {limits.maximum} children"

    def log_level(self, level: str) -> object:
        """Change the log level of all its processes."""
        if not isinstance(level, str) or level.lower() not in LOG_LEVELS:
            raise OrderError(f"invalid log level {level!r:.50}: use one of {', '.join(LOG_LEVELS)}")
        self._change(replace(self._changes, log_level=level.lower()))
        self._log.set_level(level, self._bus)
        return f"its log level is {level.lower()}"

    # ---- tasks ----

    def rate_limit(self, task_name: str, rate_limit: str | float | None) -> object:
        """Change the rate limit of a task, for jobs that have not started."""
        self._check_task(task_name)
        if self._config.disable_rate_limits:
            raise OrderError("rate limits are off in this worker (worker_disable_rate_limits)")
        task_rate(rate_limit, "rate_limit")
        value = 0 if rate_limit is None else rate_limit
        self._change_tasks(replace(self._changes, rates={**self._changes.rates, task_name: value}))
        self._rate_changed(task_name)
        return f"the rate limit of {task_name} is {value}" if value else f"{task_name} has no rate limit"

    def time_limit(self, task_name: str, soft: float | None = None, hard: float | None = None) -> object:
        """Change the time limits of a task, for attempts that have not started; ``None`` means those of the app."""
        self._check_task(task_name)
        TimeLimits.of(soft, hard).with_defaults(self._config.time_limits).check(f"task {task_name}")
        limits = {**self._changes.time_limits, task_name: (soft, hard)}
        self._change_tasks(replace(self._changes, time_limits=limits))
        shown = ("the app's" if limit is None else f"{limit:g} s" for limit in (soft, hard))
        return "the soft and hard time limits of {} are {} and {}".format(task_name, *shown)

    # ---- queues ----

    def cancel_consumer(self, queue: str) -> object:
        """Fetch no more jobs from a queue; running jobs continue."""
        if queue not in self._queues:
            raise OrderError(f"it does not consume the queue {queue!r:.200}{did_you_mean(str(queue), self._queues)}")
        if queue in self._changes.cancelled:
            return f"it fetches no jobs from {queue} already"
        if len(self._changes.cancelled) + 1 == len(self._queues):
            raise OrderError(f"{queue} is its only queue: pause the worker instead (bulltask control pause)")
        self._change(replace(self._changes, cancelled=[*self._changes.cancelled, queue]))
        return f"it fetches no jobs from {queue}"

    def add_consumer(self, queue: str) -> object:
        """Fetch jobs from a queue again, after :meth:`cancel_consumer`, or also from another queue."""
        if queue in self._changes.cancelled:
            left = [name for name in self._changes.cancelled if name != queue]
            self._change(replace(self._changes, cancelled=left))
            return f"it fetches jobs from {queue} again"
        if queue in self._queues:
            return f"it consumes {queue} already"
        if not isinstance(queue, str):
            raise OrderError(f"queue must be the name of a queue, not {queue!r:.50}")
        check_queue_name(queue)
        self._check_running()
        keys = self._app._broker.keys
        for other in self._queues:
            if keys(other).base == keys(queue).base:
                raise OrderError(f"it has this queue under the name {other!r}: use that")
        similar = did_you_mean(queue, {*self._queues, *self._app.tasks.queues} - {queue})
        is_known = self._add_queue(queue)
        self._pool.replace()
        note = "" if is_known else f"; no client has used this queue before{similar}"
        return f"it consumes {queue}, too: its children are being replaced, and running jobs continue{note}"

    # ---- parts ----

    def _check_running(self) -> None:
        if not self._supervisor().is_running:
            raise OrderError("the worker is stopping")

    def _check_task(self, name: str) -> None:
        if not isinstance(name, str) or name not in self._app.tasks:
            raise OrderError(f"it has no task {name!r:.200}{did_you_mean(str(name), self._app.tasks)}")

    def _resize(self, target: int) -> str:
        self._check_running()
        if self._autoscaler is not None:
            raise OrderError("worker_autoscale sets the number of children: use autoscale")
        largest = self._pool.max_children
        if not 1 <= target <= largest:
            raise OrderError(
                f"it must have 1 to {largest} children, and has {self._pool.target}"
                + (": start it with a larger --concurrency" if target > largest else "")
            )
        self._supervisor().resize(target)
        return f"it has {target} children" if target > 1 else "it has 1 child"

    def _change(self, changes: Changes) -> None:
        """Pass changes to the children."""
        if not self._control.set_changes(changes.to_json()):
            raise OrderError("too much was changed since this worker was started: change the code, and restart it")
        self._changes = changes
        self._pool.notify_all()

    def _change_tasks(self, changes: Changes) -> None:
        changes.apply_to(self._app)  # raises before anything is changed, if an option is invalid
        self._change(changes)


def _count(number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise OrderError(f"n must be a positive number, not {number!r:.50}")
    return number


_ORDERS: Final[Mapping[str, Callable[..., object]]] = {
    name: method
    for name, method in vars(Orders).items()
    if callable(method) and not name.startswith("_") and name != "execute"
}
_PARAMETERS: Final = {
    name: set(method.__code__.co_varnames[1 : method.__code__.co_argcount]) for name, method in _ORDERS.items()
}
