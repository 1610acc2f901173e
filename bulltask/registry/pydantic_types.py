"""What pydantic checks and converts for each type hint: begin at :func:`type_of`.

A hint becomes two schemas of pydantic's engine. ``decoder`` makes values of their JSON form; ``encoder`` makes the JSON
form of values, and of parts that are in that form already. Types of the standard library have rules of their own that
are stricter than pydantic's (docs/how-to/typed-arguments.md, ADR 27); pydantic's types follow the rules of pydantic.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import enum
import inspect
import itertools
import json
import re
import types
import typing
from collections import abc
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from pathlib import PurePath
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin
from uuid import UUID

from pydantic_core import (
    InitErrorDetails,
    PydanticCustomError,
    PydanticSerializationError,
    SchemaValidator,
    ValidationError,
)
from pydantic_core import core_schema as core
from pydantic_core.core_schema import CoreSchema

from bulltask.jobs.errors import did_you_mean
from bulltask.jobs.names import format_bytes, format_datetime, format_duration
from bulltask.registry.types import (
    ARRAYS,
    CIRCULAR,
    CONVERTERS,
    OBJECTS,
    Converter,
    Definitions,
    Mismatch,
    NoConverter,
    Problem,
    Schema,
    field_hints,
    hint_text,
    is_any,
    is_plain,
    is_pydantics,
    is_typed_dict,
    problem_text,
    shown,
    underlying,
)

__all__ = [
    "ANYTHING",
    "Field",
    "Type",
    "ValidationError",
    "compiled",
    "object_schema",
    "object_type",
    "problems_of",
    "stored",
    "type_of",
]

FIRST, EXACT, CONVERTED, LAST, ANY_RANK = range(5)
"""The order in which a value is compared with the members of a union: single values (enum members, literals); JSON's
numbers and booleans; converted types; JSON's strings, arrays and objects, which may also represent converted types;
any value."""

Convert = Callable[[Any], Any]
_SchemaOf = Callable[[Definitions], Schema]

_IN_JSON: Final = object()
"""In the context of an encoder: a dataclass was given as an object."""
_EXPECTED: Final = "bulltask_expected"
_UNKNOWN: Final = "bulltask_unknown_field"
_NO_DEFAULT: Final = inspect.Parameter.empty
_OMITTED: Final = object()


@dataclass(frozen=True, slots=True)
class Type:
    """The type that a hint describes.

    Attributes:
        name: Its name in messages.
        decoder, encoder: The schemas of pydantic's engine.
        schema: Returns the JSON Schema of the JSON form.
        rank: Its place in a union.
        exact: A schema for exactly this type, if ``decoder`` also accepts the other type of number.
        has_parts: An error may be in one of its parts.
        accepts_none: ``None`` is one of its values.
    """

    name: str
    decoder: CoreSchema
    encoder: CoreSchema
    schema: _SchemaOf
    rank: int = CONVERTED
    exact: CoreSchema | None = None
    has_parts: bool = False
    accepts_none: bool = False

    def or_none(self) -> Type:
        """Return a type that accepts ``None``, too: for ``day: date = None``, which means ``date | None``."""
        return self if self.accepts_none else _union([self, _NULL])


def type_of(hint: Any) -> Type:
    """Return the type of an evaluated hint; raises ``NoConverter`` if JSON cannot represent it, or it is no type."""
    builder = _Builder()
    try:
        return builder.completed(builder.build(hint))
    except RecursionError:  # ``type Json = list[Json] | …``
        raise NoConverter(f"{hint_text(hint)} is an alias that contains itself") from None


def compiled(found: Type) -> tuple[Convert, Convert]:
    """Return two functions: from JSON form to value, and from value to JSON form; they raise ``ValidationError``."""
    decode, encode = (SchemaValidator(schema).validate_python for schema in (found.decoder, found.encoder))

    def encoded(value: Any) -> Any:
        context: dict[Any, Any] = {}
        form = encode(value, context=context)
        if _IN_JSON in context:
            decode(form, context={})  # runs the checks of dataclasses, such as __post_init__
        return form

    return lambda value: decode(value, context={}), encoded  # what the context is for: see _attempt


def problems_of(error: ValidationError) -> list[Problem]:
    """Return where and what the problems are. Messages of pydantic's own types do not contain the value."""
    problems: list[Problem] = []
    for found in error.errors(include_url=False):
        path, text, kind, context = found["loc"], found["msg"], found["type"], found.get("ctx", {})
        path = path[:-1] if path[-1:] == ("[key]",) else path
        if isinstance(context.get("error"), Mismatch):
            text = str(context["error"])
        elif kind == _EXPECTED:
            text = f"{text}, not {shown(found['input'])}"
        elif kind == _UNKNOWN:
            text += did_you_mean(str(path[-1]), context["fields"])
        elif kind == "missing":
            text = "missing"
        elif kind.startswith("recursion_"):
            path, text = path[:1], CIRCULAR
        problems.append((path, text))
    return problems


