"""``Signature``: one call that is sent later, alone or as part of a canvas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final, Self, TypeGuard, TypeVar, Unpack, cast

import uuid_utils

from bulltask.jobs.job import NewJob
from bulltask.jobs.names import STARMAP
from bulltask.registry.arguments import check_args, check_kwargs
from bulltask.registry.call_options import CallOptions
from bulltask.registry.callee import Callee
from bulltask.registry.canvas import Canvas, Group, chain_of, check_canvas, chord_of, pop_callbacks
from bulltask.registry.celery_options import translate_call_options
from bulltask.registry.current import current_sender
from bulltask.registry.option_types import CallKeywords, SignatureKeywords
from bulltask.registry.stamping import STAMPED_HEADERS, Stamper
from bulltask.result import AsyncResult
from bulltask.typed.build import register_converter
from bulltask.typed.converter import Converter, Mismatch
from bulltask.typed.definitions import Definitions, Schema

__all__ = ["Signature", "is_call"]

A_contra = TypeVar("A_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)

_CALLBACKS: Final = {"link", "link_error"}
_TIMES: Final = {"eta", "expires", "timestamp"}


class _SignatureType(type):
    """Makes chains and groups instances of ``Signature``, as they are in Celery; see also :func:`is_call`."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Canvas)


class Signature(Canvas[A_contra, R_co], metaclass=_SignatureType):
    """One call of a task, to be sent later: ``add.s(1, 2)``.

    Args:
        task: The task.
        args, kwargs: The arguments; the result of the previous step comes before them.
        options: Options of ``apply_async``.
        immutable: Ignore the result of the previous step (Celery's ``si``).

    Attributes:
        has_passed_overrides: Whether the call has passed the replaced methods: :mod:`bulltask.registry.overrides`.

    Raises:
        TypeError: The task has no such parameters.
    """

    def __init__(
        self,
        task: Callee,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        immutable: bool = False,
    ) -> None:
        self.task, self.args, self.kwargs = (
            task,
            tuple(check_args(args, task.name)),
            dict(check_kwargs(kwargs, task.name)),
        )
        self.immutable, self.links = _flag(immutable), list[Canvas[Any, Any]]()
        self.errbacks = list[Signature[Any, Any]]()
        self._given = dict(options or {})
        self._take_callbacks(self._given)
        self._given = translate_call_options(self._given)  # once, because a clone would warn again
        self.options = CallOptions.of(self._given)
        self.has_passed_overrides = False
        task.check_partial(self.args, self.kwargs)

    def set(self, **options: Unpack[SignatureKeywords[R_co]]) -> Self:
        """Set options of the call, and return this signature; see :meth:`Canvas.set`."""
        given: dict[str, Any] = {**options}
        self.immutable = _flag(given.pop("immutable", self.immutable))
        self._take_callbacks(given)
        self._given.update(translate_call_options(given))
        self.options = CallOptions.of(self._given)
        return self

    def clone(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[R_co]]
    ) -> Signature[A_contra, R_co]:
        """Return a copy. ``args`` come before the signature's own; ``kwargs`` and ``options`` override its own.

        The arguments of an immutable signature do not change.
        """
        given = ((), {}) if self.immutable else (check_args(args, self.task.name), check_kwargs(kwargs, self.task.name))
        copy: Signature[A_contra, R_co] = Signature(
            self.task,
            (*given[0], *self.args),
            {**self.kwargs, **given[1]},
            {**self._given, **options},
            immutable=self.immutable,
        )
        copy.links[:0], copy.errbacks[:0] = self.links, self.errbacks
        copy.planned_id = self.planned_id
        return copy

    @property
    def name(self) -> str:
        """The name of the task, as in Celery."""
        return self.task.name

    @property
    def id(self) -> str | None:
        """The id of the job, ``None`` before :meth:`Canvas.freeze`, unless it is set."""
        return self.planned_id or self.options.job_id

    def plan_ids(self, job_id: str | None, parent: Any) -> Any:
        """Choose the id of the job; see :meth:`Canvas.freeze`."""
        self.planned_id = job_id or self.id or str(uuid_utils.uuid7())
        sender, task = self.task.sender, self.task
        return AsyncResult(
            self.planned_id, task.build({}, self.options).queue, sender.results, None, task.result_decoder, parent
        )

    def parts(self) -> Sequence[Canvas[Any, Any]]:
        """Return the callbacks."""
        return [*self.links, *self.errbacks]

    @property
    def stamps(self) -> Mapping[str, Any]:
        """The stamps of the call; see :meth:`Canvas.stamp`."""
        stamps: Mapping[str, Any] = self._given.get("stamps", {})
        return stamps

    def stamp_with(self, stamper: Stamper, headers: Mapping[str, Any]) -> None:
        """Stamp the call, and its callbacks."""
        stamper.stamp_links(self, headers)
        given = stamper.headers("on_signature", self, headers)
        stamps = {name: given[name] for name in given[STAMPED_HEADERS] if name in given}
        merged = stamper.merged(self.stamps, stamps)
        del merged[STAMPED_HEADERS]
        self._given["stamps"] = merged
        self.options = CallOptions.of(self._given)

    def set_id(self, job_id: str) -> None:
        """Set the option ``job_id``."""
        self._given["job_id"] = job_id
        self.options = CallOptions.of(self._given)

    def calls(self) -> Iterator[Signature[Any, Any]]:
        """Iterate over this signature."""
        yield self

    def to_dict(self) -> dict[str, Any]:
        """Return the signature in the format of Celery's JSON; see :meth:`Canvas.to_dict`."""
        callbacks: dict[str, Sequence[Canvas[Any, Any]]] = {"link": self.links, "link_error": self.errbacks}
        return {
            "task": self.task.name,
            "args": list(self.args),
            "kwargs": dict(self.kwargs),
            "options": {name: _as_json(value) for name, value in self._given.items() if name != "stamps"}
            | ({**self.stamps, STAMPED_HEADERS: [*self.stamps]} if self.stamps else {})
            | {name: [callback.to_dict() for callback in given] for name, given in callbacks.items() if given},
            "subtask_type": None,
            "immutable": self.immutable,
        }

    @classmethod
    def from_dict(cls, d: Mapping[str, Any], app: Any = None) -> Canvas[Any, Any]:
        """Return the signature, chain or group for a dictionary from ``to_dict``, bulltask's or Celery's.

        Args:
            d: The dictionary.
            app: The app that sends it, ``None`` for the current one.

        Raises:
            TypeError: It is not a signature, or has options that this app does not know.
        """
        app = app or current_sender()
        kind, kwargs = d.get("subtask_type"), dict(d.get("kwargs") or {})
        options = _from_json(d.get("options") or {}, app)
        if kind is None and "task" in d:
            call = _call_of(app, d["task"], d.get("args") or (), kwargs)
            return call.set(**options, immutable=bool(d.get("immutable")))
        if kind in ("chain", "group") and "tasks" in kwargs:
            parts = [cls.from_dict(part, app) for part in kwargs["tasks"]]
            canvas: Canvas[Any, Any] = chain_of(parts) if kind == "chain" else Group(parts)
        elif kind == "chord" and kwargs.keys() >= {"header", "body"}:
            header: Group[Any, Any] = Group([cls.from_dict(part, app) for part in _as_list(kwargs["header"])])
            canvas = chord_of(header, cls.from_dict(kwargs["body"], app))
        else:
            raise TypeError(f"the dictionary does not describe a signature, chain, group or chord: {d!r:.200}")
        return cast(Canvas[Any, Any], canvas.clone((), None, **options))

    @property
    def given(self) -> Mapping[str, Any]:
        """The options that were given and have an effect, by name."""
        return self._given

    def given_with_callbacks(self) -> dict[str, Any]:
        """Return the options that were given, with ``link`` and ``link_error``."""
        callbacks: dict[str, list[Any]] = {"link": [*self.links], "link_error": [*self.errbacks]}
        return {**self._given, **{name: given for name, given in callbacks.items() if given}}

    def link(self, callback: Canvas[R_co, Any]) -> Any:
        """Run ``callback`` with the result when the call has completed; return ``callback``."""
        check_canvas(callback)
        self.links.append(callback)
        return callback

    def link_error(self, callback: Signature[Any, Any]) -> Signature[Any, Any]:
        """Run ``callback`` if the call fails; see :meth:`Canvas.link_error`."""
        check_canvas(callback)
        self.errbacks.append(callback)
        return callback

    def _take_callbacks(self, options: dict[str, Any]) -> None:
        """Add the callbacks given in Celery's options ``link`` and ``link_error``: one, or a list."""
        self.links += pop_callbacks(options, "link")
        self.errbacks += pop_callbacks(options, "link_error")

    def send_by_public_method(self) -> Any:
        """Send the call with the task's ``apply_async``, or with the app's ``send_task`` if only its name is known."""
        task, options = cast(Any, self.task), self.given_with_callbacks()
        if hasattr(task, "apply_async"):
            return task.apply_async(self.args, self.kwargs, **options)
        return task.sender.send_task(task.name, self.args, self.kwargs, **options)

    def become(self, other: Signature[Any, Any]) -> None:
        """Take the arguments, options and callbacks of another call of the same task."""
        planned_id = self.planned_id or other.planned_id
        vars(self).update({**vars(other), "immutable": self.immutable, "planned_id": planned_id})

    def job(self) -> NewJob:
        """Return this call's job, with a new id each time unless ``job_id`` is set.

        Raises:
            TypeError: The arguments do not match the task, or the signature has callbacks, which are other jobs.
        """
        if self.links or self.errbacks:
            raise TypeError(f"{self!r:.200} has callbacks; send it with its method apply_async")
        job = self.task.build(self.task.bind_json(self.args, self.kwargs, self.options.serializer), self.options)
        return replace(job, id=self.planned_id) if self.planned_id else job

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the task in this process, without a worker."""
        return cast(Any, self.task)(*args, *self.args, **{**self.kwargs, **kwargs})

    def __repr__(self) -> str:
        given = [repr(arg) for arg in self.args] + [f"{name}={value!r}" for name, value in self.kwargs.items()]
        return f"{self.task.name}({', '.join(given)})"


def is_call(canvas: object) -> TypeGuard[Signature[Any, Any]]:
    """Return whether a canvas is one call; chains and groups are instances of ``Signature``, too."""
    return type.__instancecheck__(Signature, canvas)


def _call_of(app: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Signature[Any, Any]:
    mapped = app.tasks.get(kwargs.get("task")) if name == STARMAP else None
    # The job of a starmap has the queue and the other options of the task that it calls.
    call: Signature[Any, Any] = (
        app.signature(name, args, kwargs) if mapped is None else mapped.one_job(kwargs.get("items", ()))
    )
    return call


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _flag(immutable: object) -> bool:
    if not isinstance(immutable, bool):
        raise TypeError(f"immutable must be True or False, not {immutable!r:.200}")
    return immutable


def _as_json(option: Any) -> Any:
    if isinstance(option, timedelta):
        return option.total_seconds()
    return option.isoformat() if isinstance(option, datetime) else option


def _from_json(options: Mapping[str, Any], app: Any) -> dict[str, Any]:
    found = dict(options)
    for name in _CALLBACKS & options.keys():
        found[name] = [Signature.from_dict(callback, app) for callback in _as_list(options[name])]
    for name in _TIMES & options.keys():
        if isinstance(options[name], str):
            found[name] = datetime.fromisoformat(options[name])
    return found


class SignatureConverter(Converter):
    """Converts arguments of tasks whose hint is :class:`Signature`; chains and groups as well, as in Celery."""

    name = "a signature"

    def decode(self, value: Any) -> Canvas[Any, Any]:
        """Return the signature for its JSON form."""
        if not isinstance(value, Mapping):
            raise self.mismatch(value)
        try:
            return Signature.from_dict(value)
        except (AttributeError, TypeError, ValueError) as exc:  # AttributeError: a part is not a dictionary
            raise Mismatch(f"expected {self.name}: {exc}") from exc

    def encode(self, value: Any) -> dict[str, Any]:
        """Return the JSON form of a signature."""
        if isinstance(value, Canvas):
            return value.to_dict()
        return self.decode(value).to_dict()

    def schema(self, definitions: Definitions) -> Schema:  # noqa: ARG002 - as Converter
        """Return the JSON Schema of Celery's format."""
        types = {"task": "string", "args": "array", "kwargs": "object", "options": "object", "immutable": "boolean"}
        properties: Schema = {name: {"type": kind} for name, kind in types.items()}
        return {"type": "object", "properties": {**properties, "subtask_type": {}}, "required": ["task"]}


register_converter(Signature, SignatureConverter())
