"""Which type hints of a task are enforced, and the conversion of its calls: begin at :class:`CallTypes`.

What a type accepts, and its JSON Schema, is in :mod:`bulltask.registry.pydantic_types`, which is imported for the first
hint that needs it: a program whose tasks have no hints, or only JSON's own types, does not import pydantic.
"""

from __future__ import annotations

import collections
import inspect
import reprlib
import sys
import types
import typing
from collections import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, get_args, get_origin

from bulltask.jobs.errors import HIDDEN_VALUES, ConfigError, DecodeError, EncodeError, InvalidJobError, incompatible

if TYPE_CHECKING:
    from bulltask.registry.pydantic_types import Type

__all__ = [
    "ARRAYS",
    "CIRCULAR",
    "CONVERTERS",
    "OBJECTS",
    "CallConversion",
    "CallTypes",
    "Converter",
    "Definitions",
    "Mismatch",
    "NoConverter",
    "Problem",
    "Schema",
    "field_hints",
    "hint_text",
    "hints_of",
    "is_any",
    "is_plain",
    "is_pydantics",
    "is_typed_dict",
    "problem_text",
    "renamed",
    "shown",
    "underlying",
]


_Kind = inspect.Parameter
_VARIADIC: Final = (_Kind.VAR_POSITIONAL, _Kind.VAR_KEYWORD)


class CallTypes:
    """The types of a task's parameters and return value; with ``skip_first``, the first parameter is the context."""

    def __init__(self, function: Callable[..., Any], task: str, *, skip_first: bool) -> None:
        self._task = task
        parameters = list(inspect.signature(function).parameters.values())[1 if skip_first else 0 :]
        self._parameters = {parameter.name: parameter for parameter in parameters}
        self._names = (*self._parameters, "return")
        hints, problems = hints_of(function)
        self._hints = hints
        self._problems = problems
        self._types: dict[str, Type] = {}

    @property
    def problems(self) -> Mapping[str, str]:
        """Why a hint is ignored, by the name of its parameter or ``"return"``."""
        for name in self._names:
            if not is_plain(self._hint(name)):
                self.type_of(name)
        return self._problems

    def type_of(self, name: str) -> Type:
        """Return the type of a parameter, or of the items of ``*args`` and ``**kwargs``, or of ``"return"``."""
        if name not in self._types:
            rules = _rules(self._task)
            try:
                found = rules.type_of(self._hint(name))
            except NoConverter as exc:
                self._problems[name] = str(exc)
                found = rules.ANYTHING
            is_none = name in self._parameters and self._parameters[name].default is None
            self._types[name] = found.or_none() if is_none else found
        return self._types[name]

    def _hint(self, name: str) -> Any:
        return self._hints.get(name, Any)

    def conversion(self, typed: bool | None, hides_values: Callable[[], bool] = lambda: False) -> CallConversion | None:
        """Return the conversion of calls, ``None`` if nothing is converted.

        Args:
            typed: ``True``: all hints are enforced; ``None``: those of types that JSON does not have; ``False``: none.
            hides_values: Whether messages must not contain values, because the app encrypts payloads; called only for a
                problem.

        Raises:
            ConfigError: ``typed`` is true, and a hint cannot be enforced; or pydantic is missing.
        """
        if typed is False:
            return None
        problems = self.problems
        for name in ("return", *self._parameters) if typed else ():
            if name in problems:
                what = "the return value" if name == "return" else f"parameter {name!r}"
                raise ConfigError(
                    f"task {self._task!r} has typed=True, but the type of {what} cannot be enforced: "
                    f"{problems[name]}; use Any, or leave out typed=True"
                )
        enforced = {
            name: self.type_of(name)
            for name in self._names
            if name not in problems
            and not (is_any(underlying(self._hint(name))) if typed else is_plain(self._hint(name)))
        }
        return CallConversion(self._task, self._parameters, enforced, hides_values) if enforced else None

    def data_schema(self, definitions: Definitions) -> Schema:
        """Return the JSON Schema of the job's data."""
        rules = _rules(self._task)
        fields = {}
        for name, parameter in self._parameters.items():
            required = parameter.default is _Kind.empty and parameter.kind not in _VARIADIC
            fields[name] = rules.Field(rules.stored(self.type_of(name), parameter.kind), required, parameter.default)
        schema: Schema = rules.object_schema(fields, definitions)
        if any(parameter.kind is _Kind.VAR_KEYWORD for parameter in self._parameters.values()):
            return schema  # other keys are keyword arguments, too
        return {**schema, "additionalProperties": False}


