"""What each type hint accepts, what that becomes, and the hint's JSON Schema: compared with a table.

The table, ``type_rules.json``, has for each hint the accepted values with what becomes of them; all other values of the
lists below are refused. ``.venv/bin/python -m tests.unit.test_type_rules`` writes it anew. Senders and workers of
different versions meet, so each difference must be wanted, and is a line in the change log.
"""

from __future__ import annotations

import collections
import enum
import ipaddress
import json
import re
import types
import typing
from collections import abc
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, Required, TypedDict, TypeVar
from uuid import UUID

import pydantic
import pydantic.dataclasses
import pytest
from pydantic import v1

from bulltask.errors import BulltaskError
from bulltask.registry.types import CallTypes, Definitions

TABLE = Path(__file__).with_name("type_rules.json")
T = TypeVar("T")
UserId = NewType("UserId", str)
Day = NewType("Day", date)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Word(enum.StrEnum):
    A = "a"


class Mixed(enum.Enum):
    NOTHING = None
    YES = True
    ONE_AND_A_HALF = 1.5


class Odd(enum.Enum):
    PAIR = (1, 2)


class Point(NamedTuple):
    x: int
    at: date
    label: str = ""


class Options(TypedDict):
    since: date
    until: NotRequired[date]


class Partial(TypedDict, total=False):
    since: Required[date]
    number: int


class PlainOptions(TypedDict):
    name: str


class Tree(TypedDict):
    name: str
    children: NotRequired[list[Tree]]


@dataclass(frozen=True)
class Node:
    value: Decimal
    children: list[Node] = field(default_factory=list)
    parent: Node | None = None


@dataclass(frozen=True)
class Special(Node):
    more: int = 0


@dataclass(frozen=True)
class Same(Node):
    pass


@dataclass
class Positive:
    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("it is negative")


@dataclass(slots=True, kw_only=True)
class Settings:
    day: date = None  # type: ignore[assignment]
    size: float = 1.0
    total: int = field(default=0, init=False)


@dataclass
class Seeded:
    value: int
    seed: InitVar[int] = 1

    def __post_init__(self, seed: int) -> None:
        self.value += seed


@dataclass(init=False)
class OwnInit:
    value: date

    def __init__(self, value: date, other: int = 2) -> None:
        self.value = value


@dataclass
class Plus:
    operand: Plus | Minus | int
    label: str


@dataclass
class Minus:
    operand: Plus | Minus | int
    label: int


@dataclass
class Boxed(Generic[T]):
    content: T


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    born: date


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    born: date


class Strict(pydantic.BaseModel, strict=True, extra="forbid"):
    count: int = pydantic.Field(alias="theCount")
    node: Node | None = None


@pydantic.dataclasses.dataclass
class Validated:
    number: int


@dataclass
class Owner:
    cat: Cat
    lucky: Annotated[int, pydantic.Field(gt=0)] = 7


class Old(v1.BaseModel):
    day: date = v1.Field(alias="theDay")