_call: Final = core.no_info_plain_validator_function
_chain: Final = core.chain_schema


def _first(choices: Sequence[CoreSchema | tuple[CoreSchema, str]]) -> CoreSchema:
    return core.union_schema(list(choices), mode="left_to_right")


def _expected(name: str, schema: CoreSchema) -> CoreSchema:
    """Replace the errors of a schema by what was expected."""
    return core.custom_error_schema(schema, _EXPECTED, custom_error_message=f"expected {name}")


def _instance(name: str, *kinds: type, then: CoreSchema) -> CoreSchema:
    """Check the class first, because pydantic accepts others: for example, a set for a list."""
    return _chain([_expected(name, core.is_instance_schema(kinds)), then])


def _as_given(value: Any, handler: core.ValidatorFunctionWrapHandler) -> Any:
    """Check a value, and return it unchanged."""
    handler(value)
    return value


def _constant(schema: Schema) -> _SchemaOf:
    return lambda _: dict(schema)


def _plain(name: str, json_type: str, rank: int, native: CoreSchema, exact: CoreSchema | None = None) -> Type:
    checked = _expected(name, native)
    return Type(name, checked, checked, _constant({"type": json_type}), rank, exact)


def _converted(
    name: str, kind: type, parse: CoreSchema, form: Convert, schema: _SchemaOf, rank: int = CONVERTED
) -> Type:
    """Return a type that ``parse`` reads, and whose JSON form ``form`` returns; it raises ``ValueError`` for others."""
    unchanged = core.no_info_wrap_validator_function(_as_given, parse)
    encoder = _first([_chain([core.is_instance_schema(kind), _call(form)]), unchanged])
    return Type(name, _expected(name, parse), _expected(name, encoder), schema, rank)


def _text(name: str, kind: type, parse: Callable[[str], Any], form: Callable[[Any], str], **schema: str) -> Type:
    return _converted(name, kind, _chain([_STRING, _call(parse)]), form, _constant({"type": "string", **schema}))


def _or_number(format_: str) -> _SchemaOf:
    """Return the schema of a type that is written as a string, and may also be read from a number."""
    text = {"type": "string", "format": format_}
    return lambda definitions: text if definitions.of_results else {"anyOf": [text, {"type": "number"}]}


def _whole(value: Any) -> int:
    if isinstance(value, float) and value.is_integer():  # JavaScript has only one type of numbers
        return int(value)
    raise ValueError


def _parse_datetime(text: str) -> datetime:
    if len(text) <= len("2026-11-23"):  # a date without a time
        raise ValueError
    return datetime.fromisoformat(text)


def _format_date(day: date) -> str:
    if isinstance(day, datetime):
        raise ValueError  # noqa: TRY004 - pydantic takes a ValueError for a mismatch
    return day.isoformat()


def _parse_bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as exc:
        raise ValueError from exc


def _parse_decimal(value: Any) -> Decimal:
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        raise ValueError  # noqa: TRY004 - as above
    try:
        return _finite(Decimal(repr(value) if isinstance(value, float) else value))
    except InvalidOperation:
        raise ValueError from None


def _finite(number: Decimal) -> Decimal:
    if not number.is_finite():
        raise ValueError
    return number


_DURATION: Final = re.compile(
    r"(?P<sign>[-+]?)P(?!$)(?:(?P<weeks>\d+)W)?(?:(?P<days>\d+)D)?"
    r"(?:T(?!$)(?:(?P<hours>\d+)H)?(?:(?P<minutes>\d+)M)?(?:(?P<seconds>\d+)(?:[.,](?P<fraction>\d{1,9}))?S)?)?",
    re.ASCII,
)


def _parse_duration(value: Any) -> timedelta:
    """Parse ``-P1DT2H3M4.5S``, or seconds; years and months have no fixed length."""
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return timedelta(seconds=value)
        if isinstance(value, str) and (match := _DURATION.fullmatch(value)):
            parts = {name: int(match[name] or 0) for name in ("weeks", "days", "hours", "minutes", "seconds")}
            length = timedelta(**parts, microseconds=int((match["fraction"] or "").ljust(6, "0")[:6]))
            return -length if match["sign"] == "-" else length
    except OverflowError:
        pass
    raise ValueError