class CallConversion:
    """Converts the arguments and results of one task, as far as they are in ``types``.

    These are the types of the converted parameters, of the items of ``*args`` and ``**kwargs``, and of ``"return"``. An
    error's message has the path to the bad value, unless the app encrypts payloads.
    """

    def __init__(
        self,
        task: str,
        parameters: Mapping[str, inspect.Parameter],
        types: Mapping[str, Type],
        hides_values: Callable[[], bool],
    ) -> None:
        self._task = task
        self._types = types
        self._hides_values = hides_values
        self.parameters = types.keys() - {"return"}
        self.converts_result = "return" in types
        kinds = {name: parameter.kind for name, parameter in parameters.items()}
        by_kind = {kind: name for name, kind in kinds.items()}
        self._var_args: str = by_kind.get(_Kind.VAR_POSITIONAL, "")
        self._var_kwargs: str = by_kind.get(_Kind.VAR_KEYWORD, "")
        self._names = [name for name, kind in kinds.items() if kind not in _VARIADIC]
        self._positional = [name for name in self._names if kinds[name] is not _Kind.KEYWORD_ONLY]
        rules = self._rules = _rules(task)
        named = {name: types.get(name, rules.ANYTHING) for name in self._names}
        stored = {name: rules.stored(types[name], kind) for name, kind in kinds.items() if name in types}
        decode, _ = rules.compiled(rules.object_type(named, types.get(self._var_kwargs, rules.ANYTHING)))
        decode_stored, encode = rules.compiled(rules.object_type(stored))
        decode_result, encode_result = rules.compiled(types.get("return", rules.ANYTHING))
        self._decode = decode
        self._decode_stored = decode_stored
        self._encode = encode
        self._decode_result = decode_result
        self._encode_result = encode_result

    def encode_arguments(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments by name, some or all of them, in their JSON form; raises ``EncodeError`` for a mismatch."""
        encoded: dict[str, Any]
        encoded, problems = self._converted(self._encode, data)
        if problems:
            raise EncodeError(f"the arguments of task {self._task}: {self._text(problems)}")
        return encoded

    def decode_arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], pickled: Collection[str] = ()
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert a job's arguments to the types of their hints, unless they were pickled.

        They match the signature; raises ``InvalidJobError`` if one does not match its hint.
        """
        decoded, problems = self._decoded(kwargs, pickled)
        decoded_args: tuple[Any, ...] = ()
        if args:
            by_name, first = self._decoded(dict(zip(self._positional, args, strict=False)), pickled)
            rest = {self._var_args: list(args[len(by_name) :])}
            rest, second = (rest, []) if self._var_args in pickled else self._converted(self._decode_stored, rest)
            decoded_args, problems = (*by_name.values(), *rest[self._var_args]), [*first, *second, *problems]
        if problems:
            problem = f"the job's data does not match task {self._task}: {self._text(problems)}"
            raise incompatible(InvalidJobError(problem))
        return decoded_args, decoded

    def encode_result(self, value: Any) -> Any:
        """Return the JSON form of a return value; raises ``EncodeError`` if it does not match the hint."""
        encoded, problems = self._converted(self._encode_result, value)
        if problems:
            raise EncodeError(f"the return value of task {self._task}: {self._text(problems, of_result=True)}")
        return encoded

    def decode_result(self, value: Any) -> Any:
        """Convert a job's return value to the type of the hint; raises ``DecodeError`` if it does not match."""
        decoded, problems = self._converted(self._decode_result, value)
        if problems:
            raise DecodeError(f"the return value of task {self._task}: {self._text(problems, of_result=True)}")
        return decoded

    def _decoded(self, values: Mapping[str, Any], pickled: Collection[str]) -> tuple[dict[str, Any], list[Problem]]:
        """Return decoded arguments by name."""
        if not pickled:
            return self._converted(self._decode, values)
        kept = {n: v for n, v in values.items() if (n if n in self._names else self._var_kwargs) in pickled}
        decoded, problems = self._converted(self._decode, {n: v for n, v in values.items() if n not in kept})
        return {name: kept[name] if name in kept else decoded[name] for name in values}, problems

    def _converted(self, convert: Callable[[Any], Any], value: Any) -> tuple[Any, list[Problem]]:
        """Return the converted value, or the value itself and why it does not match."""
        try:
            return convert(value), []
        except self._rules.ValidationError as exc:
            return value, self._rules.problems_of(exc)
        except RecursionError:
            return value, [((), CIRCULAR)]

    def _text(self, problems: Sequence[Problem], *, of_result: bool = False) -> str:
        """Return the problems; if values are hidden, only the parameters, because paths and texts contain values."""
        if not self._hides_values():
            return problem_text(problems)
        if of_result:
            return f"expected {self._types['return'].name} ({HIDDEN_VALUES})"
        texts: dict[str, None] = {}
        for path, _ in problems:
            name = str(path[0]) if path and path[0] in self.parameters else f"**{self._var_kwargs}"
            kind = self._types.get(name.removeprefix("**"))
            texts[f"{name}: expected {'its type' if kind is None else kind.name}"] = None
        return f"{'; '.join(texts)} ({HIDDEN_VALUES})"


def _rules(task: str) -> ModuleType:
    """Import the module that needs pydantic, whose import takes 50 ms."""
    try:
        from bulltask.registry import pydantic_types  # noqa: PLC0415
    except ImportError as exc:
        raise ConfigError(
            f"the type hints of task {task!r} need pydantic 2, but {exc}; run: pip install 'pydantic>=2.9,<3'"
        ) from exc
    return pydantic_types


class NoConverter(Exception):
    """A type cannot be converted from and to JSON; the message says which one and why."""


class Converter(Protocol):
    """Converts the values of a class of its own way: see :data:`CONVERTERS`."""

    name: str

    def decode(self, value: Any) -> Any:
        """Return the value for its JSON form; raise :class:`Mismatch` if it has none."""

    def encode(self, value: Any) -> Any:
        """Return the JSON form of a value, or of what is in that form; raise :class:`Mismatch` if it has none."""

    def schema(self, definitions: Definitions) -> Schema:
        """Return the JSON Schema of the JSON form."""


CONVERTERS: Final[dict[type, Converter]] = {}
"""The converters of classes that are defined in higher layers."""

_LISTS: Final = (list, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection)
ARRAYS: Final[Mapping[Any, type]] = {
    **dict.fromkeys(_LISTS, list),
    **dict.fromkeys((set, abc.Set, abc.MutableSet), set),
    frozenset: frozenset,
    collections.deque: collections.deque,
    tuple: tuple,
}
"""The classes whose JSON form is an array of any length, and what they become."""
OBJECTS: Final = (dict, abc.Mapping, abc.MutableMapping)
_PLAIN: Final = (str, int, float, bool, type(None))
_UNCHECKED: Final = (Any, object, typing.NoReturn, typing.Never)
_QUALIFIERS: Final = (typing.Required, typing.NotRequired, typing.Final, getattr(typing, "ReadOnly", typing.Final))


def is_plain(hint: Any, within: tuple[Any, ...] = ()) -> bool:  # noqa: PLR0911 - a return for each kind
    """Return whether JSON has the type, so that only ``typed=True`` enforces it; ``within`` are outer classes."""
    try:
        hint = underlying(hint)
    except RecursionError:  # ``type Json = list[Json] | …``
        return False
    args, origin = get_args(hint), get_origin(hint) or hint
    if is_any(hint) or any(origin is kind for kind in _PLAIN):
        return True
    if origin is Literal:
        return all(value is None or type(value) in (str, int, bool) for value in args)
    if origin in (typing.Union, types.UnionType, *_LISTS):
        return all(is_plain(arg, within) for arg in args)
    if origin in OBJECTS:
        return not args or (_is_text(args[0]) and is_plain(args[1], within))
    if not is_typed_dict(origin) or origin in within:
        return False
    try:
        return all(is_plain(field, (*within, origin)) for field in field_hints(origin).values())
    except NoConverter:
        return False


def _is_text(key: Any) -> bool:
    key = underlying(key)
    return key in (Any, str) or (get_origin(key) is Literal and all(type(value) is str for value in get_args(key)))


def is_typed_dict(kind: Any) -> bool:
    """Return whether a class is a ``TypedDict`` of typing or typing_extensions."""
    return isinstance(kind, type) and issubclass(kind, dict) and hasattr(kind, "__required_keys__")


def is_any(hint: Any) -> bool:
    """Return whether a hint, as :func:`underlying` returns it, allows any value."""
    return isinstance(hint, typing.TypeVar) or any(hint is kind for kind in _UNCHECKED)


def underlying(hint: Any) -> Any:
    """Return the type behind an alias, a ``NewType``, a note, or a qualifier such as ``Required``."""
    while True:
        if hint is None:
            return type(None)
        origin = get_origin(hint)
        if isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":  # Python 3.12, or typing_extensions
            hint = hint.__value__
        elif origin in _QUALIFIERS or (
            origin is typing.Annotated and not any(is_pydantics(part) for part in get_args(hint)[1:])
        ):
            hint = get_args(hint)[0]
        else:
            return hint


def is_pydantics(part: Any) -> bool:
    """Return whether a class, or metadata of ``Annotated``, belongs to pydantic; False unless pydantic is imported."""
    if "pydantic" not in sys.modules:
        return False
    kind = part if isinstance(part, type) else type(part)
    package = kind.__module__.partition(".")[0]
    marks = ("__get_pydantic_core_schema__", "__pydantic_validator__")
    return package in ("pydantic", "annotated_types") or any(hasattr(part, mark) for mark in marks)


def field_hints(kind: type) -> dict[str, Any]:
    """Return the evaluated hints of a class's fields; raise :class:`NoConverter` if that fails."""
    try:
        return typing.get_type_hints(kind, include_extras=True)
    except Exception as exc:  # noqa: BLE001 - evaluating a hint may raise anything
        raise NoConverter(f"the hints of {kind.__name__} cannot be evaluated: {exc}") from None


def hint_text(hint: Any) -> str:
    """Return a hint's name in messages."""
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)


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