HINTS: list[Any] = [
    *(str, int, float, bool, None, Any, T, list, dict, tuple, set, frozenset, collections.deque),
    *(datetime, date, time, timedelta, UUID, Decimal, bytes, bytearray, Path, PurePosixPath, UserId, Day),
    *(Color, Level, Rights, Word, Mixed, Point, Options, Partial, PlainOptions, Tree),
    *(Node, Special, Positive, Settings, Seeded, OwnInit, Owner, Boxed),
    *(Cat, Strict, Validated, Old, pydantic.HttpUrl, pydantic.PositiveInt, pydantic.Json[int]),
    *(Literal["a", 1, None], Literal[True, 2], Literal["x"]),
    *(list[date], list[int], list[Any], list[Node], list[list[date]], tuple[int, date], tuple[date, ...], tuple[()]),
    *(set[int], set[date], frozenset[Color], collections.deque[int], set[list[int]]),
    *(abc.Sequence[UUID], abc.Iterable[int], abc.Set[date], abc.Mapping[Color, Decimal]),
    *(dict[str, Any], dict[str, date], dict[int, str], dict[Level, str], dict[Literal[1, 2], int], dict[bytes, int]),
    *(dict[date, Any], dict[UUID, int], dict[Any, date], dict[Literal["a", "b"], int], dict[str, dict[int, date]]),
    *(date | None, int | None, Node | None, Cat | None, Old | None, None | list[date], Day | None),
    *(date | datetime, datetime | date, str | UUID, UUID | str, date | int, Decimal | int, Decimal | float),
    *(int | float, float | int | None, int | str, str | int | bool, bool | float, timedelta | float, bytes | str),
    *(
        Color | str,
        Level | int,
        Literal["a"] | date,
        Mixed | None,
        Any | date,
        str | list[str],
        list[int] | dict[str, int],
    ),
    *(list[date] | date, set[int] | list[str], dict[str, int] | Node, dict[str, Any] | Node, Node | Positive),
    *(Positive | Node | int, Plus | Minus, list[Minus | Plus] | Minus | Plus, Options | Positive, Point | Node),
    *(Cat | Dog, list[Cat | Dog], Cat | Positive, Cat | date | None, Old | date, list[Cat | None], list[date | Cat]),
    *(Annotated[int, pydantic.Field(gt=0)], Annotated[date, "note"], Annotated[date | None, "note"]),
    *(Annotated[list[date], pydantic.Field(max_length=1)], list[Annotated[str, pydantic.Field(max_length=1)]]),
    *(complex, type, abc.Callable[[], None], ipaddress.IPv4Address, re.Pattern, range, collections.Counter[str]),
    *(collections.OrderedDict[str, int], collections.defaultdict[str, int], enum.Enum, enum.Flag, Odd, Boxed[int]),
    *(list[complex], dict[tuple[int, int], str], dict[float, int], Literal[b"x"], memoryview, 5),
]
ID = "00000000-0000-0000-0000-00000000000a"
JSON: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 3, 1.0, 1.5, 1e300, 10**400, float("nan"), float("inf"), 2**70, 1_700_000_000),
    *("", "a", "b", "x", "red", "RED", "1", "-5", " 5", "2.50", "1e3", "NaN", "Infinity", "true", "ü", "null", "\x00"),
    *("2026-11-23", "20261123", "2026-W48-1", "2026-11", "2026-02-30", "26-11-23", "1700000000", "2026-11-23T"),
    *("2026-11-23T10:30:00Z", "2026-11-23T10:30:00.000Z", "2026-11-23T10:30:00.123456789Z", "2026-11-23 10:30"),
    *(
        "2026-11-23T10:30",
        "20261123T103000Z",
        "2026-11-23T10:30:00+0100",
        "2026-11-23T10:30:00-03:00",
        "2026-11-23T24:00",
    ),
    *("2026-11-23t10:30:00z", "2026-11-23T10:30:00+25:00", "2026-11-23_10:30:00", "2026-W48-1T10"),
    *("10:30", "10", "T10:30", "10:30:00.5", "10:30:00,5", "10:30:00+01:00", "10:30:00Z", "25:00", "103000"),
    *("P1D", "PT1.5S", "PT0,25S", "P1Y", "P1M", "P1W", "P1W2D", "-PT1H", "+P1DT2H3M4.5S", "P", "PT", "p1d", "1 day"),
    *("P999999999999D", "PT0.1234567891S", "12:30:00", "P1.5D"),
    *(
        ID,
        ID.upper(),
        ID.replace("-", ""),
        f"urn:uuid:{ID}",
        f"{{{ID}}}",
        f"0{ID}",
        "-0-0000000000000000000000000000000a",
    ),
    *("YQ==", "YQ", "Y Q==", "YQ==\n", "_-8=", "AP8=", "/tmp/a", "https://a.b/", "ftp://x"),
    *([], [1], [1, 1], [1, 2], ["a"], ["a", "bc"], ["2026-11-23"], ["2026-11-23", "2026-11-24"], ["red"], [ID], [None]),
    *(
        [1, "2026-11-23"],
        [1, "2026-11-23", "x"],
        [1, "2026-11-23", "x", 2],
        [1.0],
        [True],
        [[1]],
        [["2026-11-23"]],
        [{}],
    ),
    *([{"value": "1"}], [{"kind": "dog", "born": "2026-01-01"}], [{"born": "2026-01-01"}], [["a"], [1]]),
    *({}, {"1": "a"}, {"1": 5}, {"3": "a"}, {"a": 1}, {"a": 1, "b": 2}, {"red": "1"}, {"2026-11-23": 1}, {ID: 1}),
    *(
        {"YQ==": 1},
        {"a": "2026-11-23"},
        {"a": {"1": "2026-11-23"}},
        {"01": "a"},
        {" 1": "a"},
        {"1.0": "a"},
        {"true": "a"},
    ),
    *({"since": "2026-11-23"}, {"since": "2026-11-23", "until": None}, {"since": "2026-11-23", "more": 1}),
    *({"since": "2026-11-23", "number": 1.0}, {"name": "x"}, {"name": 1}, {"name": "x", "children": [{"name": "y"}]}),
    *(
        {"name": "x", "children": [{"nam": "y"}]},
        {"value": 1},
        {"value": "1", "children": [{"value": 2.5}], "parent": None},
    ),
    *(
        {"value": "x"},
        {"value": "1", "children": None},
        {"value": "1", "parent": {"value": "2"}},
        {"value": 1, "more": 2},
    ),
    *({"value": 1, "seed": 5}, {"value": "2026-11-23"}, {"value": "2026-11-23", "other": 5}, {"val": 1}),
    *({"number": 1}, {"number": -1}, {"number": "1"}, {"number": 2.0}, {"day": None}, {"day": "2026-11-23", "size": 2}),
    *({"day": "2026-11-23", "total": 1}, {"theDay": "2026-11-23"}, {"theDay": "no"}, {"content": {"a": [1]}}),
    *({"operand": {"operand": {"operand": 1, "label": "a"}, "label": 2}, "label": "b"}, {"operand": 1, "label": None}),
    *({"born": "2026-01-01"}, {"kind": "cat", "born": "2026-01-01"}, {"kind": "dog", "born": "2026-01-01", "x": 1}),
    *(
        {"born": "x"},
        {"theCount": 1},
        {"theCount": "1"},
        {"theCount": 1, "node": {"value": "1"}},
        {"theCount": 1, "x": 1},
    ),
    *(
        {"cat": {"born": "2026-01-01"}},
        {"cat": {"born": "2026-01-01"}, "lucky": 0},
        {"cat": {"born": "2026-01-01"}, "lucky": "3"},
    ),
]
MOMENT = datetime(2026, 11, 23, 10, 30, tzinfo=UTC)


