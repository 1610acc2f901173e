"""``App``: settings, tasks, and the connection to Redis."""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, Unpack, cast

from bulltask import embedded
from bulltask.categories import Categorizer
from bulltask.config.config import Config, Settings
from bulltask.config.names import constructor_settings
from bulltask.config.parsers import parse_names
from bulltask.config.secret_settings import wrap_secrets
from bulltask.config.settings_mixin import SettingsMixin
from bulltask.config.urls import SecretUrl, secret_url
from bulltask.errors import BrokerUnavailableError
from bulltask.hooks.django_connections import DjangoConnections
from bulltask.hooks.hooks_mixin import HooksMixin
from bulltask.hooks.sending import SendHooks
from bulltask.jobs.flow import PlannedJob
from bulltask.jobs.job import NewJob
from bulltask.ports import EagerRunner, OutboxRelay, ResultReader
from bulltask.registry import shared
from bulltask.registry.ancestry import origin_of_jobs_sent_by, sent_by
from bulltask.registry.builtins import builtin_tasks
from bulltask.registry.call_options import CallOptions
from bulltask.registry.canvas import Canvas
from bulltask.registry.canvas_plan import plan_canvas
from bulltask.registry.command_line_mixin import CommandLineMixin
from bulltask.registry.control import Control
from bulltask.registry.current import set_current
from bulltask.registry.current_job import current_job
from bulltask.registry.decorators import use_class
from bulltask.registry.django import run_checks, set_up_django
from bulltask.registry.named_task import NamedTask
from bulltask.registry.option_types import CallKeywords, SignatureKeywords
from bulltask.registry.overrides import is_overridden, pass_overrides, record_call, recorded, send_call, send_recorded
from bulltask.registry.periodic_tasks_mixin import PeriodicTasksMixin
from bulltask.registry.results_mixin import ResultsMixin
from bulltask.registry.running import running_task
from bulltask.registry.signature import Signature, is_call
from bulltask.registry.single_jobs import handles, is_single, job_of
from bulltask.registry.task import AnyTask, Task
from bulltask.registry.task_definition_mixin import TaskDefinitionMixin
from bulltask.registry.task_discovery_mixin import TaskDiscoveryMixin
from bulltask.registry.tasks import Tasks
from bulltask.result import AsyncResult
from bulltask.transport.broker import Broker
from bulltask.transport.follow import NEWEST

if TYPE_CHECKING:  # imported on first use, because most programs only send jobs of tasks
    from bulltask.config.setting_types import AppOptions
    from bulltask.queue.add_options import AddOptions
    from bulltask.queue.aio.events import AsyncQueueEvents
    from bulltask.queue.aio.flow import AsyncFlowProducer
    from bulltask.queue.aio.queue import AsyncQueue
    from bulltask.queue.context import QueueContext
    from bulltask.queue.sync.events import QueueEvents
    from bulltask.queue.sync.flow import FlowProducer
    from bulltask.queue.sync.queue import Queue

__all__ = ["App", "Celery"]

P = ParamSpec("P")
R = TypeVar("R")
B = TypeVar("B", bound=AnyTask[..., Any])
T = TypeVar("T", bound=AnyTask[..., Any])

# Imported by name, because they are in layers above.
_EAGER: Final = "bulltask.worker.eager"
_UNATTENDED: Final = "bulltask.testing.inline_results"

_NO_SERVER: Final = SecretUrl("redis://tests-without-a-server.invalid:6379/0")
"""For tests in eager mode, which need no server unless they use queues."""

# An ``async def`` is a function as well, so each pair of overloads below overlaps; the first match wins.
_AsyncFunction = Callable[P, Coroutine[Any, Any, R]]


