"""The form that runs a task, made from the JSON Schema of its type hints, and the arguments that were typed into it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any, Final, Literal

from bulltask.app import App
from bulltask.jobs.errors import BulltaskError
from bulltask.registry.task import AnyTask
from bulltask.registry.tasks import schema_of

__all__ = ["Arguments", "Field", "Invalid", "TaskForm", "task_form"]

Schema = Mapping[str, Any]
Kind = Literal["text", "integer", "number", "choice", "json"]

_Parameter = inspect.Parameter
_MAX_CHOICES: Final = 200


class Invalid(Exception):
    """What was typed cannot be sent; ``errors`` are the problems by the field's name, ``""`` for the whole form."""

    def __init__(self, errors: Mapping[str, str]) -> None:
        super().__init__("; ".join(errors.values()))
        self.errors = errors


@dataclass(frozen=True, slots=True)
class Field:
    """A parameter of a task.

    Attributes:
        name: Its name; ``*args`` and ``**kwargs`` are ``args`` and ``kwargs``.
        kind: How it is typed in: ``text`` is the value itself, ``json`` its JSON.
        required: Whether it has no default.
        default: Its default, as text.
        choices: Its values as JSON, with their labels, if there are only some.
        hint: Its type, in words.
        accepts_none: Whether it may be ``None``.
    """

    name: str
    kind: Kind
    required: bool
    default: str
    choices: Sequence[tuple[str, str]]
    hint: str
    accepts_none: bool

    def parse(self, text: str) -> Any:
        """Return the value that was typed; raises ``ValueError`` with the problem."""
        if self.accepts_none and text.strip() in {"", "null"}:
            return None
        if self.kind == "text":
            return text
        if self.kind == "choice":
            return _chosen(text, dict(self.choices))
        return _number(text, int if self.kind == "integer" else float) if self.kind != "json" else _json(text)


def _chosen(text: str, choices: Mapping[str, str]) -> Any:
    if text not in choices:
        raise ValueError("choose one of the values")
    return json.loads(text)


def _number(text: str, kind: type[int] | type[float]) -> float:
    try:
        number = kind(text)
    except ValueError:
        number = nan
    if not isfinite(number):
        raise ValueError("enter a whole number" if kind is int else "enter a number, such as 1.5")
    return number


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_reject)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f'enter JSON, such as "text", 5, [1, 2] or {{"a": 1}} ({exc})') from None