Problem = tuple[tuple[str | int, ...], str]
"""The path to a value, and what was expected and found there."""

CIRCULAR: Final = "contains a circular reference, or is nested too deeply"
_LONGEST: Final = 60
_LONGEST_TEXT: Final = 500
_MOST_PROBLEMS: Final = 3
_MOST_PARTS: Final = 20

_repr = reprlib.Repr()  # does not read all of a large value
_repr.maxstring = _repr.maxother = _repr.maxlong = 4 * _LONGEST
_repr.maxlist = _repr.maxtuple = _repr.maxset = _repr.maxfrozenset = _repr.maxdict = _repr.maxdeque = 12


class Mismatch(ValueError):
    """A value does not match a type; the message says what was expected, and what was found."""


def problem_text(problems: Sequence[Problem]) -> str:
    """Return the first problems, with their paths."""
    more = len(problems) - _MOST_PROBLEMS
    found = ((path, _shorten(text, _LONGEST_TEXT)) for path, text in problems[:_MOST_PROBLEMS])
    texts = [f"{_path_text(path)}: {text}" if path else text for path, text in found]
    return "; ".join(texts) + (f"; and {more} more" if more > 0 else "")


def _path_text(path: Sequence[str | int]) -> str:
    short = [part if isinstance(part, int) else _shorten(part, _LONGEST) for part in path[:_MOST_PARTS]]
    parts = [f".{part}" if isinstance(part, str) and part.isidentifier() else f"[{part!r}]" for part in short]
    return "".join(parts).removeprefix(".") + ("…" if len(path) > _MOST_PARTS else "")


