"""``Middleware``: code that runs before and after every send and every run of an app's jobs."""

from __future__ import annotations

import inspect
from typing import Any, Final

from bulltask.errors import ConfigError
from bulltask.hooks.outgoing import OutgoingJob
from bulltask.registry.request import Request

__all__ = ["Middleware", "MiddlewareList"]

_SEND: Final = ("before_send", "after_send", "abefore_send", "aafter_send")
_RUN: Final = ("before_run", "after_run", "abefore_run", "aafter_run")


class Middleware:
    """Base class of middleware: override the methods that you need, and call :meth:`bulltask.App.add_middleware`.

    The methods whose names begin with ``a`` are called instead of the others where code can be awaited: around async
    tasks, and around sends with ``await`` (``adelay`` …). By default they call the others.

    ``before_`` methods are called in the order in which middleware was added, ``after_`` methods in the opposite order.
    An exception in a method is logged, and the job is sent or run as if the method had returned. ``before_run`` may end
    the attempt as its task may, by raising ``ReleaseJob``, ``RescheduleJob``, ``RateLimitQueue`` or ``Retry``.
    """

    def before_send(self, job: OutgoingJob) -> None:
        """Called before a job is sent; ``job.headers`` may be changed."""

    def after_send(self, job: OutgoingJob, exception: BaseException | None) -> None:
        """Called after a job was sent.

        Args:
            job: The job.
            exception: The exception that the send raised; Redis may have stored the job nevertheless. ``None`` if the
                send succeeded.
        """

    def before_run(self, request: Request) -> None:
        """Called before a task runs, in the thread and the context in which it runs."""

    def after_run(self, request: Request, result: Any, exception: BaseException | None) -> None:
        """Called after a task has returned or raised, before its outcome is stored.

        It is also called after a time limit or a revocation has ended the task, but not if the child is killed.

        Args:
            request: The job.
            result: The task's return value, ``None`` if it has raised.
            exception: What it has raised, including ``RescheduleJob`` and other requests, and ``CancelledError``.
        """

    async def abefore_send(self, job: OutgoingJob) -> None:
        """:meth:`before_send` for asyncio."""
        self.before_send(job)

    async def aafter_send(self, job: OutgoingJob, exception: BaseException | None) -> None:
        """:meth:`after_send` for asyncio."""
        self.after_send(job, exception)

    async def abefore_run(self, request: Request) -> None:
        """:meth:`before_run` for async tasks."""
        self.before_run(request)

    async def aafter_run(self, request: Request, result: Any, exception: BaseException | None) -> None:
        """:meth:`after_run` for async tasks."""
        self.after_run(request, result, exception)


class MiddlewareList:
    """An app's middleware, in order.

    Attributes:
        sending: The middleware with a method for sending.
        running: The middleware with a method for running.
    """

    def __init__(self) -> None:
        self.sending: tuple[Middleware, ...] = ()
        self.running: tuple[Middleware, ...] = ()

    def add(self, middleware: object) -> None:
        """Add middleware.

        Raises:
            ConfigError: It is not an instance of :class:`Middleware`, or has an ``async def`` where a plain method is
                needed, or the reverse.
        """
        if not isinstance(middleware, Middleware):
            raise ConfigError(f"middleware must be an instance of bulltask.Middleware, not {middleware!r:.200}")
        kind = type(middleware)
        for name in (*_SEND, *_RUN):
            is_async = inspect.iscoroutinefunction(getattr(kind, name))
            if is_async != (name.startswith("a") and not name.startswith("after")):
                form = f"name it a{name}" if is_async else "make it an async def"
                raise ConfigError(f"{kind.__qualname__}.{name} {'is' if is_async else 'is not'} an async def: {form}")
        if _overrides(kind, _SEND):
            self.sending = (*self.sending, middleware)
        if _overrides(kind, _RUN):
            self.running = (*self.running, middleware)

    def add_outermost(self, middleware: Middleware) -> None:
        """Add middleware that is called first before a run, and last after it, unless one of its class exists."""
        if not any(type(one) is type(middleware) for one in self.running):
            self.running = (middleware, *self.running)


def _overrides(kind: type[Middleware], names: tuple[str, ...]) -> bool:
    return any(getattr(kind, name) is not getattr(Middleware, name) for name in names)