def _reject(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a call."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TaskForm:
    """The form of a task.

    Attributes:
        name: The task's name.
        description: The first paragraph of its docstring.
        fields: Its parameters.
        problem: Why its type hints could not be read, ``""`` if they could.
    """

    name: str
    description: str
    fields: Sequence[Field]
    problem: str
    kinds: Mapping[str, Any]

    def arguments(self, given: Mapping[str, Any]) -> Arguments:
        """Return the arguments that were typed: an optional one that is empty is left out.

        Raises:
            Invalid: One is missing, or does not have its type.
        """
        values, errors = self._typed(given)
        args, kwargs = list[Any](), dict[str, Any]()
        for name, value in values.items():
            kind = self.kinds[name]
            if kind is _Parameter.VAR_POSITIONAL:
                args += value
            elif kind is _Parameter.VAR_KEYWORD:
                kwargs |= value
            elif kind is _Parameter.POSITIONAL_ONLY or (self._rest in values and kind is not _Parameter.KEYWORD_ONLY):
                args.append(value)
            else:
                kwargs[name] = value
        if errors := {**self._gaps(values), **errors}:
            raise Invalid(errors)
        return Arguments(args, kwargs)

    def _typed(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the values that were typed, in the order of the parameters, and what is wrong with others."""
        values, errors = dict[str, Any](), dict[str, str]()
        containers = {_Parameter.VAR_POSITIONAL: list, _Parameter.VAR_KEYWORD: dict}
        for field in self.fields:
            text = str(given.get(f"arg:{field.name}", ""))
            is_empty = not text.strip()
            if is_empty and not field.required:
                continue
            try:
                if is_empty and field.kind != "text" and not field.accepts_none:
                    raise ValueError("required")  # noqa: TRY301 - as what parse() raises
                value = field.parse(text)
                if not isinstance(value, containers.get(self.kinds[field.name], object)):
                    is_array = self.kinds[field.name] is _Parameter.VAR_POSITIONAL
                    example = "array, such as [1, 2]" if is_array else 'object, such as {"a": 1}'
                    raise ValueError(f"enter a JSON {example}")  # noqa: TRY004, TRY301
                values[field.name] = value
            except ValueError as exc:
                errors[field.name] = str(exc)
        return values, errors

    @property
    def _rest(self) -> str:
        """The name of ``*args``, ``""`` if there is none."""
        return next((name for name, kind in self.kinds.items() if kind is _Parameter.VAR_POSITIONAL), "")

    def _gaps(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Return which arguments are missing before others that have no names."""
        unnamed = [name for name, kind in self.kinds.items() if kind is _Parameter.POSITIONAL_ONLY]
        if self._rest in values:
            unnamed = [name for name, kind in self.kinds.items() if kind is not _Parameter.KEYWORD_ONLY]
            unnamed = unnamed[: unnamed.index(self._rest)]
            return {name: f"required before {self._rest}" for name in unnamed if name not in values}
        given = [name in values for name in unnamed]
        last = max((index for index, is_given in enumerate(given) if is_given), default=0)
        return {name: f"required before {unnamed[last]}" for name in unnamed[:last] if name not in values}


def task_form(app: App, task: AnyTask[..., Any]) -> TaskForm:
    """Return the form of a task."""
    kinds = {name: parameter.kind for name, parameter in inspect.signature(task.function).parameters.items()}
    try:
        schema = schema_of([task], app._config)
        entry, problem = schema["tasks"][task.name], ""
    except BulltaskError as exc:  # for example, pydantic is missing
        schema, entry, problem = {"$defs": {}}, {"data": {}}, str(exc)
    data = entry["data"]
    required = data.get("required", ())
    fields = [
        _field(name, one, schema["$defs"], required=name in required)
        for name, one in data.get("properties", {}).items()
    ]
    return TaskForm(
        task.name,
        entry.get("description", ""),
        fields,
        problem,
        {one.name: kinds.get(one.name, _Parameter.POSITIONAL_OR_KEYWORD) for one in fields},
    )


def _field(name: str, schema: Schema, definitions: Mapping[str, Schema], *, required: bool) -> Field:
    default = schema.get("default")
    kinds = [_resolved(one, definitions) for one in schema.get("anyOf", [schema])]
    accepts_none = any(one.get("type") == "null" for one in kinds)
    kinds = [one for one in kinds if one.get("type") != "null"]
    only = kinds[0] if len(kinds) == 1 else {}
    choices = _choices(only)
    kind: Kind = "json"
    if choices:
        kind = "choice"
    elif only.get("type") in {"string", "integer", "number"}:
        kind = "text" if only["type"] == "string" else only["type"]
    is_plain = kind == "text" and isinstance(default, str)
    text = "" if "default" not in schema else str(default) if is_plain else json.dumps(default, ensure_ascii=False)
    return Field(name, kind, required, text, choices, " or ".join(map(_hint, kinds)), accepts_none)


def _resolved(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    reference = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    return {"title": reference, **definitions.get(reference, {})} if reference else schema


def _choices(schema: Schema) -> list[tuple[str, str]]:
    values = [False, True] if schema.get("type") == "boolean" else schema.get("enum", [])
    values = [schema["const"]] if "const" in schema else values
    if len(values) > _MAX_CHOICES:
        return []
    labels = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
    return [(json.dumps(value, ensure_ascii=False), label) for value, label in zip(values, labels, strict=True)]


def _hint(schema: Schema) -> str:
    """Return a type in words."""
    kind = schema.get("type")
    name = str(
        schema.get("title") or schema.get("format") or kind or ("one of these" if "enum" in schema else "any value")
    )
    if kind == "array":
        items = schema.get("items")
        return f"array of {_hint(items)}" if isinstance(items, Mapping) and items else "array"
    return name.rpartition("/")[2]
