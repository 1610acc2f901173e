"""The types of a function's parameters and return value, and the conversion of its calls."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from bulltask.errors import HIDDEN_VALUES, ConfigError, DecodeError, EncodeError, InvalidJobError, incompatible
from bulltask.typed.build import ANYTHING, NoConverter, converter_of
from bulltask.typed.containers import Array, Object, or_none
from bulltask.typed.converter import Converter, Mismatch
from bulltask.typed.definitions import Definitions, Schema
from bulltask.typed.records import NO_DEFAULT, Field, object_schema
from bulltask.typed.scalars import PLAIN

__all__ = ["CallConversion", "CallTypes", "hints_of"]

_Kind = inspect.Parameter
_VARIADIC: Final = (_Kind.VAR_POSITIONAL, _Kind.VAR_KEYWORD)


class CallTypes:
    """The converters of a task's parameters and return value.

    Args:
        function: The task's function.
        task: The task's name, for messages.
        skip_first: The first parameter is the context (``bind=True``), not an argument.

    Attributes:
        problems: Why a hint was ignored, by the name of its parameter or ``"return"``.
    """

    def __init__(self, function: Callable[..., Any], task: str, *, skip_first: bool) -> None:
        self._task = task
        parameters = list(inspect.signature(function).parameters.values())[1 if skip_first else 0 :]
        self._parameters = {parameter.name: parameter for parameter in parameters}
        hints, self.problems = hints_of(function)
        self._items = {name: self._converter(name, hints) for name in self._parameters}
        for name, parameter in self._parameters.items():
            if parameter.default is None:
                self._items[name] = or_none(self._items[name])
        self.fields = {name: self._field(parameter) for name, parameter in self._parameters.items()}
        self.result = self._converter("return", hints)

    def _converter(self, name: str, hints: Mapping[str, Any]) -> Converter:
        try:
            return converter_of(hints.get(name, Any))
        except NoConverter as exc:
            self.problems[name] = str(exc)
            return ANYTHING

    def _field(self, parameter: inspect.Parameter) -> Field:
        """Return the field of a parameter in the job's data; ``*args`` is an array, ``**kwargs`` an object."""
        item = self._items[parameter.name]
        if parameter.kind is _Kind.VAR_POSITIONAL:
            return Field(Array(item, "an array", list, ()), required=False)
        if parameter.kind is _Kind.VAR_KEYWORD:
            return Field(Object(PLAIN[str], item), required=False)
        default = NO_DEFAULT if parameter.default is _Kind.empty else parameter.default
        return Field(item, default is NO_DEFAULT, default)

    def conversion(self, typed: bool | None) -> CallConversion | None:
        """Return the conversion of calls, ``None`` if nothing is converted.

        Args:
            typed: ``True``: all hints are enforced; ``None``: those of types that JSON does not have; ``False``: none.

        Raises:
            ConfigError: ``typed`` is true, and a hint cannot be enforced.
        """
        if typed is False:
            return None
        for name in ("return", *self._parameters) if typed else ():
            if name in self.problems:
                what = "the return value" if name == "return" else f"parameter {name!r}"
                raise ConfigError(
                    f"task {self._task!r} has typed=True, but the type of {what} cannot be enforced: "
                    f"{self.problems[name]}; use Any, or leave out typed=True"
                )
        enforced = {name for name, item in self._items.items() if self._is_enforced(item, typed)}
        result = self.result if self._is_enforced(self.result, typed) else None
        if not enforced and result is None:
            return None
        names = [name for name, parameter in self._parameters.items() if parameter.kind not in _VARIADIC]
        by_kind = {parameter.kind: name for name, parameter in self._parameters.items()}
        return CallConversion(
            self._task,
            {name: self.fields[name].converter for name in enforced},
            {name: self._items[name] for name in enforced},
            positional=[name for name in names if self._parameters[name].kind is not _Kind.KEYWORD_ONLY],
            var_args=by_kind.get(_Kind.VAR_POSITIONAL),
            var_kwargs=by_kind.get(_Kind.VAR_KEYWORD),
            names=frozenset(names),
            result=result,
        )

    @staticmethod
    def _is_enforced(converter: Converter, typed: bool | None) -> bool:
        return converter is not ANYTHING if typed else not converter.plain

    def data_schema(self, definitions: Definitions) -> Schema:
        """Return the JSON Schema of the job's data."""
        schema = object_schema(self.fields, definitions)
        if any(parameter.kind is _Kind.VAR_KEYWORD for parameter in self._parameters.values()):
            return schema  # other keys are keyword arguments, too
        return {**schema, "additionalProperties": False}


