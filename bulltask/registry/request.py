"""``Request``: what a task can know about the job for which it is running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from bulltask.jobs.job import RunningJob
from bulltask.jobs.numbers import number
from bulltask.jobs.time_limits import NO_LIMITS, TimeLimits
from bulltask.registry.ancestry import ancestry
from bulltask.registry.stamping import STAMPED_HEADERS

__all__ = ["FailedRequest", "Request"]

V = TypeVar("V")

_CELERYS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(
        "callbacks chain errbacks group_index logfile loglevel origin properties reply_to shadow stamped_headers "
        "stamps taskset utc".split()
    ),
    "ignore_result": False,
}
"""Celery's values for a request without them; that of a failed job has no stamps."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
        """Return the request of a job, with its arguments decoded.

        Raises:
            DecodeError: Its options are malformed.
        """
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
            **ancestry(job),
        )


class FailedRequest(dict[str, Any]):
    """The job that failed, as an error callback with three parameters receives it: a dictionary with attributes.

    Its keys are ``id``, ``task`` and ``queue``. Celery's other attributes, except ``args`` and ``kwargs``, have the
    values of a request without them.

    Args:
        stored: The keys.
        app: The app, which reads the job's arguments.
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