ANYTHING: Final = Type("any value", core.any_schema(), core.any_schema(), _constant({}), ANY_RANK, accepts_none=True)
_STRING: Final = core.str_schema(strict=True)
_INT: Final = core.int_schema(strict=True)
_FLOAT: Final = core.is_instance_schema(float)  # pydantic's takes a Decimal, too
_NULL: Final = replace(_plain("null", "null", EXACT, core.none_schema()), accepts_none=True)
_PLAIN: Final[Mapping[type, Type]] = {
    str: _plain("a string", "string", LAST, _STRING),
    int: _plain("an integer", "integer", EXACT, _first([_INT, _call(_whole)]), exact=_INT),
    float: _plain("a number", "number", EXACT, _first([_FLOAT, _chain([_INT, core.float_schema()])]), exact=_FLOAT),
    bool: _plain("true or false", "boolean", EXACT, core.bool_schema(strict=True)),
    type(None): _NULL,
}
_MOMENT: Final = "a date and time such as '2026-11-23T10:00:00Z'"
_LENGTH: Final = "a duration such as 'PT1H30M', or seconds"
_BASE64: Final = {"contentEncoding": "base64"}
_SCALARS: Final[Mapping[type, Type]] = {
    **_PLAIN,
    datetime: _text(_MOMENT, datetime, _parse_datetime, format_datetime, format="date-time"),
    date: _text("a date such as '2026-11-23'", date, date.fromisoformat, _format_date, format="date"),
    time: _text("a time such as '10:00:00'", time, time.fromisoformat, time.isoformat, format="time"),
    timedelta: _converted(_LENGTH, timedelta, _call(_parse_duration), format_duration, _or_number("duration")),
    UUID: _text("a UUID", UUID, UUID, str, format="uuid"),
    Decimal: _converted(
        "a decimal number", Decimal, _call(_parse_decimal), lambda value: str(_finite(value)), _or_number("decimal")
    ),
    bytes: _text("bytes in base64", bytes, _parse_bytes, format_bytes, **_BASE64),
    bytearray: _text("bytes in base64", bytearray, lambda text: bytearray(_parse_bytes(text)), format_bytes, **_BASE64),
}


def _members(by_form: Sequence[tuple[Any, Any]]) -> tuple[str, CoreSchema, Schema]:
    """Return name, decoder and JSON Schema of a type that has only these members: pairs of JSON form and value."""
    known = {(type(form), form): member for form, member in by_form}  # with the type, because True == 1 == 1.0

    def look_up(value: Any) -> Any:
        try:
            return known[type(value), value]
        except (KeyError, TypeError):  # TypeError: a list cannot be a key
            raise ValueError from None

    forms = [form for _, form in known]
    names = ", ".join(map(repr, forms))
    if len(forms) == 1:
        return names, _call(look_up), {"const": forms[0]}
    return f"one of {names}", _call(look_up), {"enum": forms}


def _literal(hint: Any, values: Sequence[Any]) -> Type:
    if not is_plain(hint):
        raise NoConverter(f"{hint_text(hint)} contains a value that JSON does not support")
    name, look_up, schema = _members([(value, value) for value in values])
    checked = _expected(name, look_up)
    return Type(name, checked, checked, _constant(schema), FIRST, accepts_none=None in values)


def _enum(kind: type[enum.Enum]) -> Type:
    """Return the type of an enum's members, whose JSON form is their value."""
    if not kind.__members__:
        raise NoConverter(f"{kind.__name__} has no members, so it cannot be converted to JSON")
    for member in kind:
        if member.value is not None and type(member.value) not in (str, int, float, bool):
            text = f"{kind.__name__}.{member.name} has the value {shown(member.value)}"
            raise NoConverter(f"{text}, so it cannot be converted to JSON")
    name, parse, values = _members([(member.value, member) for member in kind])
    schema: _SchemaOf = lambda definitions: definitions.reference(kind, lambda: values)  # noqa: E731
    if issubclass(kind, enum.Flag):  # a combination of members has another value
        parse, schema = _chain([_INT, _call(kind)]), _constant({"type": "integer"})
    found = _converted(name, kind, parse, lambda member: member.value, schema, FIRST)
    return replace(found, accepts_none=any(member.value is None for member in kind))


def _single_value(kind: Any) -> Type | None:
    if issubclass(kind, enum.Enum):
        return _enum(kind)
    return _text("a path", kind, kind, str) if issubclass(kind, PurePath) else _SCALARS.get(kind)