class Text(str):
    def __repr__(self) -> str:
        return f"Text({str(self)!r})"


class Number(int):
    def __repr__(self) -> str:
        return f"Number({int(self)})"


PYTHON: list[Any] = [
    *(MOMENT, MOMENT.replace(tzinfo=None, microsecond=5), MOMENT.replace(tzinfo=timezone(timedelta(hours=-3)))),
    *(
        MOMENT.replace(tzinfo=timezone(timedelta(seconds=61))),
        date(2026, 11, 23),
        time(10, 30),
        time(10, 30, tzinfo=UTC),
    ),
    *(
        timedelta(0),
        timedelta(days=1, hours=2, milliseconds=1500),
        -timedelta(minutes=90),
        timedelta.max,
        timedelta.min,
    ),
    *(
        UUID(int=10),
        Decimal("1.10"),
        Decimal("1E+5"),
        Decimal("NaN"),
        Decimal("Infinity"),
        b"\x00\xff",
        b"",
        bytearray(b"a"),
    ),
    *(memoryview(b"a"), Path("/tmp/a"), PurePosixPath("a"), Color.RED, Level.HIGH, Rights.READ | Rights.WRITE, Word.A),
    *(Mixed.NOTHING, Mixed.YES, Odd.PAIR, Text("a"), Text("2026-11-23"), Number(1), 1 + 2j, object, range(2)),
    *(
        (),
        (1,),
        (1, date(2026, 1, 1)),
        (date(2026, 1, 1),),
        {1},
        frozenset({1}),
        {date(2026, 1, 1)},
        frozenset({Color.RED}),
    ),
    *(
        collections.deque([1]),
        [MOMENT],
        [date(2026, 1, 1), "2026-01-02"],
        [UUID(int=1)],
        [[date(2026, 1, 1)]],
        {"a": 1}.keys(),
    ),
    *(
        {1: "a"},
        {Level.LOW: "a"},
        {Color.RED: Decimal(1)},
        {date(2026, 1, 1): [None]},
        {UUID(int=1): 1},
        {b"a": 1},
        {None: 1},
    ),
    *({True: "a"}, {1.0: "a"}, {"a": date(2026, 1, 1)}, {"a": {1: date(2026, 1, 1)}}, types.MappingProxyType({"a": 1})),
    *(collections.OrderedDict(a=1), types.MappingProxyType({"number": 1}), {"number": Decimal(1)}, {1: 2, "number": 3}),
    *(Point(1, date(2026, 1, 1)), Point("x", date(2026, 1, 1)), {"since": date(2026, 1, 1)}),  # type: ignore[arg-type]
    *(Node(Decimal(1), [Node(Decimal(2))]), Node(Decimal(1), parent=Node(Decimal(3))), Node(1), Node("x")),  # type: ignore[arg-type]
    *(Node(Decimal(1), [None]), Node(Decimal(1), {"a": 1}), Node(Decimal(1), (Node(Decimal(2)),))),  # type: ignore[list-item,arg-type]
    *(Special(Decimal(1)), Same(Decimal(1)), Positive(1), Settings(day=date(2026, 1, 1)), Settings()),
    *({"value": Decimal(1), "children": [Node(Decimal(2))]}, {"number": Number(1)}, [Node(Decimal(1)), {"value": 1}]),
    *(Seeded(1), OwnInit(date(2026, 1, 1)), Plus(Minus(Plus(1, "a"), 2), "b"), [Minus(1, 2)], Plus(Minus(1, "x"), "b")),  # type: ignore[arg-type]
    *(Boxed(1), Boxed(date(2026, 1, 1)), Owner(Cat(born=date(2026, 1, 1))), Owner({"born": "2026-01-01"}, 0)),  # type: ignore[arg-type]
    *(
        Cat(born=date(2026, 1, 1)),
        Dog(born=date(2026, 1, 1)),
        [Dog(born=date(2026, 1, 1))],
        Strict(theCount=1),
        Validated(1),
    ),
    *(
        Cat.model_construct(born="no"),
        Old(theDay=date(2026, 1, 1)),
        pydantic.HttpUrl("https://a.b/"),
        {"born": date(2026, 1, 1)},
    ),
]


