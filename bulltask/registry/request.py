"""What code can know about the process and the job it runs in.

The name that a task has in the sender and in the worker; the current app; the current job, for log lines and for jobs
that it sends; and :class:`Request`, which a task reads as ``self.request``.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context, ContextVar
from dataclasses import field, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypedDict, TypeVar, cast

from bulltask.jobs.clock import value_class
from bulltask.jobs.codec import number
from bulltask.jobs.errors import ConfigError, InvalidJobError
from bulltask.jobs.fields import NO_LIMITS, ChildResults, TimeLimits
from bulltask.jobs.job import NewJob, RunningJob
from bulltask.registry.protocols import Sender
from bulltask.registry.stamping import STAMPED_HEADERS

__all__ = [
    "ExceptionInfo",
    "FailedRequest",
    "Request",
    "ancestry",
    "current_app",
    "current_job",
    "current_sender",
    "current_task_class",
    "enter_job",
    "get_logger",
    "get_task_logger",
    "in_started_thread",
    "job_in",
    "origin_of_jobs_sent_by",
    "origin_of_replacement",
    "registered_task",
    "sent_by",
    "set_current",
    "share_with_structlog",
    "share_with_threads",
    "source_location",
    "task_name",
]


def task_name(function: Callable[..., Any]) -> str:
    """Return the automatic name of a task; raises ``ConfigError`` for a lambda, for example.

    A module that runs as a script is called ``__main__`` in its process, but has another name in the worker, which
    imports it. The task's name therefore contains the name that an import would use. (Celery names such a task
    ``__main__.f``, which no worker has registered.)
    """
    qualname = getattr(function, "__qualname__", "")
    if not qualname or "<lambda>" in qualname:
        raise ConfigError(f"{function!r:.200} has no usable name: set one with @app.task(name='…')")
    return f"{_module_name(function.__module__)}.{qualname.replace('<locals>.', '')}"


def source_location(function: Callable[..., Any]) -> str:
    """Return a function's ``file:line``, for messages."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


def _module_name(module: str) -> str:
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # python -m package.module
        return str(spec.name).removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return Path(file).stem if file else module


_GROUP_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}(\.\d+)*")

_MAX_DIGITS: Final = 9


class Ancestry(TypedDict):
    """Fields of a :class:`bulltask.Request`."""

    root_id: str | None
    parent_id: str | None
    group: str | None
    chord: str | None
    replaced_task_nesting: int


def sent_by(job: RunningJob, jobs: Sequence[NewJob]) -> list[NewJob]:
    """Return jobs that the task of ``job`` sends, with the ids of that job and of the first of its ancestors."""
    origin = origin_of_jobs_sent_by(job)
    return [replace(one, options=replace(one.options, origin=origin)) for one in jobs]


def origin_of_jobs_sent_by(job: RunningJob | None) -> dict[str, str]:
    """Return the ids of the parent and the root of jobs that the task of ``job`` sends; empty without a job."""
    return {} if job is None else {"parent": job.id, "root": ancestry(job)["root_id"] or job.id}


def origin_of_replacement(job: RunningJob) -> dict[str, str]:
    """Return the origin of jobs by which the task of ``job`` replaces itself; it counts the replacements."""
    return {**origin_of_jobs_sent_by(job), "replacements": str(ancestry(job)["replaced_task_nesting"] + 1)}


def ancestry(job: RunningJob) -> Ancestry:
    """Return the jobs from which ``job`` descends."""
    nesting = 0
    origin, parent = job.opts.bulltask.get("origin"), job.parent_key.rpartition(":")[2]
    if isinstance(origin, dict):
        root_id, parent_id = _id(origin.get("root")), _id(origin.get("parent"))
        nesting = _count(origin.get("replacements"))
    else:
        parent_id = _step_before(job)
        root_id = job.id if parent_id is None else None
    group = job.id.rpartition(".")[0]
    chord = parent if parent and group == parent else None
    return {
        "root_id": root_id,
        "parent_id": parent_id,
        "group": chord or _group_id(group),
        "chord": chord,
        "replaced_task_nesting": nesting,
    }


def _group_id(prefix: str) -> str | None:
    """Return the id of the group from which a job's id is derived (:func:`bulltask.jobs.fields.member_id`).

    It is not stored in the job, but is a part of the job's id: a UUIDv7, and a number for each enclosing group.
    """
    return prefix if prefix and _GROUP_ID.fullmatch(prefix) else None