def _key(hint: Any, key: Type) -> Type:
    """Return the type of an object's keys: strings, or integers that are written as strings."""
    definitions = Definitions()
    schema = key.schema(definitions)
    schema = next(iter(definitions.schemas.values()), schema)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    kinds: set[object] = {type(value) for value in values} or {schema.get("type")}
    if kinds in ({str}, {"string"}):
        return key
    if kinds not in ({int}, {"integer"}) or key.rank > EXACT:
        raise NoConverter(f"the keys of a JSON object are strings, and {hint_text(hint)} cannot be represented by one")
    parse = _chain([_call(int), key.decoder])
    text = _chain([core.is_instance_schema(str), core.no_info_wrap_validator_function(_as_given, parse)])
    encoder = _first([text, _chain([key.encoder, _call(str)])])
    keys = _constant({"type": "string", "pattern": "^-?[0-9]+$"})
    return Type(key.name, _expected(key.name, parse), _expected(key.name, encoder), keys)


def _array(make: type, item: Type, rank: int = CONVERTED) -> Type:
    is_set = make in (set, frozenset)
    name, more = ("an array of unique items", {"uniqueItems": True}) if is_set else ("an array", {})
    decoder, encoder = (core.list_schema(schema, fail_fast=True) for schema in (item.decoder, item.encoder))
    native: Mapping[type, CoreSchema] = {list: decoder, tuple: core.tuple_variable_schema(item.decoder)}

    def collect(values: list[Any]) -> Any:
        try:
            return make(values)
        except TypeError as exc:  # an unhashable item of a set, which pydantic 2.9 does not catch
            raise Mismatch(str(exc)) from None

    return Type(
        name,
        _instance(name, list, then=native.get(make) or _chain([decoder, _call(collect)])),
        _instance(name, list, tuple, *((set, frozenset) if is_set else (make,)), then=encoder),
        lambda definitions: {"type": "array", "items": item.schema(definitions), **more},
        rank,
        has_parts=True,
    )


def _fixed_tuple(items: Sequence[Type], make: Convert = tuple, defaults: int = 0) -> Type:
    """Return the type of a tuple with a type for each item; the last ones may be missing if they have defaults."""
    name, required = f"an array of {len(items)} items", len(items) - defaults

    def check(values: Any) -> Any:
        if not required <= len(values) <= len(items):
            raise Mismatch(f"expected {name}, not {len(values)}")
        return values

    def parts(schemas: Iterable[CoreSchema], then: Convert) -> CoreSchema:
        fields = [
            schema if index < required else core.with_default_schema(schema, default=_OMITTED)
            for index, schema in enumerate(schemas)
        ]
        given = lambda values: then([value for value in values if value is not _OMITTED])  # noqa: E731
        return _chain([_call(check), core.tuple_schema(fields), _call(given)])

    return Type(
        name,
        _instance(name, list, then=parts([item.decoder for item in items], make)),
        _instance(name, list, tuple, then=parts([item.encoder for item in items], list)),
        lambda definitions: {
            "type": "array",
            "prefixItems": [item.schema(definitions) for item in items],
            "minItems": required,
            "maxItems": len(items),
        },
        has_parts=True,
    )


def _object(key: Type, value: Type, rank: int = CONVERTED) -> Type:
    def schema(definitions: Definitions) -> Schema:
        found: Schema = {"type": "object", "additionalProperties": value.schema(definitions)}
        keys = key.schema(definitions)
        return found if keys == {"type": "string"} else {**found, "propertyNames": keys}

    return Type(
        "an object",
        _instance("an object", dict, then=core.dict_schema(key.decoder, value.decoder)),
        _instance("an object", abc.Mapping, then=core.dict_schema(key.encoder, value.encoder)),
        schema,
        rank,
        has_parts=True,
    )


def _union(written: Sequence[Type]) -> Type:
    """Return the type of ``A | B | None``: the first member that matches, in the order of their ranks."""
    name = " or ".join(member.name for member in sorted(written, key=lambda member: member.rank))
    members = sorted((member for member in written if member is not _NULL), key=lambda member: member.rank)
    decoder, encoder = members[0].decoder, members[0].encoder
    if len(members) > 1:
        decoder = _first_match(name, members, [member.decoder for member in members])
        encoder = _first_match(name, members, [member.encoder for member in members])
    is_optional = len(members) < len(written)
    return Type(
        name,
        core.nullable_schema(decoder) if is_optional else decoder,
        core.nullable_schema(encoder) if is_optional else encoder,
        lambda definitions: {"anyOf": [member.schema(definitions) for member in written]},
        max(member.rank for member in written),
        has_parts=any(member.has_parts for member in members),
        accepts_none=any(member.accepts_none for member in written),
    )


