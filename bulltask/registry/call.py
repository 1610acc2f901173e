"""From a Python call to the job that is sent.

:class:`Arguments` converts between a call and the JSON that a Node developer would write: ``add.delay(1, y=2)`` on
``def add(x, y)`` is stored as ``{"x": 1, "y": 2}``; ``*args`` and ``**kwargs`` are stored under their parameters'
names. If another client stores a JSON array, its items are positional arguments; any other value that is not an object
is the only argument. :func:`plan_job` merges the options of the call, its task and the app, once for many jobs.
:class:`NamedTask` stands for a task of another app, whose function is not known here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from bulltask.config.config import Config, check_payload_options, check_serializer
from bulltask.config.parsers import Routes, compression
from bulltask.jobs import codec
from bulltask.jobs.clock import to_epoch_ms, to_ms, value_class
from bulltask.jobs.errors import ConfigError, InvalidJobError, incompatible, warn_user
from bulltask.jobs.fields import TimeLimits
from bulltask.jobs.job import (
    JobOptions,
    NewJob,
    ParentLink,
    check_priority,
    check_size,
    link_to_parent,
    new_job_id,
    stored_options,
    unchecked_bytes,
)
from bulltask.jobs.names import FAN_OUT, STARMAP, check_job_id, check_job_name, check_queue_name
from bulltask.jobs.payloads import PLAIN, PayloadCodec, PayloadFormat
from bulltask.registry.options import CallOptions, TaskOptions, check_max_retries, expiry_ms, keep_ms
from bulltask.registry.protocols import Sender

__all__ = [
    "FAN_OUT_PARAMETER",
    "Arguments",
    "JobPlan",
    "NamedTask",
    "build_job",
    "check_args",
    "check_items",
    "check_kwargs",
    "plan_job",
]


_Kind = inspect.Parameter
_LATER: Final = object()
"""Placeholder for an argument that is not known yet."""


def check_args(args: Any, task: str) -> Sequence[Any]:
    """Return a call's positional arguments; raises ``TypeError`` unless they are a list or tuple."""
    if args is None:
        return ()
    if not isinstance(args, Sequence) or isinstance(args, str | bytes | bytearray | memoryview):
        raise TypeError(f"the positional arguments of {task} must be a list or tuple, not {args!r:.200}")
    return args


