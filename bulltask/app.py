"""``App``, what a user holds: settings, tasks, sends, results, queues, the schedule and hooks.

Its public methods come first, in the order in which a project meets them. Those with an underscore serve the rest of
the package: tasks and results use them through :class:`bulltask.registry.protocols.Sender`, workers and commands
directly.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, ParamSpec, TypeVar, Unpack, cast, overload
from weakref import WeakSet

from bulltask import embedded
from bulltask.config.config import Config
from bulltask.config.parsers import parse_names, wrap_secrets
from bulltask.config.settings import Settings, constructor_settings
from bulltask.config.urls import SecretUrl, secret_url
from bulltask.jobs.categories import Categorizer
from bulltask.jobs.clock import Duration
from bulltask.jobs.errors import BrokerUnavailableError, ConfigError, InvalidNameError, warn_user
from bulltask.jobs.job import NewJob, PlannedJob
from bulltask.jobs.names import check_scheduler_id
from bulltask.jobs.schedules import crontab
from bulltask.observe.bus import Event, Listeners
from bulltask.observe.hooks import DjangoConnections, Lifespan, LifespanFunction, Middleware, MiddlewareList, SendHooks
from bulltask.observe.signals import Signal
from bulltask.registry.call import NamedTask
from bulltask.registry.canvas import (
    Callee,
    Canvas,
    Signature,
    handles,
    is_call,
    is_overridden,
    is_single,
    job_of,
    pass_overrides,
    record_call,
    recorded,
    send_call,
    send_recorded,
)
from bulltask.registry.context import running_task
from bulltask.registry.options import BatchTaskKeywords, CallKeywords, CallOptions, SignatureKeywords, TaskKeywords
from bulltask.registry.protocols import EagerRunner, OutboxRelay, ResultReader
from bulltask.registry.request import current_job, current_task_class, origin_of_jobs_sent_by, sent_by, set_current
from bulltask.registry.results import AsyncResult
from bulltask.registry.task import AnyTask, AsyncTask, installed_packages, run_checks, set_up_django
from bulltask.registry.task import Task as SyncTask
from bulltask.registry.tasks import (
    SHARED,
    BatchTaskDecorator,
    BoundTaskDecorator,
    ClassTaskDecorator,
    TaskDecorator,
    Tasks,
    builtin_tasks,
    decorate,
    import_related,
    register_instance,
    use_class,
)
from bulltask.transport.broker import Broker
from bulltask.transport.streams import NEWEST

if TYPE_CHECKING:
    from bulltask.config.setting_types import AppOptions
    from bulltask.queue.aio.control import AsyncControl, AsyncInspect
    from bulltask.queue.aio.events import AsyncQueueEvents
    from bulltask.queue.aio.flow import AsyncFlowProducer
    from bulltask.queue.aio.queue import AsyncQueue
    from bulltask.queue.context import AddOptions, QueueContext
    from bulltask.queue.control import Destination
    from bulltask.queue.sync.control import Control, Inspect
    from bulltask.queue.sync.events import QueueEvents
    from bulltask.queue.sync.flow import FlowProducer
    from bulltask.queue.sync.queue import Queue
    from bulltask.registry.canvas_plan import CanvasPlan

__all__ = ["App", "Celery"]

P = ParamSpec("P")
R = TypeVar("R")
B = TypeVar("B", bound=AnyTask[..., Any])
T = TypeVar("T", bound=AnyTask[..., Any])
E = TypeVar("E", bound=Event)
L = TypeVar("L", bound=LifespanFunction)

# An ``async def`` is a function as well, so each pair of overloads below overlaps; the first match wins.
_AsyncFunction = Callable[P, Coroutine[Any, Any, R]]

# Imported by name, because they are in layers above.
_CLI: Final = "bulltask.cli.main"
_EAGER: Final = "bulltask.worker.in_process"
_UNATTENDED: Final = "bulltask.testing.inline"

_NO_SERVER: Final = SecretUrl("redis://tests-without-a-server.invalid:6379/0")
"""For tests in eager mode, which need no server unless they use queues."""


class App:
    """A bulltask application.

    Args:
        name: The app's name, shown in logs.
        broker_url: ``redis://``, ``rediss://``, ``redis+cluster://``, ``redis+sentinel://``, ``unix://``, or
            ``embedded://`` for the project's embedded server on this machine (for development). The environment
            variable ``BULLTASK_BROKER_URL`` takes precedence.
        settings: Any other setting of :mod:`bulltask.config.config`, or an argument of Celery's constructor:
            ``broker`` and ``backend`` (``broker_url`` and ``result_backend``); ``changes`` (a dictionary of settings);
            ``config_source`` and ``namespace`` (as for :meth:`config_from_object`); ``task_cls`` (the class of tasks
            without a ``base``, or its name, ``"module:Class"``); ``set_as_current`` (if false, the app does not send
            the tasks of ``shared_task``).

    Attributes:
        name: The app's name.
        conf: The settings.
        tasks: The tasks by name.
        Task: The class of tasks without a ``base``.
        categorizer: Decides which errors are transient: ``app.categorizer.register(MyError, ErrorCategory.TRANSIENT)``.
        on_after_configure, on_after_finalize: Celery's signals, for functions that call :meth:`add_periodic_task`. Each
            is sent once in every process that loads the tasks, after all of them have been imported. Receivers can
            still change settings and the schedule. The sender is the app. An exception in a receiver prevents the
            worker from starting.

    Raises:
        ConfigError: A setting has an unknown name or an invalid value.
        TypeError: An argument of Celery's constructor has no meaning here.
    """

    task_cls: type[AnyTask[..., Any]] | str | None = None
    """For a subclass to set: the default of the argument ``task_cls``."""

    _instances: ClassVar[WeakSet[App]] = WeakSet()
    _when_created: ClassVar[list[Callable[[App], object]]] = []
    """What instruments all apps of a process, also those that are created later."""

    def __init__(
        self, name: str = "app", broker_url: str | SecretUrl | None = None, **settings: Unpack[AppOptions]
    ) -> None:
        self.name = name
        self._directory = embedded.calling_directory()
        broker_url, settings = secret_url(broker_url), cast("AppOptions", wrap_secrets(settings))
        self.conf = Settings(constructor_settings(broker_url, settings))
        self.conf.name_app(name)
        if (source := settings.get("config_source")) is not None:
            self.config_from_object(source, namespace=settings.get("namespace"))
        self._task_class = (
            cast("type[AnyTask[..., Any]] | str | None", settings.get("task_cls")) or self.task_cls or SyncTask
        )
        self.tasks = Tasks(SHARED, builtin_tasks(lambda: self, lambda name: self.tasks[name]))
        self._autodiscover: list[Callable[[], list[str]]] = []
        self.conf.when_frozen(lambda _config: self.Task)  # imports it if it was given by name
        self.conf.when_frozen(self.tasks.configure)
        self.categorizer = Categorizer()
        self.on_after_configure = Signal("on_after_configure")
        self.on_after_finalize = Signal("on_after_finalize")
        self._periodic_tasks: dict[str, dict[str, Any]] = {}
        self._has_set_up = False
        self._listeners = Listeners()
        self._middleware = MiddlewareList()
        self._lifespans = Lifespan()
        self._outboxes: list[OutboxRelay] = []
        self._send_hooks = SendHooks(self._middleware, lambda: self._config)
        self._lock = threading.RLock()
        self._connections: Broker | None = None
        self._pid = os.getpid()
        self.conf.when_switched(self._connect_again)
        if settings.get("set_as_current", True):
            self.set_current()
        self._instances.add(self)
        for instrument in self._when_created:
            instrument(self)

    def __repr__(self) -> str:
        return f"<App {self.name}: {len(self.tasks)} tasks>"

    # ---- settings ----------------------------------------------------------------------------------------------------

    def config_from_object(
        self, obj: object, *, namespace: str | None = None, silent: bool = False, force: bool = True
    ) -> None:
        """Read settings from an object (Celery's method); they are read immediately.

        Args:
            obj: A dictionary, a module, a class, any object with attributes, or the name of one: ``"shop.settings"``,
                ``"django.conf:settings"``. Imported modules, functions, classes and names with a leading underscore are
                not settings.
            namespace: Read only names that begin with it: ``CELERY`` reads ``CELERY_BROKER_URL``. Without it, all
                lower-case names are read.
            silent: Ignore a module that cannot be imported.
            force: Ignored: settings are always read immediately, as with ``force=True`` in Celery.

        Raises:
            ConfigError: A name is unknown (the message suggests a similar name), or a value is invalid.
            ImportError: The module cannot be imported.
        """
        del force
        try:
            self.conf.read_object(obj, namespace)
        except ImportError:
            if not silent:
                raise

    def config_from_envvar(self, variable_name: str, *, silent: bool = False) -> None:
        """Read settings from the module that an environment variable names (Celery's method).

        Raises:
            ConfigError: The variable is not set. Also raises the errors of :meth:`config_from_object`.
        """
        if module := os.environ.get(variable_name):
            self.config_from_object(module, silent=silent)
        elif not silent:
            raise ConfigError(f"the environment variable {variable_name} is not set: set it to the name of a module")

    # ---- tasks -------------------------------------------------------------------------------------------------------

    @property
    def Task(self) -> type[AnyTask[..., Any]]:
        """The class of its tasks that have no ``base``, and of shared tasks while the app is the current one.

        If it is changed, the existing tasks change their class, too. A name, ``"module:Class"``, is imported when the
        first task needs the class, because its module may import the app.

        Raises:
            ConfigError: The name cannot be imported, or a new class does not match the function of a task.
        """
        if isinstance(self._task_class, str):
            module, _, name = self._task_class.replace(":", ".").rpartition(".")
            try:
                self.Task = getattr(import_module(module), name)
            except (AttributeError, ImportError, ValueError) as exc:
                raise ConfigError(f"cannot import task_cls, {self._task_class!r}: {exc}") from exc
        assert not isinstance(self._task_class, str)
        return self._task_class

    @Task.setter
    def Task(self, kind: type[AnyTask[..., Any]]) -> None:
        self._task_class = kind
        is_current = current_task_class() is kind
        tasks = [task for task in self.tasks.values() if is_current or task.name not in SHARED]
        self.tasks.refresh(use_class(tasks, kind))

    @overload
    def task(self, function: _AsyncFunction[P, R], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def task(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...
    @overload
    def task(
        self,
        /,
        *,
        base: type[AnyTask[..., Any]] | None = None,
        name: str | None = None,
        **options: Unpack[BatchTaskKeywords],
    ) -> BatchTaskDecorator: ...
    @overload
    def task(
        self, /, *, bind: Literal[True], base: type[B], name: str | None = None, **options: Unpack[TaskKeywords]
    ) -> ClassTaskDecorator[B]: ...
    @overload
    def task(
        self, /, *, bind: Literal[True], name: str | None = None, **options: Unpack[TaskKeywords]
    ) -> BoundTaskDecorator: ...
    @overload
    def task(
        self,
        /,
        *,
        bind: Literal[False] = False,
        base: type[AnyTask[..., Any]] | None = None,
        name: str | None = None,
        **options: Unpack[TaskKeywords],
    ) -> TaskDecorator: ...

    def task(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        bind: bool = False,
        base: type[AnyTask[..., Any]] | None = None,
        name: str | None = None,
        **options: Any,
    ) -> Any:
        """Turn a function into a task: ``@app.task`` or ``@app.task(queue="mail", …)``.

        Args:
            function: A plain function or an ``async def``.
            bind: Pass a :class:`Context` as the first argument (``self`` in Celery).
            base: The task's class, a subclass of :class:`bulltask.Task`; default: ``task_cls`` of the app. A bound
                function then receives the task itself.
            name: The task's name; default: ``module.function``.
            options: See :class:`bulltask.registry.options.TaskOptions`. ``max_retries=None`` means unlimited
                retries.

        Raises:
            DuplicateTaskError: Another function has this name.
            ConfigError, TypeError: An option has an invalid value or an unknown name.
        """
        return decorate(
            function,
            lambda: self,
            self.tasks.add,
            bind=bind,
            name=name,
            options=options,
            base=base or self.Task,
            is_default=base is None,
        )

    def register_task(self, task: T | type[T]) -> T:
        """Register a task class that defines ``run``, or an instance of it (Celery's ``register_task``).

        Its name is the attribute ``name``; default: ``module.Class``.

        Raises:
            ConfigError: It is not a task class, defines no ``run``, or its methods do not match ``run``.
        """
        instance = task() if isinstance(task, type) else task
        register_instance(instance, lambda: self)
        self.tasks.add(instance)
        return instance

    def autodiscover_tasks(
        self,
        packages: Iterable[str] | Callable[[], Iterable[str]] | None = None,
        related_name: str | None = "tasks",
        force: bool = False,
    ) -> None:
        """Import ``package.tasks`` of each package when a worker starts (Celery's ``autodiscover_tasks``).

        Args:
            packages: Package names, or a function that returns them; default: Django's installed apps.
            related_name: The submodule with tasks; ``None`` imports the packages themselves.
            force: Import them now.
        """
        found = installed_packages if packages is None else packages
        self._autodiscover.append(lambda: import_related(found, related_name))
        if force:
            self._autodiscover[-1]()

    # ---- sending -----------------------------------------------------------------------------------------------------

    def send_task(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[CallKeywords[Any]],
    ) -> AsyncResult[Any]:
        """Send a job by task name, for tasks that this app does not define (Celery's ``send_task``).

        Args:
            name: The task's name.
            args: Positional arguments. If the task is not registered in this app, they are stored as a JSON array and
                cannot be combined with ``kwargs``.
            kwargs: Keyword arguments.
            options: As in :meth:`bulltask.registry.task.AnyTask.apply_async`.
        """
        return send_call(self._task_named(name), args or (), kwargs or {}, options)

    async def asend_task(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[CallKeywords[Any]],
    ) -> AsyncResult[Any]:
        """:meth:`send_task` for asyncio."""
        if self._overrides_send_task:
            send = functools.partial(self.send_task, name, args, kwargs, **options)
            return await send_recorded(*record_call(self._task_named(name), send))
        if "link" in options or "link_error" in options:
            return await self.signature(name, args, kwargs, **options).aapply_async()
        return (await self.asend_many([self._build_job(name, args, kwargs, options)]))[0]

    def send_many(self, calls: Iterable[Signature[Any, Any] | NewJob]) -> list[AsyncResult[Any]]:
        """Send calls in order, one round trip per thousand: ``app.send_many([add.s(1, 2), mail.s("x")])``.

        Raises:
            BrokerError: A round trip failed; the calls from earlier round trips are stored. Calls with a ``job_id`` can
                safely be sent again.
        """
        passed = [recorded(call) for call in calls]
        jobs = [(call, job_of(call)) for call, _ in passed if call is not None]
        sent = iter(handles(self, self.tasks, jobs, self._send([job for _, job in jobs])))
        return [returned if call is None else next(sent) for call, returned in passed]

    async def asend_many(self, calls: Iterable[Signature[Any, Any] | NewJob]) -> list[AsyncResult[Any]]:
        """:meth:`send_many` for asyncio."""
        passed = [recorded(call) for call in calls]
        jobs = [(call, job_of(call)) for call, _ in passed if call is not None]
        sent = iter(handles(self, self.tasks, jobs, await self._asend([job for _, job in jobs])))
        return [returned if call is None else next(sent) for call, returned in passed]

    def signature(
        self,
        name: str | Mapping[str, Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SignatureKeywords[Any]],
    ) -> Signature[Any, Any]:
        """Return a signature by task name, including tasks that this app does not define (Celery's ``signature``).

        Args:
            name: The task's name; or a dictionary of a signature, chain or group: :meth:`Signature.from_dict`.
            args, kwargs: As for :meth:`send_task`.
            options: As for :meth:`send_task`. ``immutable=True`` ignores the result of the previous step.
        """
        if isinstance(name, Mapping):
            return cast(Signature[Any, Any], Signature.from_dict(name, self))
        immutable = bool(options.pop("immutable", False))
        return Signature(self._task_named(name), args, kwargs, options, immutable=immutable)

    def _task_named(self, name: str) -> Callee:
        return self.tasks.get(name) or NamedTask(name, lambda: self)

    # ---- results -----------------------------------------------------------------------------------------------------

    @overload
    def result(self, job_id: str, queue: str | None = None, *, task: None = None) -> AsyncResult[Any]: ...
    @overload
    def result(self, job_id: str, queue: str | None = None, *, task: AnyTask[..., R]) -> AsyncResult[R]: ...

    def result(
        self, job_id: str, queue: str | None = None, *, task: AnyTask[..., Any] | None = None
    ) -> AsyncResult[Any]:
        """Return a handle for any job, including jobs that Node sent.

        Args:
            job_id: The job's id.
            queue: The job's queue; default: the app's default queue.
            task: The job's task, whose type hint determines the type of the result; default: the result is JSON.
        """
        decode = None if task is None else task._codec.result_decoder
        return AsyncResult(job_id, queue or self._config.default_queue, self._results, decode=decode)

    def AsyncResult(self, job_id: str) -> AsyncResult[Any]:
        """Return a handle for a job whose queue is not known (Celery's ``app.AsyncResult``).

        It is the default queue, or a queue of a registered task. If there are several such queues, Redis is queried in
        one round trip, with an ``EXISTS`` for each of them. The call blocks, even in async code. If the queue is known,
        :meth:`result` makes no round trip.

        Raises:
            BrokerError: Redis could not be reached.
        """
        return AsyncResult(job_id, self._queue_of(job_id), self._results)

    # ---- queues ------------------------------------------------------------------------------------------------------

    def queue(self, name: str, *, default_job_options: AddOptions | None = None) -> Queue:
        """Return a queue, for adding and reading jobs, pausing, cleaning, counting …

        Args:
            name: The queue's name, without braces or prefix.
            default_job_options: Default options for jobs added through this queue.
        """
        from bulltask.queue.sync.queue import Queue  # noqa: PLC0415 - see TYPE_CHECKING above

        return Queue(name, context=self._queue_context(name, default_job_options))

    def aqueue(self, name: str, *, default_job_options: AddOptions | None = None) -> AsyncQueue:
        """:meth:`queue` for asyncio; no ``await`` needed."""
        from bulltask.queue.aio.queue import AsyncQueue  # noqa: PLC0415 - see TYPE_CHECKING above

        return AsyncQueue(name, context=self._queue_context(name, default_job_options))

    def _queue_context(self, name: str, default_job_options: AddOptions | None) -> QueueContext:
        from bulltask.queue.context import QueueContext  # noqa: PLC0415 - see TYPE_CHECKING above

        return QueueContext(name, lambda: self._broker, default_job_options)

    def flows(self) -> FlowProducer:
        """Return a flow producer; a flow is a tree of jobs in which a parent runs after its child jobs."""
        from bulltask.queue.sync.flow import FlowProducer  # noqa: PLC0415 - see TYPE_CHECKING above

        return FlowProducer(broker=lambda: self._broker)

    def aflows(self) -> AsyncFlowProducer:
        """:meth:`flows` for asyncio; no ``await`` needed."""
        from bulltask.queue.aio.flow import AsyncFlowProducer  # noqa: PLC0415 - see TYPE_CHECKING above

        return AsyncFlowProducer(broker=lambda: self._broker)

    def events(self, queue: str, *, start: str = NEWEST) -> QueueEvents:
        """Return a reader for a queue's events; close it after use.

        Args:
            queue: The queue's name, without braces or prefix.
            start: Position to start at: ``NEWEST``, ``"0"`` for the oldest stored event, or an event's id.
        """
        from bulltask.queue.sync.events import QueueEvents  # noqa: PLC0415 - see TYPE_CHECKING above

        return QueueEvents(queue, start=start, broker=lambda: self._broker)

    def aevents(self, queue: str, *, start: str = NEWEST) -> AsyncQueueEvents:
        """:meth:`events` for asyncio; call it in the event loop that will read the events."""
        from bulltask.queue.aio.events import AsyncQueueEvents  # noqa: PLC0415 - see TYPE_CHECKING above

        return AsyncQueueEvents(queue, start=start, broker=lambda: self._broker)

    # ---- live workers ------------------------------------------------------------------------------------------------

    @functools.cached_property
    def control(self) -> Control:
        """Orders to live workers, as in Celery: ``app.control.pool_grow(2)``; and ``app.control.revoke(id)``."""
        from bulltask.queue.sync.control import Control  # noqa: PLC0415 - see TYPE_CHECKING above

        return Control(self)

    @functools.cached_property
    def acontrol(self) -> AsyncControl:
        """:attr:`control` for asyncio."""
        from bulltask.queue.aio.control import AsyncControl  # noqa: PLC0415 - see TYPE_CHECKING above

        return AsyncControl(self)

    def inspect(self, destination: Destination = None, timeout: Duration = 2) -> Inspect:
        """Ask the live workers, as in Celery: ``app.inspect().active()``.

        Args:
            destination: Worker ids, or patterns such as ``web-*``; default: all workers.
            timeout: How long to wait for the answers.
        """
        return self.control.inspect(destination, timeout)

    def ainspect(self, destination: Destination = None, timeout: Duration = 2) -> AsyncInspect:
        """:meth:`inspect` for asyncio; no ``await`` needed."""
        return self.acontrol.inspect(destination, timeout)

    # ---- periodic tasks ----------------------------------------------------------------------------------------------

    def add_periodic_task(
        self,
        schedule: Duration | crontab | str,
        sig: Signature[Any, Any] | AnyTask[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
        **options: Unpack[CallKeywords[Any]],
    ) -> str:
        """Add an entry to the schedule, in addition to those of ``beat_schedule`` (Celery's ``add_periodic_task``).

        A worker reads the schedule when it starts, so a task cannot add an entry. Use ``app.queue(…).schedulers`` in a
        task.

        Args:
            schedule: Seconds, a ``timedelta``, ``crontab(…)`` or a cron pattern.
            sig: The call, ``task.s(…)``, or a task.
            args, kwargs: Arguments of the call, before and in addition to its own.
            name: The entry's name, which is also its job scheduler's id; an entry with the same name is replaced.
                Default: the call as text, such as ``shop.add(1, 2)``.
            options: As for ``options`` in an entry of ``beat_schedule``.

        Returns:
            The entry's name.

        Raises:
            TypeError: ``sig`` is neither a signature nor a task, has callbacks, or does not match its task.
            ConfigError: The name is not valid as the id of a job scheduler.
        """
        call = _periodic_call(sig, args, kwargs)
        key = name or repr(call)
        try:
            check_scheduler_id(key)
        except InvalidNameError as exc:
            raise ConfigError(f"{exc}" if name else f"{exc}; pass a name=") from None
        given: dict[str, Any] = {**call.given, **options}
        entry = {"task": call.task.name, "schedule": schedule, "args": call.args, "kwargs": call.kwargs}
        entry["options"] = given
        if name is None and self._periodic_tasks.get(key, entry) != entry:
            warn_user(
                f"the periodic task {key!r:.200} replaces another one with the same call; pass a name= to keep both"
            )
        self._periodic_tasks[key] = entry
        return key

    # ---- hooks -------------------------------------------------------------------------------------------------------

    @overload
    def on(self, kind: type[E], /) -> Callable[[Callable[[E], R]], Callable[[E], R]]: ...
    @overload
    def on(self, kind: type[E], listener: Callable[[E], R], /) -> Callable[[E], R]: ...

    def on(self, kind: type[E], listener: Callable[[E], R] | None = None, /) -> Any:
        """Register a listener for the events of this app's workers: ``@app.on(JobFailed)``.

        The listener is called in the child process that emits the event; for a job's outcome, on the thread that ran
        the job, after Redis has stored the outcome. It should be quick. An exception that it raises is logged and has
        no other effect.

        Args:
            kind: An event class of :mod:`bulltask.events` that children emit; ``ChildEvent`` means all of them.
            listener: Called with the event; omit it to use this method as a decorator. Its return value is ignored.

        Returns:
            The listener, or a decorator.

        Raises:
            ConfigError: Children do not emit such events, ``listener`` is a coroutine function, or the children have
                already started.
        """

        def add(function: Callable[[E], R]) -> Callable[[E], R]:
            self._listeners.add(kind, function)
            return function

        return add if listener is None else add(listener)

    def add_middleware(self, middleware: Middleware) -> None:
        """Call the methods of ``middleware`` before and after every send and every run of this app's jobs.

        Jobs are sent by tasks (``delay`` …), signatures, ``send_task`` and ``send_many``; those of queues, flows and
        job schedulers have no hooks.

        Args:
            middleware: An instance of a subclass of :class:`bulltask.Middleware`.

        Raises:
            ConfigError: It is not one, or has an ``async def`` where a plain method is needed, or the reverse.
        """
        self._middleware.add(middleware)

    def lifespan(self, function: L, /) -> L:
        """Register what async tasks share, such as connection pools: a decorator for an async generator function.

        Each child process enters it before its first job, on the event loop on which its async tasks run, and leaves it
        after the last one. What it yields is :attr:`state`, and ``self.state`` in a bound task. If it raises an
        exception before it yields, the child does not start.

        Raises:
            ConfigError: The app already has a lifespan, or the function has parameters.
        """
        self._lifespans.define(function)
        return function

    @property
    def state(self) -> Any:
        """What the :meth:`lifespan` has yielded in this process, ``None`` before; a test may set it."""
        return self._lifespans.state

    @state.setter
    def state(self, state: Any) -> None:
        self._lifespans.state = state

    # ---- command line ------------------------------------------------------------------------------------------------

    def start(self, argv: Sequence[str] | None = None) -> int:
        """Run a command of ``bulltask`` for this app, without ``-A``: ``app.start(["worker", "-c", "4"])``.

        Args:
            argv: The command and its arguments; default: those of this program.

        Returns:
            The exit code, when the command has ended.

        Raises:
            SystemExit: The arguments are invalid, or the command has failed; the error was printed.
        """
        return cast(int, import_module(_CLI).run_for(self, list(sys.argv[1:] if argv is None else argv)))

    def worker_main(self, argv: Sequence[str] | None = None) -> int:
        """Run a worker in this process: ``app.worker_main(["worker", "--loglevel=info"])``; see :meth:`start`.

        Children are forked from this process, because it may not be possible to import the app (``__main__``).

        Raises:
            ValueError: ``argv`` does not contain ``worker``.
            SystemExit: As for :meth:`start`.
        """
        if "worker" not in (sys.argv if argv is None else argv):
            raise ValueError(
                "argv must contain the command worker: app.worker_main(['worker', …]); app.start() runs other commands"
            )
        return self.start(argv)

    # ---- the current app ---------------------------------------------------------------------------------------------

    def set_current(self) -> None:
        """Make this app the current one, which sends the tasks of ``shared_task`` (Celery's ``set_current``)."""
        set_current(self)
        if not isinstance(self._task_class, str):
            self.tasks.refresh(use_class(SHARED.values(), self._task_class))

    set_default = set_current

    @property
    def current_task(self) -> Any:
        """The running task, ``None`` outside a task: see :data:`bulltask.current_task`."""
        return running_task()

    @property
    def main(self) -> str:
        """Celery's alias of :attr:`name`."""
        return self.name

    # ---- connections -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close idle connections. The app can be used again."""
        if self._connections is not None:
            self._connections.close()

    async def aclose(self) -> None:
        """Close the running event loop's connections, for example when an async web app shuts down.

        Otherwise they are closed with the loop. The app can be used again.
        """
        if self._connections is not None:
            await self._connections.aclose()
            self._connections.close()

    # ---- for the package: what tasks, results and workers use --------------------------------------------------------

    def _load_tasks(self) -> list[str]:
        """Import the modules that contain tasks: ``imports``, ``include`` and ``autodiscover_tasks``.

        A worker calls this method before it forks. The method then calls the receivers of ``on_after_configure`` and
        ``on_after_finalize``.

        If the environment variable ``DJANGO_SETTINGS_MODULE`` is set, Django is set up first, and its system checks
        run, which import the URLconf: tasks may be defined in the modules of views, too. Unusable database connections
        are then closed before and after each task, as Django does for requests.
        """
        modules = [*parse_names(self.conf.imports, "imports"), *parse_names(self.conf.include, "include")]
        imported = self._import_modules(modules)
        if set_up_django():
            run_checks()
        self._set_up_periodic_tasks()
        for task in self.tasks.values():
            task._codec.check_types()
        if set_up_django():
            self._middleware.add_outermost(DjangoConnections())
        return imported

    def _import_modules(self, names: Iterable[str]) -> list[str]:
        """Set Django up if the environment names its settings; import the given modules, then those to discover."""
        set_up_django()
        imported = import_related(names, None)
        for discover in self._autodiscover:
            imported += discover()
        return imported

    def _set_up_periodic_tasks(self) -> None:
        """Call the receivers of ``on_after_configure`` and ``on_after_finalize``, unless this was done before.

        If bulltask ignored an exception of a receiver, the worker would remove the schedules that the receiver adds.
        """
        if self._has_set_up:
            return
        for receiver in self.on_after_configure.receivers(self):
            receiver(signal=self.on_after_configure, sender=self, source=self.conf)
        for receiver in self.on_after_finalize.receivers(self):
            receiver(signal=self.on_after_finalize, sender=self)
        self._has_set_up = True

    @property
    def _config(self) -> Config:
        """The configuration; reading it freezes the settings."""
        frozen = self.conf._frozen  # noqa: SLF001 - each send reads it
        return self.conf.freeze() if frozen is None else frozen

    @property
    def _typed(self) -> bool | None:
        """The setting ``task_typed``, for tasks without the option ``typed``; reading it freezes only this setting."""
        typed: bool | None = self.conf.freeze_one("task_typed")
        return typed

    @property
    def _serializer(self) -> str:
        """The setting ``task_serializer``, for tasks without the option; reading it freezes only this setting."""
        serializer: str = self.conf.freeze_one("task_serializer")
        return serializer

    @property
    def _broker(self) -> Broker:
        """The connections to the Redis server, created on first use, and again in each forked child."""
        if self._connections is None or self._pid != os.getpid():
            with self._lock:
                if self._connections is None or self._pid != os.getpid():
                    self._connections = self._connect()
                    self._pid = os.getpid()
        return self._connections

    def _connect(self) -> Broker:
        try:
            url = embedded.resolve_url(self._config.broker_url, self._directory)
        except BrokerUnavailableError:
            if not (self._config.always_eager and embedded.is_under_test(self._config.broker_url)):
                raise
            url = _NO_SERVER
        if self._config.always_eager:
            return cast(Broker, import_module(_EAGER).EagerBroker(self, url))
        broker = Broker(self._config, url)
        if embedded.is_server_of_tests(url):
            broker.results = import_module(_UNATTENDED).UnattendedResults(broker.results)
        return broker

    def _connect_again(self) -> None:
        self._connections = None

    def _replace_connections(self, conf: Settings, broker: Broker | None) -> tuple[Settings, Broker | None]:
        """Use other settings and connections from now on, and return the previous ones; for :mod:`bulltask.testing`."""
        previous = self.conf, self._connections
        self.conf = conf
        self._connections = broker
        self._pid = os.getpid()
        return previous

    @property
    def _results(self) -> ResultReader:
        """Reads jobs and waits for their outcome."""
        return self._broker.results

    def _queue_of(self, job_id: str) -> str:
        """Return the first queue that has a job; the default queue if none of them has it."""
        default = self._config.default_queue
        queues = list(dict.fromkeys([default, *self.tasks.queues]))
        return default if len(queues) == 1 else self._results.queue_of(job_id, queues) or default

    def _now_ms(self) -> int:
        """Return the server's time in epoch milliseconds (this machine's before the first connection)."""
        return self._broker.clock.now_ms()

    @property
    def _overrides_send_task(self) -> bool:
        """Whether a subclass, or a patch, has replaced :meth:`send_task`, so that all sends must pass through it."""
        return type(self).send_task is not _SEND_TASK or "send_task" in self.__dict__

    def _build_job(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None, options: Mapping[str, Any]
    ) -> NewJob:
        """Return the job that :meth:`send_task` would send, with the same arguments."""
        task = self._task_named(name)
        return task._build(task._codec.encode(args, kwargs or {}, options.get("serializer")), CallOptions.of(options))

    def _send(self, jobs: Sequence[NewJob]) -> list[str]:
        """Store jobs and return their ids; see :class:`bulltask.transport.produce.Producer`."""
        if (job := current_job()) is not None:
            jobs = sent_by(job, jobs)
        hooks, send = self._send_hooks, self._broker.producer.send
        return hooks.send(jobs, send) if hooks.has_hooks else send(jobs)

    async def _asend(self, jobs: Sequence[NewJob]) -> list[str]:
        """:meth:`_send` for asyncio."""
        if (job := current_job()) is not None:
            jobs = sent_by(job, jobs)
        hooks, send = self._send_hooks, self._broker.producer.asend
        return await (hooks.asend(jobs, send) if hooks.has_hooks else send(jobs))

    def _send_canvas(self, canvas: Canvas[Any, Any]) -> Any:
        """Store all jobs of a canvas in one transaction, and return the handle of its result.

        ``BrokerError``: all retries have failed; it is not known whether the jobs were stored. After any other error,
        nothing was sent.
        """
        sends = True
        if is_overridden(canvas):
            if is_call(canvas) and isinstance(canvas.task, AnyTask) and not canvas.has_passed_overrides:
                return canvas.send_by_public_method()
            sends = pass_overrides(canvas)
        if is_single(canvas) and sends:
            return self.send_many([canvas])[0]  # one round trip; a transaction takes two
        plan = self._plan(canvas)
        eager = self._broker.eager
        if not sends:
            return plan.result(self._results, self._now_ms())
        self._send_planned(plan.roots, self.flows().add_planned if eager is None else eager.run)
        return plan.result(self._results, self._now_ms())

    def _plan(self, canvas: Canvas[Any, Any]) -> CanvasPlan:
        """Return the jobs of a canvas."""
        from bulltask.registry.canvas_plan import plan_canvas  # noqa: PLC0415 - only for a canvas

        return plan_canvas(canvas, self._config, origin_of_jobs_sent_by(current_job()))

    async def _asend_canvas(self, canvas: Canvas[Any, Any]) -> Any:
        """:meth:`_send_canvas` for asyncio."""
        if is_call(canvas) and not canvas.has_passed_overrides:
            task: Any = canvas.task
            if isinstance(task, AnyTask) and task._replaces("aapply_async"):
                return await task.aapply_async(canvas.args, canvas.kwargs, **canvas.given_with_callbacks())
        sends = not is_overridden(canvas) or pass_overrides(canvas)
        if is_single(canvas) and sends:
            return (await self.asend_many([canvas]))[0]
        plan = self._plan(canvas)
        eager = self._broker.eager
        if not sends:
            return plan.result(self._results, self._now_ms())
        await self._asend_planned(plan.roots, self.aflows().add_planned if eager is None else eager.arun)
        return plan.result(self._results, self._now_ms())

    def _send_planned(self, roots: Sequence[PlannedJob], send: Callable[[Sequence[PlannedJob]], None]) -> None:
        """Send trees of jobs with ``send``, and call the hooks before and after it."""
        self._send_hooks.send_canvas(roots, send)

    async def _asend_planned(
        self, roots: Sequence[PlannedJob], send: Callable[[Sequence[PlannedJob]], Awaitable[None]]
    ) -> None:
        """:meth:`_send_planned` for asyncio."""
        await self._send_hooks.asend_canvas(roots, send)

    def _apply_canvas(self, canvas: Canvas[Any, Any], *, throw: bool | None) -> Any:
        """Run the jobs of a canvas in this process, and return the handle of its result; see ``Canvas.apply``."""
        plan = self._plan(canvas)
        eager: EagerRunner = import_module(_EAGER).EagerRunner(self, propagate=throw)
        eager.run(plan.roots)
        return plan.result(eager.results, self._now_ms())


_SEND_TASK: Final = App.send_task  # as it is now, because a test may patch it

Celery = App
"""Celery's name for the class, for code that imports it from ``celery``."""


def _periodic_call(sig: object, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Signature[Any, Any]:
    if isinstance(sig, AnyTask):
        return sig.signature(args, kwargs)
    if not is_call(sig):
        raise TypeError(
            f"a periodic task is a call such as task.s(…), not {sig!r:.200}; for a chain or group, schedule "
            "a task that "
            "sends it"
        )
    if sig.links or sig.errbacks:
        raise TypeError(f"{sig!r:.200} has callbacks, which a schedule cannot store; send them from the task")
    return sig.clone(args, kwargs)