def _step_before(job: RunningJob) -> str | None:
    try:
        received = ChildResults.from_wire(job.canvas)
    except InvalidJobError:
        return None
    return received.shape.rpartition(":")[2] if received is not None and isinstance(received.shape, str) else None


def _id(stored: object) -> str | None:
    return stored if isinstance(stored, str) else None


def _count(stored: object) -> int:
    return int(stored) if isinstance(stored, str) and stored.isdecimal() and len(stored) <= _MAX_DIGITS else 0


# The current app, which sends shared tasks and empty groups, because these belong to no app.
#
# It is the package's only process-wide state. As in Celery, ``@shared_task`` must work before an app exists.


_current_app: weakref.ref[Any] | None = None


def set_current(sender: Sender) -> None:
    """Make ``sender`` the current app. As in Celery, it is the app that was created last."""
    global _current_app  # noqa: PLW0603 - see above: the only process-wide state
    _current_app = weakref.ref(sender)


def current_sender() -> Sender:
    """Return the current app; raises ``ConfigError`` if this process has none."""
    sender: Sender | None = None if _current_app is None else _current_app()
    if sender is None:
        raise ConfigError(
            "a shared task, or a result without an app, needs the current app, but this process has no App: import the "
            "module that creates it"
        )
    return sender


def current_task_class() -> Any:
    """Return the class of the current app's tasks that have no ``base``; ``None`` without an app."""
    return getattr(None if _current_app is None else _current_app(), "Task", None)


class _CurrentApp:
    """A proxy for the app that is current when it is used (Celery's ``current_app``)."""

    def __getattr__(self, name: str) -> Any:
        return getattr(current_sender(), name)

    def __repr__(self) -> str:
        return "<the current app>"


current_app: Any = _CurrentApp()
"""The app that was created last, for modules that cannot import it."""


def registered_task(name: str, module: str) -> Any:
    """Return a task of the current app, after its module was imported. A task is pickled as a call of this function."""
    with suppress(ImportError):
        import_module(module)
    sender: Any = current_sender()
    return sender.tasks[name]


_OWN_THREADS: Final = "bulltask"  # such as the thread of the event loop

_current_job: ContextVar[RunningJob | None] = ContextVar("bulltask_job", default=None)
# structlog's merge_contextvars reads every context variable whose name has this prefix (STRUCTLOG_KEY_PREFIX).
_STRUCTLOG_ID: ContextVar[str] = ContextVar("structlog_job_id")
_STRUCTLOG_TASK: ContextVar[str] = ContextVar("structlog_task")
_shared_with_structlog = False


def current_job() -> RunningJob | None:
    """Return the job that this code runs for, ``None`` outside a job.

    It is a context variable: ``asyncio.to_thread`` and asyncio tasks inherit it. A ``threading.Thread`` does not, but
    while a sync task is the only one that its process is running, the thread's code belongs to that job.
    """
    job = _current_job.get()
    return in_started_thread(_current_job) if job is None else job


_only_context: Callable[[], Context | None] | None = None


def share_with_threads(context: Callable[[], Context | None]) -> None:
    """Let threads without a context find the job of the only task that is running; ``context`` returns its context."""
    global _only_context  # noqa: PLW0603 - a child has one set of running tasks
    _only_context = context


def in_started_thread(variable: ContextVar[Any]) -> Any:
    """Return a variable's value in the only task that is running, if this thread has none of its own."""
    context = None if _only_context is None else _only_context()
    if context is None or threading.current_thread().name.startswith(_OWN_THREADS):
        return None
    return context.get(variable)


def job_in(context: Context) -> RunningJob | None:
    """Return the job that code in this context runs for."""
    return context.get(_current_job)


def enter_job(job: RunningJob) -> None:
    """Make ``job`` the current one in this context; the caller discards the context afterwards."""
    _current_job.set(job)
    if _shared_with_structlog:
        _STRUCTLOG_ID.set(job.id)
        _STRUCTLOG_TASK.set(job.name)


def share_with_structlog() -> None:
    """Let ``structlog.contextvars.merge_contextvars`` add the job to log lines, for apps that configure structlog."""
    global _shared_with_structlog  # noqa: PLW0603 - like structlog's configuration, it belongs to the process
    _shared_with_structlog = True