def shown(value: object) -> str:
    """Return a short representation of a value, for a message."""
    try:
        text = _repr.repr(value)
    except ValueError:  # an integer of more than 4,300 digits
        text = f"a very long {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({type(value).__name__})"


def _shorten(text: str, chars: int) -> str:
    """Return at most ``chars`` characters of a text."""
    return text if len(text) <= chars else f"{text[: chars - 1]}…"


Schema = dict[str, Any]

_PREFIX: Final = "#/$defs/"


class Definitions:
    """Named types by their names in ``$defs``; types that share a name get distinct ones.

    ``of_results``: the schemas describe what a worker writes, not what it accepts: all fields are present, and each
    type has only one form.
    """

    def __init__(self, *, of_results: bool = False) -> None:
        self.of_results = of_results
        self.schemas: dict[str, Schema] = {}
        self._names: dict[object, str] = {}

    def reference(self, kind: type, build: Callable[[], Schema]) -> Schema:
        """Return a reference to a class; the first call defines it with ``build()``, even if it contains itself."""
        name = self._names.get(kind)
        if name is None:
            name = self._names[kind] = self._unused(kind.__name__)
            self.schemas[name] = {}  # reserved, for classes of the same name among its fields
            self.schemas[name] = build()
        return {"$ref": f"{_PREFIX}{name}"}

    def adopt(self, schema: Mapping[str, Any]) -> Schema:
        """Move the definitions of another tool's schema here, and return the schema with adjusted references."""
        schema = dict(schema)
        found: Mapping[str, Schema] = schema.pop("$defs", {})
        names = {name: self._name_of_equal(name, definition) for name, definition in found.items()}
        for name, definition in found.items():
            self.schemas[names[name]] = renamed(definition, names)
        adopted: Schema = renamed(schema, names)
        return adopted

    def _name_of_equal(self, name: str, definition: Schema) -> str:
        """Return the name of a definition that was adopted before, or a new one."""
        key = (name, repr(definition))
        if key not in self._names:
            self._names[key] = self._unused(name)
            self.schemas[self._names[key]] = {}
        return self._names[key]

    def rename_other(self, others: Mapping[str, Schema]) -> dict[str, str]:
        """Return other names for types that are defined differently in ``others``, or that contain such a type."""
        shared = {name for name, schema in self.schemas.items() if others.get(name, schema) == schema}
        while unequal := {name for name in shared if _references(self.schemas[name]) - shared}:
            shared -= unequal
        names: dict[str, str] = {}
        for name in self.schemas.keys() - shared:
            candidate = f"{name}Result"
            while candidate in others or candidate in self.schemas:
                candidate += "_"
            names[name] = candidate
        return names

    def _unused(self, name: str) -> str:
        number, candidate = 1, name
        while candidate in self.schemas:
            number += 1
            candidate = f"{name}{number}"
        return candidate


def _references(value: Any) -> set[str]:
    match value:
        case dict():
            own = {value["$ref"].removeprefix(_PREFIX)} if isinstance(value.get("$ref"), str) else set()
            return own.union(*(_references(item) for item in value.values()))
        case list():
            return set().union(*(_references(item) for item in value))
        case _:
            return set()


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Return a schema, or a part of one, whose references to types have other names."""
    match value:
        case {"$ref": str(target), **others} if target.startswith(_PREFIX):
            name = target.removeprefix(_PREFIX)
            return {"$ref": f"{_PREFIX}{names.get(name, name)}", **renamed(others, names)}
        case dict():
            return {key: renamed(item, names) for key, item in value.items()}
        case list():
            return [renamed(item, names) for item in value]
        case _:
            return value