def _first_match(name: str, members: Sequence[Type], schemas: Sequence[CoreSchema]) -> CoreSchema:
    """Return the schema of a union; a number is first compared with its own type, then with the other one."""
    several = sum(member.has_parts for member in members) > 1
    tried = [
        _attempt(schema) if several and member.has_parts else member.exact or schema
        for member, schema in zip(members, schemas, strict=True)
    ]
    choices = [(schema, str(index)) for index, schema in enumerate(tried)]
    choices += [(schemas[index], str(index)) for index, member in enumerate(members) if member.exact]
    if not any(member.has_parts for member in members):
        return _expected(name, _first(choices))

    def explained(value: Any, handler: core.ValidatorFunctionWrapHandler) -> Any:
        """Add the reason for each member of the value's kind; the others are only named."""
        try:
            return handler(value)
        except ValidationError as exc:
            problems = problems_of(exc)
            if any(text == CIRCULAR for _, text in problems):
                raise
        texts = []
        for index, member in enumerate(members):
            found = [(path[1:], text) for path, text in problems if path[0] == str(index)]
            texts += [f"{member.name}: {problem_text(found)}"] if any(path for path, _ in found) else []
        details = f" ({'; '.join(texts)})" if texts else ""
        raise Mismatch(f"expected {name}, not {shown(value)}{details}")

    return core.no_info_wrap_validator_function(explained, _first(choices))


def _attempt(schema: CoreSchema) -> CoreSchema:
    """Remember for which parts of a value a member of a union has failed.

    Members that contain the union would otherwise try all members for each part again, at each level.
    """

    def attempt(value: Any, handler: core.ValidatorFunctionWrapHandler, info: core.ValidationInfo[Any]) -> Any:
        failed = info.context
        if (key := (attempt, id(value))) in failed:
            raise failed[key][1].with_traceback(None)
        try:
            return handler(value)
        except ValidationError as exc:
            failed[key] = value, exc  # with the value, so that no other gets its id
            raise

    return core.with_info_wrap_validator_function(attempt, schema)


class Field(NamedTuple):
    """A field of a dataclass, key of a ``TypedDict``, or parameter; its default, if a schema can show it."""

    type: Type
    required: bool
    default: Any = _NO_DEFAULT


def object_schema(fields: Mapping[str, Field], definitions: Definitions) -> Schema:
    """Return the JSON Schema of an object with these fields."""
    properties: Schema = {}
    for name, field in fields.items():
        properties[name] = field.type.schema(definitions)
        if field.default is not _NO_DEFAULT:
            try:
                properties[name] = {**properties[name], "default": compiled(field.type)[1](field.default)}
            except ValidationError:  # such as None for "not given"
                continue
    schema: Schema = {"type": "object", "properties": properties}
    required = [name for name, field in fields.items() if field.required]
    return {**schema, "required": required} if required else schema


def object_type(named: Mapping[str, Type], others: Type = ANYTHING) -> Type:
    """Return the type of values by their names, some or all of them; other names have the type ``others``."""
    fields = {name: Field(found, required=False) for name, found in named.items()}
    return Type("an object", *_by_name(fields, others.decoder), lambda _: {}, has_parts=True)


def _by_name(fields: Mapping[str, Field], others: CoreSchema) -> tuple[CoreSchema, CoreSchema]:
    decoders = {n: core.typed_dict_field(field.type.decoder, required=field.required) for n, field in fields.items()}
    encoders = {n: core.typed_dict_field(field.type.encoder, required=field.required) for n, field in fields.items()}
    return (
        core.typed_dict_schema(decoders, extra_behavior="allow", extras_schema=others),
        core.typed_dict_schema(encoders, extra_behavior="allow", extras_schema=others),
    )


def stored(item: Type, kind: Any) -> Type:
    """Return the type of a parameter in the job's data: ``*args`` are an array, ``**kwargs`` an object."""
    if kind is inspect.Parameter.VAR_POSITIONAL:
        return _array(list, item)
    return _object(_PLAIN[str], item) if kind is inspect.Parameter.VAR_KEYWORD else item


class _Nothing:
    """It has no instances: no value is accepted."""


def _record(builder: _Builder, kind: Any) -> Type:
    """Return the type of a dataclass: an object with exactly its fields."""
    name, hints = kind.__name__, field_hints(kind)
    fields: dict[str, Field] = {}
    for field in (field for field in dataclasses.fields(kind) if field.init):
        found = builder.field(kind, field.name, hints[field.name])
        required = field.default is field.default_factory is dataclasses.MISSING
        default = _NO_DEFAULT if field.default is dataclasses.MISSING else field.default
        fields[field.name] = Field(found.or_none() if default is None else found, required, default)
    unknown = core.custom_error_schema(
        core.is_instance_schema(_Nothing),
        _UNKNOWN,
        custom_error_message=f"{name} has no such field",
        custom_error_context={"fields": list(fields)},
    )
    decoder, encoder = _by_name(fields, unknown)

    def schema(definitions: Definitions) -> Schema:
        given = {name: field._replace(type=builder.completed(field.type)) for name, field in fields.items()}
        if definitions.of_results:  # the worker writes all fields
            given = {name: Field(field.type, required=True) for name, field in given.items()}
        return {**object_schema(given, definitions), "additionalProperties": False}

    return Type(
        name,
        _instance(f"{name} as an object", dict, then=_chain([decoder, _call(_made(kind))])),
        _chain([_fields_of(kind, fields.keys()), encoder]),
        lambda definitions: definitions.reference(kind, lambda: schema(definitions)),
        has_parts=True,
    )