class App(
    SettingsMixin,
    HooksMixin,
    TaskDefinitionMixin,
    PeriodicTasksMixin,
    TaskDiscoveryMixin,
    ResultsMixin,
    CommandLineMixin,
):
    """A bulltask application.

    Args:
        name: The app's name, shown in logs.
        broker_url: ``redis://``, ``rediss://``, ``redis+cluster://``, ``redis+sentinel://``, ``unix://``, or
            ``embedded://`` for the project's embedded server on this machine (for development). The environment
            variable ``BULLTASK_BROKER_URL`` takes precedence.
        settings: Any other setting of :mod:`bulltask.config.settings`, or an argument of Celery's constructor:
            ``broker`` and ``backend`` (``broker_url`` and ``result_backend``); ``changes`` (a dictionary of settings);
            ``config_source`` and ``namespace`` (as for :meth:`config_from_object`); ``task_cls`` (the class of tasks
            without a ``base``, or its name, ``"module:Class"``); ``set_as_current`` (if false, the app does not send
            the tasks of ``shared_task``).

    Attributes:
        Task: The class of tasks without a ``base``.
        control: Revokes jobs by id: ``app.control.revoke(id)``.
        directory: The directory from which the module that created the app is imported; ``None`` is the current
            directory. ``embedded://`` is the server of the project that contains it.

    Raises:
        ConfigError: A setting has an unknown name or an invalid value.
        TypeError: An argument of Celery's constructor has no meaning here.
    """

    task_cls: type[AnyTask[..., Any]] | str | None = None
    """For a subclass to set: the default of the argument ``task_cls``."""

    def __init__(
        self, name: str = "app", broker_url: str | SecretUrl | None = None, **settings: Unpack[AppOptions]
    ) -> None:
        super().__init__()
        self.name = name
        self.directory = embedded.calling_directory()
        broker_url, settings = secret_url(broker_url), cast("AppOptions", wrap_secrets(settings))
        self.conf = Settings(constructor_settings(broker_url, settings))
        self.conf.name_app(name)
        if (source := settings.get("config_source")) is not None:
            self.config_from_object(source, namespace=settings.get("namespace"))
        self._task_class = (
            cast("type[AnyTask[..., Any]] | str | None", settings.get("task_cls")) or self.task_cls or Task
        )
        self.tasks = Tasks(shared.SHARED, builtin_tasks(lambda: self, lambda name: self.tasks[name]))
        self.conf.when_frozen(lambda _: self._use_named_class())
        self.conf.when_frozen(self.tasks.configure)
        self.conf.when_switched(self._connect_again)
        self.categorizer = Categorizer()
        self.outboxes: list[OutboxRelay] = []
        self.control = Control(self)
        self._send_hooks = SendHooks(self.middleware, lambda: self.config)
        self._lock = threading.RLock()
        self._broker: Broker | None = None
        self._pid = os.getpid()
        if settings.get("set_as_current", True):
            self.set_current()

    # ---- tasks ---------------------------------------------------------------------------------------------------

    def load_tasks(self) -> list[str]:
        """Import the modules that contain tasks: ``imports``, ``include`` and ``autodiscover_tasks``.

        A worker calls this method before it forks. The method then calls the receivers of ``on_after_configure`` and
        ``on_after_finalize``.

        If the environment variable ``DJANGO_SETTINGS_MODULE`` is set, Django is set up first, and its system checks
        run, which import the URLconf: tasks may be defined in the modules of views, too. Unusable database connections
        are then closed before and after each task, as Django does for requests.

        Raises:
            ConfigError: A task has ``typed=True``, and one of its type hints cannot be enforced.
        """
        modules = [*parse_names(self.conf.imports, "imports"), *parse_names(self.conf.include, "include")]
        imported = self.import_modules(modules)
        if set_up_django():
            run_checks()
        self.set_up_periodic_tasks()
        for task in self.tasks.values():
            task.check_types()
        if set_up_django():
            self.middleware.add_outermost(DjangoConnections())
        return imported

    # ---- sending -------------------------------------------------------------------------------------------------

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
        task: AnyTask[Any, Any] | NamedTask = self.tasks.get(name) or NamedTask(name, lambda: self)
        return send_call(task, args or (), kwargs or {}, options)

    async def asend_task(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[CallKeywords[Any]],
    ) -> AsyncResult[Any]:
        """:meth:`send_task` for asyncio."""
        if self.overrides_send_task:
            task: AnyTask[Any, Any] | NamedTask = self.tasks.get(name) or NamedTask(name, lambda: self)
            return await send_recorded(*record_call(task, lambda: self.send_task(name, args, kwargs, **options)))
        if "link" in options or "link_error" in options:
            return await self.signature(name, args, kwargs, **options).aapply_async()
        return (await self.asend_many([self.build_job(name, args, kwargs, options)]))[0]

    @property
    def overrides_send_task(self) -> bool:
        """Whether a subclass, or a patch, has replaced :meth:`send_task`, so that all sends must pass through it."""
        return type(self).send_task is not _SEND_TASK or "send_task" in self.__dict__

    def send_many(self, calls: Iterable[Signature[Any, Any] | NewJob]) -> list[AsyncResult[Any]]:
        """Send calls in order, one round trip per thousand: ``app.send_many([add.s(1, 2), mail.s("x")])``.

        Raises:
            BrokerError: A round trip failed; the calls from earlier round trips are stored. Calls with a ``job_id`` can
                safely be sent again.
        """
        passed = [recorded(call) for call in calls]
        jobs = [(call, job_of(call)) for call, _ in passed if call is not None]
        sent = iter(handles(self, self.tasks, jobs, self.send([job for _, job in jobs])))
        return [returned if call is None else next(sent) for call, returned in passed]

    async def asend_many(self, calls: Iterable[Signature[Any, Any] | NewJob]) -> list[AsyncResult[Any]]:
        """:meth:`send_many` for asyncio."""
        passed = [recorded(call) for call in calls]
        jobs = [(call, job_of(call)) for call, _ in passed if call is not None]
        sent = iter(handles(self, self.tasks, jobs, await self.asend([job for _, job in jobs])))
        return [returned if call is None else next(sent) for call, returned in passed]

    # ---- queues --------------------------------------------------------------------------------------------------

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

        return QueueContext(name, lambda: self.broker, default_job_options)

    def flows(self) -> FlowProducer:
        """Return a flow producer; a flow is a tree of jobs in which a parent runs after its child jobs."""
        from bulltask.queue.sync.flow import FlowProducer  # noqa: PLC0415 - see TYPE_CHECKING above

        return FlowProducer(broker=lambda: self.broker)

    def aflows(self) -> AsyncFlowProducer:
        """:meth:`flows` for asyncio; no ``await`` needed."""
        from bulltask.queue.aio.flow import AsyncFlowProducer  # noqa: PLC0415 - see TYPE_CHECKING above

        return AsyncFlowProducer(broker=lambda: self.broker)

    def events(self, queue: str, *, start: str = NEWEST) -> QueueEvents:
        """Return a reader for a queue's events; close it after use.

        Args:
            queue: The queue's name, without braces or prefix.
            start: Position to start at: ``NEWEST``, ``"0"`` for the oldest stored event, or an event's id.
        """
        from bulltask.queue.sync.events import QueueEvents  # noqa: PLC0415 - see TYPE_CHECKING above

        return QueueEvents(queue, start=start, broker=lambda: self.broker)

    def aevents(self, queue: str, *, start: str = NEWEST) -> AsyncQueueEvents:
        """:meth:`events` for asyncio; call it in the event loop that will read the events."""
        from bulltask.queue.aio.events import AsyncQueueEvents  # noqa: PLC0415 - see TYPE_CHECKING above

        return AsyncQueueEvents(queue, start=start, broker=lambda: self.broker)

    def build_job(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None, options: Mapping[str, Any]
    ) -> NewJob:
        """Return the job that :meth:`send_task` would send, with the same arguments.

        Raises:
            TypeError: The arguments do not match the task, or the task is not registered in this app and both
                positional and keyword arguments are given.
        """
        task: AnyTask[Any, Any] | NamedTask = self.tasks.get(name) or NamedTask(name, lambda: self)
        return task.build(task.bind_json(args, kwargs or {}, options.get("serializer")), CallOptions.of(options))

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
        task: AnyTask[Any, Any] | NamedTask = self.tasks.get(name) or NamedTask(name, lambda: self)
        return Signature(task, args, kwargs, options, immutable=immutable)

    # ---- for tasks and results (ports.Sender) --------------------------------------------------------------------

    @property
    def main(self) -> str:
        """Celery's alias of :attr:`name`."""
        return self.name

    def set_current(self) -> None:
        """Make this app the current one, which sends the tasks of ``shared_task`` (Celery's ``set_current``)."""
        set_current(self)
        if not isinstance(self._task_class, str):
            self.tasks.refresh(use_class(shared.SHARED.values(), self._task_class))

    set_default = set_current

    @property
    def current_task(self) -> Any:
        """The running task, ``None`` outside a task: see :data:`bulltask.current_task`."""
        return running_task()

    @property
    def config(self) -> Config:
        """The configuration; reading it freezes the settings."""
        return self.conf.freeze()

    @property
    def typed(self) -> bool | None:
        """The setting ``task_typed``, for tasks without the option ``typed``; reading it freezes only this setting."""
        typed: bool | None = self.conf.freeze_one("task_typed")
        return typed

    @property
    def serializer(self) -> str:
        """The setting ``task_serializer``, for tasks without the option; reading it freezes only this setting."""
        serializer: str = self.conf.freeze_one("task_serializer")
        return serializer

    @property
    def broker(self) -> Broker:
        """The connections to the Redis server, created on first use, and again in each forked child."""
        if self._broker is None or self._pid != os.getpid():
            with self._lock:
                if self._broker is None or self._pid != os.getpid():
                    self._broker, self._pid = self._connect(), os.getpid()
        return self._broker

    def replace_connections(self, conf: Settings, broker: Broker | None) -> tuple[Settings, Broker | None]:
        """Use other settings and connections from now on, and return the previous ones; for :mod:`bulltask.testing`."""
        previous = self.conf, self._broker
        self.conf, self._broker, self._pid = conf, broker, os.getpid()
        return previous

    @property
    def results(self) -> ResultReader:
        """Reads jobs and waits for their outcome."""
        return self.broker.results

    def now_ms(self) -> int:
        """Return the server's time in epoch milliseconds (this machine's before the first connection)."""
        return self.broker.clock.now_ms()

    def send(self, jobs: Sequence[NewJob]) -> list[str]:
        """Store jobs and return their ids; see :class:`bulltask.transport.produce.Producer`."""
        if (job := current_job()) is not None:
            jobs = sent_by(job, jobs)
        hooks, send = self._send_hooks, self.broker.producer.send
        return hooks.send(jobs, send) if hooks.has_hooks else send(jobs)

    async def asend(self, jobs: Sequence[NewJob]) -> list[str]:
        """:meth:`send` for asyncio."""
        if (job := current_job()) is not None:
            jobs = sent_by(job, jobs)
        hooks, send = self._send_hooks, self.broker.producer.asend
        return await (hooks.asend(jobs, send) if hooks.has_hooks else send(jobs))

    def send_canvas(self, canvas: Canvas[Any, Any]) -> Any:
        """Store all jobs of a canvas in one transaction, and return the handle of its result.

        Raises:
            TypeError, EncodeError, PayloadTooLargeError, ConfigError: A call cannot be stored. Nothing was sent.
            BrokerError: All retries have failed; it is not known whether the jobs were stored.
        """
        sends = True
        if is_overridden(canvas):
            if is_call(canvas) and isinstance(canvas.task, AnyTask) and not canvas.has_passed_overrides:
                return canvas.send_by_public_method()
            sends = pass_overrides(canvas)
        if is_single(canvas) and sends:
            return self.send_many([canvas])[0]  # one round trip; a transaction takes two
        plan = plan_canvas(canvas, self.config, origin_of_jobs_sent_by(current_job()))
        eager = self.broker.eager
        if not sends:
            return plan.result(self.results, self.now_ms())
        self.send_planned(plan.roots, self.flows().add_planned if eager is None else eager.run)
        return plan.result(self.results, self.now_ms())

    async def asend_canvas(self, canvas: Canvas[Any, Any]) -> Any:
        """:meth:`send_canvas` for asyncio."""
        if is_call(canvas) and not canvas.has_passed_overrides:
            task: Any = canvas.task
            if isinstance(task, AnyTask) and task.replaces("aapply_async"):
                return await task.aapply_async(canvas.args, canvas.kwargs, **canvas.given_with_callbacks())
        sends = not is_overridden(canvas) or pass_overrides(canvas)
        if is_single(canvas) and sends:
            return (await self.asend_many([canvas]))[0]
        plan = plan_canvas(canvas, self.config, origin_of_jobs_sent_by(current_job()))
        eager = self.broker.eager
        if not sends:
            return plan.result(self.results, self.now_ms())
        await self.asend_planned(plan.roots, self.aflows().add_planned if eager is None else eager.arun)
        return plan.result(self.results, self.now_ms())

    def send_planned(self, roots: Sequence[PlannedJob], send: Callable[[Sequence[PlannedJob]], None]) -> None:
        """Send trees of jobs with ``send``, and call the hooks before and after it."""
        self._send_hooks.send_canvas(roots, send)

    async def asend_planned(
        self, roots: Sequence[PlannedJob], send: Callable[[Sequence[PlannedJob]], Awaitable[None]]
    ) -> None:
        """:meth:`send_planned` for asyncio."""
        await self._send_hooks.asend_canvas(roots, send)

    def apply_canvas(self, canvas: Canvas[Any, Any], *, throw: bool | None) -> Any:
        """Run the jobs of a canvas in this process, and return the handle of its result; see ``Canvas.apply``."""
        plan = plan_canvas(canvas, self.config, origin_of_jobs_sent_by(current_job()))
        eager: EagerRunner = import_module(_EAGER).EagerRunner(self, propagate=throw)
        eager.run(plan.roots)
        return plan.result(eager.results, self.now_ms())

    def close(self) -> None:
        """Close idle connections. The app can be used again."""
        if self._broker is not None:
            self._broker.close()

    async def aclose(self) -> None:
        """Close the running event loop's connections, for example when an async web app shuts down.

        Otherwise they are closed with the loop. The app can be used again.
        """
        if self._broker is not None:
            await self._broker.aclose()
            self._broker.close()

    def _use_named_class(self) -> None:
        """Import the class of the tasks if it was given by name, and let shared tasks use it."""
        _ = self.Task

    def _connect_again(self) -> None:
        self._broker = None

    def _connect(self) -> Broker:
        try:
            url = embedded.resolve_url(self.config.broker_url, self.directory)
        except BrokerUnavailableError:
            if not (self.config.always_eager and embedded.is_under_test(self.config.broker_url)):
                raise
            url = _NO_SERVER
        if self.config.always_eager:
            return cast(Broker, import_module(_EAGER).EagerBroker(self, url))
        broker = Broker(self.config, url)
        if embedded.is_server_of_tests(url):
            broker.results = import_module(_UNATTENDED).UnattendedResults(broker.results)
        return broker

    def __repr__(self) -> str:
        return f"<App {self.name}: {len(self.tasks)} tasks>"


_SEND_TASK: Final = App.send_task  # as it is now, because a test may patch it

Celery = App
"""Celery's name for the class, for code that imports it from ``celery``."""