def get_task_logger(name: str) -> logging.Logger:
    """Return the logger for a module's tasks (Celery's function): ``logger = get_task_logger(__name__)``.

    It is ``logging.getLogger(name)``. In a worker, each line that a task logs, through any logger, contains the job's
    id and the task's name.
    """
    return logging.getLogger(name)


get_logger = logging.getLogger
"""Celery's name for the function that returns any other logger."""


V = TypeVar("V")

_CELERYS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(
        "callbacks chain errbacks group_index logfile loglevel origin properties reply_to shadow stamped_headers "
        "stamps taskset utc".split()
    ),
    "ignore_result": False,
}
"""Celery's values for a request without them; that of a failed job has no stamps."""


@value_class(kw_only=True, frozen=True)
class Request:
    """The running job, with Celery's attribute names.

    Attributes:
        id: The job's id; ``None`` when the task was called directly.
        task: The task's name.
        queue: The queue's name in the app.
        args, kwargs: The arguments of the call.
        retries: Attempts made before this one (BullMQ's ``atm``).
        attempts: The job's maximum number of attempts.
        attempts_started: The job's started attempts, including this one (``ats``).
        headers: The sender's ``headers=``. As in Celery, they are also attributes of the request:
            ``request.tenant``.
        timestamp_ms: When the job was added, epoch milliseconds.
        called_directly: The task was called as a function, without a worker.
        priority: The job's priority, 0 for none.
        soft_time_limit, time_limit: The limits of this attempt in seconds, ``None`` for no limit.
        root_id: The id of the first job from which this one descends: its own id, unless a task sent it or it follows
            another step of a canvas.
        parent_id: The id of the job whose task sent this one, or of the previous step of its canvas. For the body of a
            chord, it is the id of the last member. ``None`` if there is no such job.
        group: The id of the group (``GroupResult.id``) that has this job as a member; in a chord, the id of its body.
            ``None`` for other jobs, and for a member with its own ``job_id``.
        chord: The id of the chord's body, which receives the results of this job's group; ``None`` if there is none.
        eta_ms: The time before which the job could not run, by its ``eta`` or ``countdown``; ``None`` if it had none,
            or an ``eta`` in the past.
        expires_ms: The time after which a worker fails the job instead of running it, ``None`` for no limit.
        is_eager: The job runs in the process that has sent it, without a worker (``apply()``, ``task_always_eager``).
        replaced_task_nesting: How many tasks have replaced themselves, one by the next, until this one.
        app_id: The name of the worker's app.
        hostname: The worker's id.
        telemetry_metadata: The trace context of the sender, as BullMQ stores it: a JSON object of headers, such as
            ``traceparent``. ``None`` if the sender has not stored any.
    """

    id: str = cast(str, None)  # a string in every job, so code that type checkers check need not test it
    task: str = ""
    queue: str = ""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    retries: int = 0
    attempts: int = 1
    attempts_started: int = 1
    headers: Mapping[str, Any] = field(default_factory=dict)
    timestamp_ms: int = 0
    called_directly: bool = False
    priority: int = 0
    soft_time_limit: float | None = None
    time_limit: float | None = None
    root_id: str | None = None
    parent_id: str | None = None
    group: str | None = None
    chord: str | None = None
    eta_ms: int | None = None
    expires_ms: int | None = None
    is_eager: bool = False
    replaced_task_nesting: int = 0
    app_id: str = ""
    hostname: str = ""
    telemetry_metadata: str | None = None

    def get(self, key: str, default: Any = None) -> Any:
        """Return an attribute or a header, or ``default`` (Celery's ``request.get``)."""
        return getattr(self, key, default)

    if not TYPE_CHECKING:  # type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            """Return a header, or the value of an attribute of Celery's requests that has no meaning here."""
            if name != "headers" and not name.startswith("__"):
                headers = self.headers
                if name in headers:
                    return headers[name]
                if name in _CELERYS:
                    return _CELERYS[name]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute or header {name!r}")

    @property
    def eta(self) -> str | None:
        """:attr:`eta_ms` as Celery's ISO 8601 string, in UTC."""
        return _iso(self.eta_ms)

    @property
    def expires(self) -> str | None:
        """:attr:`expires_ms` as Celery's ISO 8601 string, in UTC."""
        return _iso(self.expires_ms)

    @property
    def timelimit(self) -> tuple[float | None, float | None]:
        """Hard and soft time limit, in Celery's order."""
        return self.time_limit, self.soft_time_limit

    @property
    def stamps(self) -> Mapping[str, Any]:
        """The stamps of the call, by name; see :meth:`bulltask.Signature.stamp`."""
        return _of_type(dict, self.headers.get("stamps"), {})

    @property
    def stamped_headers(self) -> Sequence[str]:
        """The names of :attr:`stamps`."""
        return _of_type(list, self.headers.get(STAMPED_HEADERS), [])

    @property
    def task_name(self) -> str:
        """:attr:`task`, under the name that Celery's ``task_received`` has for it."""
        return self.task

    @property
    def correlation_id(self) -> str:
        """The job's id (Celery's ``correlation_id``)."""
        return self.id

    @property
    def argsrepr(self) -> str:
        """``repr()`` of the positional arguments."""
        return repr(self.args)

    @property
    def kwargsrepr(self) -> str:
        """``repr()`` of the keyword arguments."""
        return repr(self.kwargs)

    @property
    def delivery_info(self) -> dict[str, Any]:
        """Celery's ``delivery_info``: the queue is the ``routing_key``.

        ``redelivered`` is true if an attempt ended without an outcome, for example because its process was killed.
        """
        redelivered = self.attempts_started > self.retries + 1
        return {"exchange": "", "routing_key": self.queue, "priority": self.priority, "redelivered": redelivered}

    @classmethod
    def of(
        cls,
        job: RunningJob,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        limits: TimeLimits = NO_LIMITS,
        app_id: str = "",
        hostname: str = "",
    ) -> Request:
        """Return the request of a job, with its arguments decoded."""
        delay_ms = number(job.opts.get("delay"))
        return cls(
            id=job.id,
            task=job.name,
            queue=job.queue,
            args=args,
            kwargs=kwargs,
            retries=job.attempts_made,
            attempts=max(1, job.attempts),
            attempts_started=job.attempts_started,
            headers=job.headers,
            timestamp_ms=job.timestamp_ms,
            priority=job.priority,
            soft_time_limit=limits.soft_s,
            time_limit=limits.hard_s,
            eta_ms=job.timestamp_ms + delay_ms if delay_ms else None,
            expires_ms=job.expires_ms,
            app_id=app_id,
            hostname=hostname,
            telemetry_metadata=job.opts.get("tm"),
            **ancestry(job),
        )