def _made(kind: type) -> Convert:
    def make(values: dict[str, Any]) -> Any:
        try:
            return kind(**values)
        except Exception as exc:
            raise Mismatch(f"{type(exc).__name__}: {exc}") from exc

    return make


def _fields_of(kind: Any, names: Set[str]) -> CoreSchema:
    """Replace an instance by a dictionary of its fields; a dictionary is its JSON form."""

    def fields_of(value: Any, info: core.ValidationInfo[Any]) -> Any:
        if isinstance(value, Mapping):
            info.context[_IN_JSON] = True
            return value
        if not isinstance(value, kind):
            raise Mismatch(f"expected {kind.__name__}, not {shown(value)}")
        if type(value) is not kind and (more := {field.name for field in dataclasses.fields(value)} - names):
            found = f"{type(value).__name__}, whose field {min(more)!r} would be lost"
            raise Mismatch(f"expected {kind.__name__}, not {found}")
        values = getattr(value, "__dict__", {})
        return values if values.keys() == names else {name: getattr(value, name) for name in names}

    return core.with_info_plain_validator_function(fields_of)


def _typed_dictionary(builder: _Builder, kind: Any) -> Type:
    """Return the type of a ``TypedDict``. Other keys are kept, as in Python's type system."""
    name, fields = kind.__name__, {}
    for key, hint in field_hints(kind).items():
        mark = get_origin(hint)  # __required_keys__ does not account for string annotations
        required = mark is typing.Required or (key in kind.__required_keys__ and mark is not typing.NotRequired)
        fields[key] = Field(builder.field(kind, key, hint), required)
    decoder, encoder = _by_name(fields, ANYTHING.decoder)
    return Type(
        name,
        _instance(name, dict, then=decoder),
        _instance(name, dict, then=encoder),
        lambda definitions: definitions.reference(kind, lambda: object_schema(fields, definitions)),
        LAST if is_plain(kind) else CONVERTED,
        has_parts=True,
    )


def _named_tuple(builder: _Builder, kind: Any) -> Type:
    hints = field_hints(kind)
    items = [builder.build(hints.get(name, Any)) for name in kind._fields]
    return _fixed_tuple(items, lambda values: kind(*values), len(kind._field_defaults))


