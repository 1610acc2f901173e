"""``TaskClass``: the base class of users' task classes, in which ``self`` is the task, as in Celery."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, cast

from bulltask.config.config import Config
from bulltask.errors import BulltaskError, ConfigError
from bulltask.payloads.payload_codec import PayloadCodec
from bulltask.registry.batches import call_for_one
from bulltask.registry.call_binding import CallBinding
from bulltask.registry.celery_options import TASK_OPTIONS
from bulltask.registry.checkpoint_methods import CheckpointMethods
from bulltask.registry.checkpoints import Checkpoints
from bulltask.registry.context import Context, JobMethods
from bulltask.registry.current_job import current_job
from bulltask.registry.request import Request
from bulltask.registry.running import current_context, enter_context
from bulltask.registry.task_options import TaskOptions
from bulltask.signals.exception_info import ExceptionInfo

__all__ = ["HANDLERS", "OPTIONS", "TaskClass", "attributes_of_class", "options_of_class"]

HANDLERS: Final = ("before_start", "on_success", "on_failure", "on_retry", "after_return")

_FIELDS: Final = frozenset(field.name for field in fields(TaskOptions)) - {"unlimited_retries"}
_EFFECTIVE: Final = frozenset(["max_retries", "default_retry_delay"])
OPTIONS: Final = _FIELDS | TASK_OPTIONS
_RESERVED: Final = frozenset(
    "function options bind is_async is_batch arguments target has_base has_handlers location config sender types "
    "conversion result_decoder check_types check_partial bind_json bind_json_after unbind_json pickled_parameters "
    "build direct".split()
)


class TaskClass(CallBinding, JobMethods, CheckpointMethods):
    """The methods that a task class can override, and those of a :class:`Context` for the running job."""

    if TYPE_CHECKING:  # options; at run time, __getattr__ reads those that the user's class does not set
        max_retries: int | None
        default_retry_delay: Any
        rate_limit: Any
        queue: str | None
        priority: int | None
        throws: Any
        autoretry_for: Any

    is_async: bool
    has_base: bool
    has_handlers: bool
    has_async_handlers: bool
    target: Callable[..., Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__ == "bulltask.registry.task":
            return
        if taken := sorted(_RESERVED & vars(cls).keys()):
            raise ConfigError(
                f"{cls.__qualname__}.{taken[0]} would replace an attribute that bulltask uses; give it another name"
            )

    # ---- for the user's class to override -------------------------------------------------------------------------

    def before_start(self, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Called before the function, within its time limits; an exception fails the attempt."""

    def on_success(self, retval: Any, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Called after Redis has stored the result."""

    def on_failure(
        self, exc: BaseException, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], einfo: ExceptionInfo
    ) -> Any:
        """Called after the job has failed in Redis, when no retry is left."""

    def on_retry(
        self, exc: BaseException, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], einfo: ExceptionInfo
    ) -> Any:
        """Called after a failed attempt, once Redis has stored that the job will be retried."""

    def after_return(
        self,
        status: str,
        retval: Any,
        task_id: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        einfo: ExceptionInfo | None,
    ) -> Any:
        """Called after ``on_success`` or ``on_failure``; ``status`` is ``SUCCESS``, ``FAILURE`` or ``REVOKED``."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the task's function; a class for ``app.register_task`` defines this method instead."""
        if not self.has_base:
            return self.direct(args, kwargs)
        return self.function(self, *args, **kwargs) if self.bind else self.function(*args, **kwargs)

    # ---- the running job -------------------------------------------------------------------------------------------

    @property
    def config(self) -> Config:
        """The configuration of the sending app."""
        return self._sender().config

    @property
    def request(self) -> Request:  # type: ignore[override]
        """The request of the job that this code runs for (Celery's ``task.request``); empty outside a job."""
        if (context := current_context(self.name)) is not None:
            return context.request
        job = current_job()
        if job is None or job.name != self.name:
            return Request(task=self.name, called_directly=True)
        try:
            loaded = PayloadCodec(self.config).load_arguments(job)
            pickled = self.pickled_parameters(loaded.value) if loaded.is_pickled else ()
            return Request.of(job, *self.unbind_json(loaded.value, pickled))
        except BulltaskError:  # the task is not called, but hooks learn of the failure
            return Request.of(job, (), {})

    def direct(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the function in this process, as ``task(…)`` and ``super().__call__(…)`` do."""
        if self.is_batch:
            request = Request(task=self.name, args=args, kwargs=kwargs, called_directly=True)
            return call_for_one(self.function, self.arguments.bind(args, kwargs), request, is_async=self.is_async)
        if not self.has_base:
            given = (self._direct_context(args, kwargs),) if self.bind else ()
            return self.function(*given, *args, **kwargs)
        if self.target is not self.function and current_context(self.name) is not None:
            return self.run(*args, **kwargs)  # from the __call__ of the user's class, in an attempt
        context = self._direct_context(args, kwargs)
        if self.is_async:
            return _awaited(context, lambda: self.run(*args, **kwargs))
        previous = enter_context(context)
        try:
            return self.run(*args, **kwargs)
        finally:
            enter_context(previous)

    @property
    def _context(self) -> Context:
        return current_context(self.name) or self._direct_context((), {})

    @property
    def checkpoints(self) -> Checkpoints | None:  # type: ignore[override]
        """The checkpoints of the running job."""
        return self._context.checkpoints

    @property
    def _task(self) -> str:  # type: ignore[override]
        return self.name

    def _direct_context(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Context:
        checkpoints = Checkpoints() if self.options.checkpoint else None
        request = Request(task=self.name, args=args, kwargs=kwargs, called_directly=True)
        return Context(request, checkpoints=checkpoints, task=self)

    def set_attribute(self, name: str, value: object) -> None:
        """Set an attribute for ``self`` of a bound task, as in Celery, where ``self`` is the task.

        Raises:
            AttributeError: bulltask uses the name.
        """
        if name in _RESERVED or hasattr(type(self), name):
            raise AttributeError(f"self.{name} would replace an attribute that bulltask uses; give it another name")
        setattr(self, name, value)

    def prepare(self) -> None:
        """Check the user's class, and look up which methods it overrides.

        Raises:
            ConfigError: A method is an ``async def``, but the function is not; ``__call__`` is a plain method, but the
                function is an ``async def``; or the class of a batch task overrides a method.
        """
        kind = type(self)
        overridden = [name for name in HANDLERS if getattr(kind, name) is not getattr(TaskClass, name)]
        self.has_handlers = bool(overridden)
        self.has_async_handlers = any(inspect.iscoroutinefunction(getattr(kind, name)) for name in overridden)
        has_call = not kind.__call__.__module__.startswith("bulltask.registry.")
        if self.is_batch and (names := overridden + ["__call__"] * has_call):
            raise ConfigError(
                f"{kind.__qualname__}.{names[0]} would be called for one job, but the function of batch task "
                f"{self.name!r} is called for many; give the task another base="
            )
        self.target = cast(Any, self) if has_call else self.function
        if not self.is_async:
            overridden += ["__call__"] if has_call else []
            if wrong := [name for name in overridden if inspect.iscoroutinefunction(getattr(kind, name))]:
                raise ConfigError(
                    f"{kind.__qualname__}.{wrong[0]} is an async def, but the task {self.name!r} is not; make the "
                    "method a plain one, or give the task another base="
                )
        elif has_call and not inspect.iscoroutinefunction(kind.__call__):
            raise ConfigError(
                f"the task {self.name!r} is an async def, so {kind.__qualname__}.__call__ must also be an async def "
                "that awaits self.run(…); or give the task another base="
            )

    if not TYPE_CHECKING:  # type checkers would accept any name

        @property
        def rate_limit(self) -> Any:
            """The option ``rate_limit``; while a job of the task runs, :meth:`Context.rate_limit`, as on ``self``."""
            options = vars(self).get("options")
            if options is None or current_context(self.name) is not None:
                return super().rate_limit
            return options.rate_limit

        def __getattr__(self, name: str) -> Any:
            """Return an option of the task, such as ``self.queue``; in a job, the effective ``self.max_retries``."""
            options = vars(self).get("options")
            if name in _EFFECTIVE and options is not None and (context := current_context(self.name)) is not None:
                return getattr(context, name)
            if options is not None and name in _FIELDS:
                return getattr(options, name)
            hint = ""
            if options is None and not name.startswith("__"):
                hint = "; register the task first: task = app.register_task(…)"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")


def options_of_class(kind: type) -> dict[str, Any]:
    """Return the options that a user's task class sets as class attributes."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("bulltask.registry."):
            for name in OPTIONS & vars(base).keys():
                value = vars(base)[name]
                value = value.__func__ if isinstance(value, staticmethod) else value
                if name == "retry_backoff" or not hasattr(type(value), "__get__"):
                    found[name] = value
    return found


def attributes_of_class(kind: type) -> set[str]:
    """Return the names of the attributes that a user's task class and its base classes define."""
    own = (base for base in kind.__mro__ if not base.__module__.startswith("bulltask.registry."))
    return {name for base in own if base is not object for name in vars(base) if not name.startswith("__")}


async def _awaited(context: Context, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    previous = enter_context(context)
    try:
        return await call()
    finally:
        enter_context(previous)