class FailedRequest(dict[str, Any]):
    """The job that failed, as an error callback with three parameters receives it: a dictionary with attributes.

    Its keys are ``id``, ``task`` and ``queue``. ``args`` and ``kwargs`` are read from Redis, by the app; Celery's other
    attributes have the values of a request without them.
    """

    def __init__(self, stored: Mapping[str, Any], app: Any) -> None:
        super().__init__(stored)
        self._app = app

    @property
    def args(self) -> list[Any]:
        """The positional arguments, read from Redis; usually empty, because arguments are stored by name."""
        return self._app.result(self["id"], self["queue"]).args or []

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments by name, read from Redis; empty if the job no longer exists."""
        return self._app.result(self["id"], self["queue"]).kwargs or {}

    if not TYPE_CHECKING:  # type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            """Return the value of a key, or of an attribute of Celery's requests."""
            if name in self:
                return self[name]
            if name in _CELERYS:
                return _CELERYS[name]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _of_type(kind: type[V], value: object, default: V) -> V:
    """Return a header, or the default if another client has sent something else under its name."""
    return value if isinstance(value, kind) else default


def _iso(epoch_ms: int | None) -> str | None:
    return None if epoch_ms is None else datetime.fromtimestamp(epoch_ms / 1000, UTC).isoformat()


@value_class(frozen=True)
class ExceptionInfo:
    """An exception and its traceback, as it is stored in the job, with the attribute names of Celery's ``einfo``."""

    exception: BaseException
    traceback: str

    @property
    def type(self) -> type[BaseException]:
        """The exception's class."""
        return type(self.exception)

    @property
    def tb(self) -> TracebackType | None:
        """The traceback object."""
        return self.exception.__traceback__

    def __str__(self) -> str:
        return self.traceback