class _Builder:
    """Builds the type of one hint; it remembers classes, because a class may contain itself."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self._number = next(self._numbers)
        self._types: dict[type, Type] = {}
        self._references: dict[type, Type] = {}
        self._definitions: dict[type, list[CoreSchema]] = {}

    def completed(self, found: Type) -> Type:
        """Return a type with the definitions of the classes that contain themselves."""
        if not (definitions := [schema for pair in self._definitions.values() for schema in pair]):
            return found
        decoder, encoder = (core.definitions_schema(schema, definitions) for schema in (found.decoder, found.encoder))
        return replace(found, decoder=decoder, encoder=encoder)

    def build(self, hint: Any) -> Type:
        """Return the type of a hint."""
        hint = underlying(hint)
        if is_any(hint):
            return ANYTHING
        origin, args = get_origin(hint), get_args(hint)
        if origin is typing.Annotated:
            return _pydantics(hint)
        if origin is Literal:
            return _literal(hint, args)
        if origin in (typing.Union, types.UnionType):
            others = [member for member in args if member is not type(None)]
            if len(others) > 1 and any(is_pydantics(get_origin(member) or member) for member in others):
                return _pydantics(hint)  # pydantic finds the best member, not the first one
            return _union([self.build(member) for member in args])
        return self._of_class(hint, hint if origin is None else origin, args)

    def field(self, kind: type, name: str, hint: Any) -> Type:
        """Return the type of a field of a class."""
        try:
            return self.build(hint)
        except NoConverter as exc:
            raise NoConverter(f"{kind.__name__}.{name}: {exc}") from None

    def _of_class(self, hint: Any, kind: Any, args: tuple[Any, ...]) -> Type:
        if not isinstance(kind, type):
            raise NoConverter(f"{hint_text(hint)} is not a type that describes a value")
        if kind in CONVERTERS:
            return _of_converter(CONVERTERS[kind])
        if is_pydantics(kind):
            return _pydantics(hint)
        rank = LAST if is_plain(hint) else CONVERTED
        if kind is tuple and args and args[1:] != (Ellipsis,):
            return _fixed_tuple([self.build(arg) for arg in args])
        if kind in ARRAYS:
            return _array(ARRAYS[kind], self.build(args[0]) if args else ANYTHING, rank)
        if kind in OBJECTS:
            key, value = args or (str, Any)
            return _object(_PLAIN[str] if key is Any else _key(key, self.build(key)), self.build(value), rank)
        if args:
            problem = "is a generic class, which is converted only if it is a pydantic model"
            raise NoConverter(f"{hint_text(hint)} {problem}")
        return self._of_plain_class(kind)

    def _of_plain_class(self, kind: Any) -> Type:
        if (found := _single_value(kind)) is not None:
            return found
        if hasattr(kind, "__fields__") and hasattr(kind, "parse_obj") and not hasattr(kind, "model_validate"):
            return _of_converter(_OldModel(kind))
        if dataclasses.is_dataclass(kind):
            return self._remembered(kind, _record)
        if is_typed_dict(kind):
            return self._remembered(kind, _typed_dictionary)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return _named_tuple(self, kind)
        raise NoConverter(f"{hint_text(kind)} is not a type that can be converted to JSON")

    def _remembered(self, kind: Any, build: Callable[[_Builder, Any], Type]) -> Type:
        if kind in self._types:
            return self._types[kind]
        if kind in self._references:  # it contains itself
            self._definitions[kind] = []
            return self._references[kind]
        names = [f"{kind.__qualname__}:{id(kind)}:{self._number}:{way}" for way in ("decode", "encode")]
        decoder, encoder = (core.definition_reference_schema(name) for name in names)
        schema: _SchemaOf = lambda definitions: self._types[kind].schema(definitions)  # noqa: E731, PLW0108 - not yet there
        self._references[kind] = Type(kind.__name__, decoder, encoder, schema, has_parts=True)
        found = build(self, kind)
        if kind in self._definitions:
            pairs = zip((found.decoder, found.encoder), names, strict=True)
            self._definitions[kind] = [{**schema, "ref": name} for schema, name in pairs]
            found = replace(self._references[kind], schema=found.schema, rank=found.rank)
        self._types[kind] = found
        return found


def _of_converter(converter: Converter) -> Type:
    def call(convert: Convert) -> CoreSchema:
        def converted(value: Any) -> Any:
            try:
                return convert(value)
            except (Mismatch, ValidationError, RecursionError):
                raise
            except Exception as exc:  # from a validator of the model, or because the value is not JSON
                raise Mismatch(f"{type(exc).__name__}: {exc}") from exc

        return _call(converted)

    try:
        converter.decode(None)
        accepts_none = True
    except Exception:  # noqa: BLE001 - as above
        accepts_none = False
    decoder, encoder = call(converter.decode), call(converter.encode)
    return Type(converter.name, decoder, encoder, converter.schema, has_parts=True, accepts_none=accepts_none)


def _pydantics(hint: Any) -> Type:
    from pydantic import errors  # noqa: PLC0415 - the hint is pydantic's, so pydantic has been imported

    try:
        return _of_converter(_Model(hint))
    except (errors.PydanticSchemaGenerationError, errors.PydanticUndefinedAnnotation, errors.PydanticUserError) as exc:
        raise NoConverter(f"pydantic cannot convert {hint_text(hint)}: {str(exc).splitlines()[0]}") from None


_MAX_TRIES, _TRIES_PER_PART = 5_000, 20
"""Maximum number of attempts to match a part with a member of a union, in total and for each part."""
_SINGLE_VALUES: Final = frozenset(
    "none bool int float decimal str bytes date time datetime timedelta literal enum uuid url".split()
)


class _Model:
    """Any type that pydantic converts, according to its own rules and the model's configuration."""

    def __init__(self, hint: Any) -> None:
        from pydantic import TypeAdapter  # noqa: PLC0415 - as above

        self._class = hint if isinstance(hint, type) else None
        self._adapter: Any = TypeAdapter(hint)
        self.name = getattr(hint, "__name__", None) or str(hint)
        self._choices = _choices_of_recursive_unions(self._adapter.core_schema)

    def decode(self, value: Any) -> Any:
        self._check_work(value)
        # As text, because a strict model accepts an ISO time, or an array for a tuple, only from JSON.
        return self._adapter.validate_json(json.dumps(value))

    def encode(self, value: Any) -> Any:
        self._check_work(value)
        try:
            checked = self._adapter.validate_python(value)
        except Exception as exc:  # noqa: BLE001 - perhaps the JSON form, which a strict model does not accept as Python values
            try:
                checked = self.decode(value)
            except Exception:  # noqa: BLE001 - a validator of the model may raise anything
                raise exc from None
        try:
            return self._adapter.dump_python(checked, mode="json", by_alias=True, round_trip=True, warnings="error")
        except PydanticSerializationError as exc:
            raise Mismatch(str(exc)) from None

    def schema(self, definitions: Definitions) -> Schema:
        from pydantic import PydanticUserError  # noqa: PLC0415 - as above

        try:
            schema = self._adapter.json_schema(mode="serialization" if definitions.of_results else "validation")
        except PydanticUserError as exc:  # for example, a field that is a callable
            return {"description": f"pydantic has no JSON Schema for {self.name}: {str(exc).splitlines()[0]}"}
        if self._class is not None and schema.get("type") == "object" and "$ref" not in schema:
            more = schema.pop("$defs", {})
            name = self._class.__name__
            schema = {"$defs": {**more, name: schema}, "$ref": f"#/$defs/{name}"}
        return definitions.adopt(_without_computed_fields(schema) if definitions.of_results else schema)

    def _check_work(self, value: Any) -> None:
        """Raise ``Mismatch`` if unions of models that contain themselves would take too long: each level tries all."""
        if self._choices < 2:
            return
        work, room, level, tries = 0, _MAX_TRIES, [value], 1
        while level and work <= room:
            tries *= self._choices
            level = [part for whole in level for part in _parts(whole)]
            work += tries * sum(isinstance(part, dict) or _is_model(part) for part in level)
            room += _TRIES_PER_PART * len(level)
        if work > room:
            raise Mismatch(
                f"{self.name} is a union in which models contain each other, and the value is nested too "
                "deeply for it; use a discriminated union (pydantic.Discriminator)"
            )