def label(value: Any) -> str:
    """Return a text that identifies a hint or a value: its repr, without the names of modules, and addresses."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({', '.join(sorted(map(label, value)))})"
    text = value.__name__ if isinstance(value, type) and not typing.get_args(value) else repr(value)
    text = re.sub(
        r"\b(__main__|tests\.unit\.test_type_rules|collections\.abc|typing|datetime|decimal)\.(?=\w)", "", text
    )
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return text if len(text) < 300 else f"{text[:40]}…{len(text)}"


def rules_of(hint: Any) -> dict[str, Any]:
    """Return what becomes of the values that the hint accepts, its schemas, and whether it is enforced by default."""

    def call(value: Any) -> None: ...

    call.__annotations__ = {"value": hint, "return": None}
    types_of_call = CallTypes(call, "t", skip_first=False)
    if types_of_call.problems:
        return {"cannot be enforced": label(types_of_call.problems["value"])}
    schemas = []
    for of_results in (False, True):
        definitions = Definitions(of_results=of_results)
        schema = types_of_call.data_schema(definitions)["properties"]["value"]
        schemas.append({**schema, **({"$defs": definitions.schemas} if definitions.schemas else {})})
    rules: dict[str, Any] = {"enforced": types_of_call.conversion(None) is not None, "schema": schemas[0]}
    if schemas[1] != schemas[0]:
        rules["schema of results"] = schemas[1]
    if (conversion := types_of_call.conversion(True)) is not None:
        rules["decode"] = accepted(JSON, lambda value: conversion.decode_arguments((), {"value": value})[1]["value"])
        rules["encode"] = accepted(
            [*JSON, *PYTHON], lambda value: in_json(conversion.encode_arguments({"value": value}))
        )
    return rules


def in_json(data: Any) -> Any:
    return json.loads(json.dumps(data["value"], default=label, skipkeys=True))


def accepted(values: list[Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the values that are accepted, and what becomes of those that change."""
    unchanged, changed = [], {}
    for value in values:
        try:
            result = convert(value)
        except (BulltaskError, OverflowError):
            continue
        if type(result) is type(value) and label(result) == label(value):
            unchanged.append(label(value))
        else:
            changed[label(value)] = f"{type(result).__name__}: {label(result)}"
    return {"unchanged": unchanged, **changed}


@pytest.mark.parametrize("hint", HINTS, ids=label)
def test_a_hint_accepts_what_it_has_always_accepted(hint: Any) -> None:
    assert json.loads(json.dumps(rules_of(hint))) == json.loads(TABLE.read_text())[label(hint)]


def test_the_table_has_each_hint_once() -> None:
    labels = [label(hint) for hint in HINTS]
    assert labels == list(json.loads(TABLE.read_text()))
    assert len(set(map(label, [*JSON, *PYTHON]))) == len([*JSON, *PYTHON])


def main() -> None:
    """Write the table."""
    entries = []
    for hint in HINTS:
        parts = ",\n  ".join(f"{json.dumps(key)}: {json.dumps(part)}" for key, part in rules_of(hint).items())
        entries.append(f"{json.dumps(label(hint))}: {{\n  {parts}}}")
    TABLE.write_text("{\n" + ",\n".join(entries) + "\n}\n")


if __name__ == "__main__":
    main()