def check_kwargs(kwargs: Any, task: str) -> Mapping[str, Any]:
    """Return a call's keyword arguments; raises ``TypeError`` if they are not a dictionary."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"the keyword arguments of {task} must be a dictionary, not {kwargs!r:.200}")
    return kwargs


def check_items(items: Any, what: str) -> Iterable[Any]:
    """Return the items of several calls; raises ``TypeError`` for a string, bytes or a dictionary."""
    if not isinstance(items, Iterable) or isinstance(items, str | bytes | bytearray | memoryview | Mapping):
        raise TypeError(f"{what} takes a list or another iterable of items, not {items!r:.200}")
    return items


class Arguments:
    """A task function's signature; with ``skip_first``, its first parameter is the context, not an argument."""

    def __init__(self, function: Callable[..., Any], task: str, *, skip_first: bool) -> None:
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())[1 if skip_first else 0 :]
        self._task = task
        self.signature = signature.replace(parameters=parameters)
        self._signature = self.signature.replace(return_annotation=inspect.Signature.empty)
        by_kind: dict[Any, list[str]] = {}
        for parameter in parameters:
            by_kind.setdefault(parameter.kind, []).append(parameter.name)
        self._positional_only = by_kind.get(_Kind.POSITIONAL_ONLY, [])
        self._positional_or_keyword = by_kind.get(_Kind.POSITIONAL_OR_KEYWORD, [])
        self._var_args = next(iter(by_kind.get(_Kind.VAR_POSITIONAL, [])), None)
        self._var_kwargs = next(iter(by_kind.get(_Kind.VAR_KEYWORD, [])), None)
        self._names = frozenset(parameter.name for parameter in parameters)
        self._required = frozenset(parameter.name for parameter in parameters if parameter.default is _Kind.empty)
        self._by_name = not self._positional_only and self._var_args is None and self._var_kwargs is None

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the call's arguments by parameter name, without omitted arguments, or raise Python's ``TypeError``."""
        if type(args) is not tuple:
            args = check_args(args, self._task)
        if self._by_name and not kwargs and len(args) <= len(self._positional_or_keyword):
            data = dict(zip(self._positional_or_keyword, args, strict=False))
            if self._required <= data.keys():
                return data  # nearly every call; the full check takes several times as long
        kwargs = check_kwargs(kwargs, self._task)
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise TypeError(f"{self._task}() {self._explained(exc, kwargs)}") from None
        data = dict(bound.arguments)
        if self._var_args in data:
            data[self._var_args] = list(data[self._var_args])
        return data

    def bind_partial(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Like :meth:`bind`, but any arguments may be missing, because they are not known yet or may have any value.

        Raises ``TypeError`` if there are too many arguments, or no parameter has such a name.
        """
        try:
            data = dict(self._signature.bind_partial(*args, **kwargs).arguments)
        except TypeError as exc:
            raise TypeError(f"{self._task}() {exc}") from None
        return {name: list(value) if name == self._var_args else value for name, value in data.items()}

    def bind_after(
        self, count: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[str]]:
        """Bind a call whose first ``count`` arguments are not known yet, such as the result of another call.

        Return the other arguments by parameter name, and the names of the parameters that will receive the first ones.
        One of them may be ``*args``, for which the arguments already contain a list; the value is inserted before the
        items of that list.
        """
        data = self.bind((*[_LATER] * count, *args), kwargs)
        names = [name for name, value in data.items() if value is _LATER]
        if self._var_args and (rest := data.get(self._var_args)):
            names += [self._var_args] * rest.count(_LATER)
            data[self._var_args] = [value for value in rest if value is not _LATER]
        return {name: value for name, value in data.items() if value is not _LATER}, names

    def unbind(self, data: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return stored data as arguments that match the signature, or raise ``InvalidJobError``."""
        if self._by_name and type(data) is dict and self._required <= data.keys() <= self._names:
            return (), data  # nearly every job; the full check takes several times as long
        args, kwargs = self._split(data)
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise self._mismatch(self._explained(exc, kwargs)) from None
        return args, kwargs

    def _explained(self, exc: TypeError, kwargs: Mapping[str, Any]) -> str:
        """Return Python's message; about a missing argument, it does not say which names are wrong."""
        unknown = [] if self._var_kwargs else [repr(name) for name in kwargs if name not in self._names]
        if unknown and "missing" in str(exc):
            return f"{exc}, and got an unexpected keyword argument {', '.join(unknown)}"
        return str(exc)

    def _split(self, data: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if data is None:
            return (), {}
        if isinstance(data, list):
            return tuple(data), {}
        if not isinstance(data, dict):
            return (data,), {}
        return ((), data) if self._by_name else self._split_mapping(dict(data))

    def _split_mapping(self, left: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = list(self._positional_only)
        more = left.pop(self._var_args, None) if self._var_args else None
        if more:
            names += self._positional_or_keyword  # they precede *args, so they can only be passed by position
        while names and not more and names[-1] not in left:
            names.pop()
        args = [left.pop(name) if name in left else self._default(name) for name in names]
        if more:
            args += more if isinstance(more, list) else [more]
        packed = left.pop(self._var_kwargs, None) if self._var_kwargs else None
        if isinstance(packed, dict):
            left = {**left, **packed}
        elif packed is not None and self._var_kwargs:
            left[self._var_kwargs] = packed
        return tuple(args), left

    def _default(self, name: str) -> Any:
        """Return the default of a parameter that is missing from the data, although a later parameter is present."""
        default = self._signature.parameters[name].default
        if default is _Kind.empty:
            raise self._mismatch(f"missing a required argument: {name!r}")
        return default

    def _mismatch(self, problem: object) -> InvalidJobError:
        return incompatible(InvalidJobError(f"the job's data does not match {self._task}{self._signature}: {problem}"))


_IN_NO_MODULE: Final = "__main__."


@value_class
class JobPlan:
    """A call's options without its arguments; it can build any number of jobs.

    Attributes:
        max_payload: Maximum size of data and options in bytes, ``None`` for no limit.
        unchecked_bytes: Up to how many bytes of data are below all limits.
        what: Name of the arguments in messages.
        payloads: Writes the data; ``None``: it is plain JSON.
        form: How the data is written.
        convert: Converts values without a type hint that JSON does not support; ``None``: they are refused.
    """

    name: str
    queue: str
    options: JobOptions
    parent: ParentLink | None
    timestamp_ms: int | None
    max_payload: int | None
    unchecked_bytes: int
    what: str
    payloads: PayloadCodec | None
    form: PayloadFormat
    convert: Callable[[Any], Any] | None = None

    def job(self, data: Any, job_id: str | None = None) -> NewJob:
        """Return the job to send; its id is a new UUIDv7 by default.

        Raises an error if the serializer does not support the arguments, they are too large, or the id is invalid.
        """
        if self.payloads is None:
            encoded = codec.encode(data, what=self.what, limit=self.max_payload, convert=self.convert)
        else:
            encoded = self.payloads.dump_arguments(data, self.queue, self.name, self.form, self.what)
        if len(encoded) > self.unchecked_bytes:
            check_size(encoded, self.options, self.max_payload, self.what)
        new_id = new_job_id() if job_id is None else check_job_id(job_id)
        return NewJob(
            self.queue,
            new_id,
            self.name,
            encoded,
            self.options,
            parent=self.parent,
            timestamp_ms=self.timestamp_ms,
            has_custom_id=job_id is not None,
        )


def plan_job(name: str, task: TaskOptions, call: CallOptions, config: Config, data: Any = None) -> JobPlan:
    """Merge the options of a call, its task and the app, in this order; ``data`` is for functions in ``task_routes``.

    The message of the error for an invalid option names the task.
    """
    if name.startswith(_IN_NO_MODULE) and not config.always_eager:
        warn_user(
            f"task {name!r} is defined in a notebook or a shell, from which no worker can import it, so its jobs will "
            "wait: define it in a module such as tasks.py, import that module here, and start the worker with -A tasks"
        )
    if config.routes is not None and not (call.queue or task.queue):
        call = _with_route(name, task, call, config.routes, data)
    limits = TimeLimits.of(call.soft_time_limit, call.time_limit)
    limits.with_defaults(task.time_limits).with_defaults(config.time_limits).check(f"a call to task {name}")
    expires_in_ms, expires_ms = expiry_ms(task.expires if call.expires is None else call.expires)
    given = {**task.stored, **call.stored}
    stored = stored_options(given, config.backoff_strategies) if given else {}
    parent, timestamp_ms = (
        link_to_parent(call.parent, stored, prefix=config.prefix, hash_tag=config.queue_hash_tag),
        stored.get("timestamp"),
    )
    options = JobOptions(
        attempts=task.attempts(config) if call.max_retries is None else check_max_retries(call.max_retries) + 1,
        backoff=None if "backoff" in stored else task.backoff(config),
        delay_ms=0 if call.countdown is None else to_ms(call.countdown, "countdown"),
        eta_ms=None if call.eta is None else to_epoch_ms(call.eta),
        priority=check_priority(task.priority if call.priority is None else call.priority),
        lifo=call.lifo or task.lifo,
        keep_completed_ms=keep_ms(task.result_expires, config.result_expires_ms),
        keep_failed_ms=keep_ms(task.result_failure_expires, config.failure_expires_ms),
        headers="" if not call.headers else codec.encode(call.headers, what=f"headers of task {name}").decode(),
        expires_in_ms=expires_in_ms,
        expires_ms=expires_ms,
        time_limits=limits,
        ignore_result=call.ignore_result,
        sender=config.sender,
        max_explicit_retries=None if call.max_retries is not None else task.max_explicit_retries(config),
        more=stored,
    )
    form = _form(queue := check_queue_name(call.queue or task.queue or config.default_queue), name, task, call, config)
    return JobPlan(
        name=check_job_name(name),
        queue=queue,
        options=options,
        parent=parent,
        timestamp_ms=timestamp_ms if isinstance(timestamp_ms, int) else None,
        max_payload=config.max_payload,
        unchecked_bytes=unchecked_bytes(options, config.max_payload),
        what=f"the arguments of task {name}",
        payloads=None if form is None else PayloadCodec(config),
        form=form or PayloadFormat(),
        convert=config.convert,
    )


def build_job(name: str, data: Any, task: TaskOptions, call: CallOptions, config: Config) -> NewJob:
    """Return a call's job; raises the errors of :func:`plan_job` and :meth:`JobPlan.job`."""
    return plan_job(name, task, call, config, data).job(data, call.job_id)


def _form(queue: str, name: str, task: TaskOptions, call: CallOptions, config: Config) -> PayloadFormat | None:
    """Check a call's payload options, and return how its arguments are written; ``None`` for plain JSON."""
    if name == FAN_OUT:
        return None  # workers without keys must be able to read which jobs follow
    check_payload_options(call.serializer, call.compression)
    own = call.serializer or task.serializer
    check_serializer(own, config, f"the serializer of task {name} is cloudpickle")
    packed = call.compression or task.compression or config.task_compression
    form = PayloadFormat(own or config.task_serializer, packed and compression(packed, "compression"))
    return form if form != PLAIN or PayloadCodec(config).encrypts(queue) else None


def _with_route(name: str, task: TaskOptions, call: CallOptions, routes: Routes, data: Any) -> CallOptions:
    """Return the call with the options of its route that neither the call nor the task sets."""
    given = {field.name: value for field in fields(call) if (value := getattr(call, field.name)) not in (None, False)}
    set_by_task = {field.name for field in fields(task) if getattr(task, field.name) not in (None, False, ())}
    route = routes.find(data["task"] if name == STARMAP else name, data, given)
    if "serializer" in route:
        raise ConfigError(f"task_routes for {name} cannot set the serializer; set it for the task or the call")
    try:
        return CallOptions.of({**{key: value for key, value in route.items() if key not in set_by_task}, **given})
    except TypeError as exc:
        raise ConfigError(f"task_routes for {name}: {exc}") from exc


FAN_OUT_PARAMETER: Final = "result"


class NamedTask:
    """A task whose function is not known here; its ``result_decoder``, if known, converts results to its type."""

    def __init__(
        self,
        name: str,
        sender: Callable[[], Sender],
        options: TaskOptions | None = None,
        result_decoder: Callable[[Any], Any] | None = None,
    ) -> None:
        self.name = name
        self._sender = sender
        self._options = options or TaskOptions()
        self.result_decoder = result_decoder

    @property
    def _codec(self) -> NamedTask:
        """What encodes its calls, like the :class:`CallCodec` of a task."""
        return self

    @property
    def _is_overridden(self) -> bool:
        """Whether a replaced ``send_task`` sends its calls."""
        return self._sender()._overrides_send_task

    def _build(self, data: Any, call: CallOptions) -> NewJob:
        """Return the job for bound arguments."""
        return build_job(self.name, data, self._options, call, self._sender()._config)

    def check_partial(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise ``TypeError`` if both positional and keyword arguments are given: they may be completed later."""
        if args and kwargs:
            raise TypeError(
                f"task {self.name!r:.200} is not registered in this app, so positional and keyword arguments cannot be "
                "combined; pass all of them as kwargs"
            )

    def encode(self, args: Sequence[Any], kwargs: Mapping[str, Any], serializer: str | None = None) -> Any:  # noqa: ARG002 - as CallCodec
        """Return a call's data: a list of positional arguments, or keyword arguments by name."""
        args, kwargs = check_args(args, self.name), check_kwargs(kwargs, self.name)
        self.check_partial(args, kwargs)
        return list(args) if args else dict(kwargs)

    def encode_after(
        self,
        count: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        serializer: str | None = None,  # noqa: ARG002 - as CallCodec
    ) -> tuple[Any, list[str]]:
        """Return a call's data without its first argument, which is not known yet, and that parameter's name, ``""``.

        Raises ``TypeError`` if more than one argument is not known, and the error of :meth:`check_partial`.
        """
        if count > 1:
            raise TypeError(f"task {self.name!r:.200} is not registered in this app; its parameters are not known")
        self.check_partial(args or (None,), kwargs)
        return list(args), [""] * count