def _choices_of_recursive_unions(schema: Any) -> int:
    """Return the largest number of models in a union of a schema that refers to itself; 0 if there is none.

    pydantic tries all members of a union unless it is discriminated, so each level of nesting multiplies the work.
    """
    most, left = 0, [schema] if schema["type"] == "definitions" else []
    while left:
        part = left.pop()
        if isinstance(part, dict):
            if part.get("type") == "union":
                kinds = [choice[0] if isinstance(choice, tuple) else choice for choice in part["choices"]]
                most = max(most, sum(kind["type"] not in _SINGLE_VALUES for kind in kinds))
            left += part.values()
        elif isinstance(part, list | tuple):
            left += part
    return most


def _is_model(value: Any) -> bool:
    return hasattr(type(value), "model_fields")


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict) or _is_model(value):
        parts: Iterable[Any] = (value if isinstance(value, dict) else vars(value)).values()
        return parts
    return value if isinstance(value, list | tuple | set | frozenset) else ()


def _without_computed_fields(schema: Any) -> Any:
    """Remove the fields that :meth:`_Model.encode` does not write, because the model could not be read back."""
    if isinstance(schema, list):
        return [_without_computed_fields(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _without_computed_fields(item) for key, item in schema.items()}
    properties = schema.get("properties", {})
    computed = {name for name, field in properties.items() if isinstance(field, dict) and field.get("readOnly")}
    if not computed:
        return schema
    kept = {name: field for name, field in properties.items() if name not in computed}
    required = [name for name in schema.get("required", ()) if name not in computed]
    return {**schema, "properties": kept, "required": required}


class _OldModel:
    """A model of pydantic 1, which pydantic 2 contains as ``pydantic.v1``, converted by its own rules."""

    def __init__(self, kind: Any) -> None:
        self._class = kind
        self.name = kind.__name__

    def decode(self, value: Any) -> Any:
        try:
            return self._class.parse_obj(value)
        except Exception as exc:  # a ValidationError of pydantic 1, or anything that a validator raises
            problems = exc.errors() if hasattr(exc, "errors") else []
            if not problems:
                raise
        found = [
            InitErrorDetails(
                type=PydanticCustomError("bulltask_old", error["msg"]),
                loc=tuple(part for part in error["loc"] if part != "__root__"),
                input=None,  # it may be secret
            )
            for error in problems
        ]
        raise ValidationError.from_exception_data(self.name, found)

    def encode(self, value: Any) -> Any:
        model = value if isinstance(value, self._class) else self.decode(value)
        return json.loads(model.json(by_alias=True))

    def schema(self, definitions: Definitions) -> Schema:
        schema = self._class.schema(by_alias=True, ref_template="#/$defs/{model}")
        more = schema.pop("definitions", {})
        return definitions.adopt({"$defs": {**more, self.name: schema}, "$ref": f"#/$defs/{self.name}"})