@dataclass(frozen=True)
class CallConversion:
    """Converts the arguments and results of one task.

    Attributes:
        task: The task's name, for messages.
        fields: The converted parameters, as they are in the job's data.
        items: The converted parameters, or for ``*args`` and ``**kwargs``, their items.
        positional: Names of the parameters that can be passed by position.
        var_args, var_kwargs: Names of ``*args`` and ``**kwargs``.
        names: Names of the other parameters.
        result: The converter of the return value, ``None`` if it is not converted.
    """

    task: str
    fields: Mapping[str, Converter]
    items: Mapping[str, Converter]
    positional: Sequence[str]
    var_args: str | None
    var_kwargs: str | None
    names: frozenset[str]
    result: Converter | None
    hides_values: Callable[[], bool] = bool
    """Whether messages must not contain values, because the app encrypts payloads; called only for a problem."""

    def without(self, names: Collection[str]) -> CallConversion:
        """Return the conversion of the other parameters."""
        return replace(self, items={name: item for name, item in self.items.items() if name not in names})

    def encode_arguments(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments by parameter name, some or all of them, in their JSON form.

        Raises:
            EncodeError: An argument does not match its type hint; the message has the path to the bad value.
        """
        problems: list[_Problem] = []
        encoded = {
            name: _convert(self.fields.get(name), "encode", value, (name,), problems) for name, value in data.items()
        }
        if problems:
            raise EncodeError(f"the arguments of task {self.task}: {self._text(problems)}")
        return encoded

    def decode_arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert a job's arguments, which match the signature, to the types of their hints.

        Raises:
            InvalidJobError: An argument does not match its type hint; the message has the path to the bad value.
        """
        problems: list[_Problem] = []
        count = len(self.positional)
        decoded_args = [
            _convert(self.items.get(name), "decode", value, (name,), problems)
            for name, value in zip(self.positional, args, strict=False)
        ]
        decoded_args += [
            _convert(self.items.get(self.var_args or ""), "decode", value, (self.var_args or "", index), problems)
            for index, value in enumerate(args[count:])
        ]
        decoded_kwargs = {
            name: _convert(self._item_of(name), "decode", value, (name,), problems) for name, value in kwargs.items()
        }
        if problems:
            problem = f"the job's data does not match task {self.task}: {self._text(problems)}"
            raise incompatible(InvalidJobError(problem))
        return tuple(decoded_args), decoded_kwargs

    def _item_of(self, name: str) -> Converter | None:
        return self.items.get(name if name in self.names else self.var_kwargs or "")

    def encode_result(self, value: Any) -> Any:
        """Return the JSON form of a return value.

        Raises:
            EncodeError: The value does not match the type hint; the message has the path to the bad value.
        """
        problems: list[_Problem] = []
        encoded = _convert(self.result, "encode", value, (), problems)
        if problems:
            raise EncodeError(f"the return value of task {self.task}: {self._text(problems)}")
        return encoded

    def decode_result(self, value: Any) -> Any:
        """Convert a job's return value to the type of the hint.

        Raises:
            DecodeError: The value does not match the type hint; the message has the path to the bad value.
        """
        problems: list[_Problem] = []
        decoded = _convert(self.result, "decode", value, (), problems)
        if problems:
            raise DecodeError(f"the return value of task {self.task}: {self._text(problems)}")
        return decoded

    def _text(self, problems: Sequence[_Problem]) -> str:
        """Return the problems, or if values are hidden, only the parameters: paths and texts contain values."""
        if not self.hides_values():
            return str(Mismatch.of_several(problems))
        found = dict.fromkeys(str(path[0]) if path else "" for path, _ in problems)
        names = [name if name in self.items or not name else f"**{self.var_kwargs}" for name in found]
        texts = []
        for name in dict.fromkeys(names):
            hint = self.result if not name else self.items.get(name.removeprefix("**"))
            kind = "its type" if hint is None else hint.name
            texts.append(f"{name}: expected {kind}".removeprefix(": "))
        return f"{'; '.join(texts)} ({HIDDEN_VALUES})"


_Path = tuple[str | int, ...]
_Problem = tuple[_Path, str]


def _convert(converter: Converter | None, method: str, value: Any, path: _Path, problems: list[_Problem]) -> Any:
    """Return the converted value; append any mismatch to ``problems``."""
    if converter is None:
        return value
    try:
        return getattr(converter, method)(value)
    except Mismatch as exc:
        problems += [((*path, *rest), text) for rest, text in exc.problems]
    except RecursionError:
        problems.append((path, "contains a circular reference, or is nested too deeply"))
    return None


def hints_of(function: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a function's evaluated hints, and the reasons why others cannot be evaluated, by parameter name.

    A name that exists only for type checkers (``if TYPE_CHECKING:``) affects only the hints that contain it.
    """
    try:
        return typing.get_type_hints(function, include_extras=True), {}
    except Exception:  # noqa: BLE001 - evaluating a hint may raise anything
        hints: dict[str, Any] = {}
        problems: dict[str, str] = {}
    variables = getattr(inspect.unwrap(function), "__globals__", {})
    for name, hint in getattr(function, "__annotations__", {}).items():
        try:
            hints |= typing.get_type_hints(_with_hint(name, hint), globalns=variables, include_extras=True)
        except Exception as exc:  # noqa: BLE001 - as above
            problems[name] = f"its hint cannot be evaluated: {exc}"
    return hints, problems


def _with_hint(name: str, hint: Any) -> Callable[[], None]:
    def holder() -> None: ...

    holder.__annotations__ = {name: hint}
    return holder
