"""Values of types that JSON does not have, their JSON form, and the messages for values that do not match."""

from __future__ import annotations

import collections
import enum
import subprocess
import sys
import textwrap
import traceback
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NewType, NotRequired, TypedDict
from uuid import UUID

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker
from pydantic_core import core_schema

from bulltask import App, registry
from bulltask.errors import ConfigError, DecodeError, EncodeError, InvalidJobError
from bulltask.jobs import codec
from bulltask.registry import pydantic_types
from bulltask.registry.pydantic_types import ValidationError, compiled, problems_of, type_of
from bulltask.registry.tasks import schema_of
from bulltask.registry.types import (
    CallConversion,
    CallTypes,
    Definitions,
    Mismatch,
    NoConverter,
    is_plain,
    problem_text,
)

if TYPE_CHECKING:
    from unknown import Session  # type: ignore[import-not-found]  # as in modules that import it only for hints

UserId = NewType("UserId", str)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    at: date
    label: str = ""


class Options(TypedDict):
    since: date
    until: NotRequired[date]


class PlainOptions(TypedDict):
    name: str


@dataclass(frozen=True)
class Node:
    value: Decimal
    children: list[Node] = field(default_factory=list)
    parent: Node | None = None


@dataclass(frozen=True)
class Special(Node):
    more: int = 0


@dataclass
class Box:
    node: Node


@dataclass
class Positive:
    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("it is negative")


@dataclass
class Holder:
    session: Session


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    born: date


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    born: date


class Strange(pydantic.BaseModel):
    kind: str

    @pydantic.field_validator("kind")
    @classmethod
    def look_up(cls, kind: str) -> str:
        return {"cat": "Cat"}[kind]


MOMENT = datetime(2026, 11, 23, 10, 30, tzinfo=UTC)


class TypeConverter:
    """The conversion of single values of a type, with the message of a call as ``Mismatch``."""

    def __init__(self, hint: Any) -> None:
        self._type = type_of(hint)
        self._decode, self._encode = compiled(self._type)
        self.schema = self._type.schema

    def decode(self, value: Any) -> Any:
        return self._checked(self._decode, value)

    def encode(self, value: Any) -> Any:
        return self._checked(self._encode, value)

    @staticmethod
    def _checked(convert: Callable[[Any], Any], value: Any) -> Any:
        try:
            return convert(value)
        except ValidationError as exc:
            raise Mismatch(problem_text(problems_of(exc))) from exc


converter_of = TypeConverter

PAIRS: list[tuple[Any, Any, Any]] = [
    (datetime, MOMENT, "2026-11-23T10:30:00Z"),
    (datetime, MOMENT.replace(tzinfo=None, microsecond=5), "2026-11-23T10:30:00.000005"),
    (datetime, datetime(2026, 11, 23, tzinfo=timezone(timedelta(hours=-3))), "2026-11-23T00:00:00-03:00"),
    (date, date(2026, 11, 23), "2026-11-23"),
    (time, time(10, 30), "10:30:00"),
    (timedelta, timedelta(0), "PT0S"),
    (timedelta, timedelta(days=1, hours=2, milliseconds=1500), "P1DT2H1.5S"),
    (timedelta, -timedelta(minutes=90), "-PT1H30M"),
    (UUID, UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    (Decimal, Decimal("1.10"), "1.10"),
    (bytes, b"\x00\xff", "AP8="),
    (bytearray, bytearray(b"a"), "YQ=="),
    (Path, Path("/tmp/a"), "/tmp/a"),
    (PurePosixPath, PurePosixPath("a"), "a"),
    (Color, Color.RED, "red"),
    (Level, Level.HIGH, 2),
    (Rights, Rights.READ | Rights.WRITE, 3),
    (UserId, "u1", "u1"),
    (tuple[int, date], (1, date(2026, 1, 1)), [1, "2026-01-01"]),
    (tuple[date, ...], (date(2026, 1, 1),), ["2026-01-01"]),
    (tuple, (1, "a"), [1, "a"]),
    (set[int], {1}, [1]),
    (frozenset[Color], frozenset({Color.RED}), ["red"]),
    (collections.deque[int], collections.deque([1]), [1]),
    (list[datetime], [MOMENT], ["2026-11-23T10:30:00Z"]),
    (Sequence[UUID], [UUID(int=1)], ["00000000-0000-0000-0000-000000000001"]),
    (dict[int, str], {1: "a"}, {"1": "a"}),
    (dict[Level, str], {Level.LOW: "a"}, {"1": "a"}),
    (Mapping[Color, Decimal], {Color.RED: Decimal(1)}, {"red": "1"}),
    (dict[date, Any], {date(2026, 1, 1): [None]}, {"2026-01-01": [None]}),
    (Point, Point(1, date(2026, 1, 1)), [1, "2026-01-01", ""]),
    (Options, {"since": date(2026, 1, 1), "more": 1}, {"since": "2026-01-01", "more": 1}),
    (
        Node,
        Node(Decimal(1), [Node(Decimal(2))]),
        {"value": "1", "children": [{"value": "2", "children": [], "parent": None}], "parent": None},
    ),
    (datetime | None, None, None),
    (date | datetime, MOMENT, "2026-11-23T10:30:00Z"),
    (datetime | date, date(2026, 11, 23), "2026-11-23"),
    (str | UUID, UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    (str | UUID, "tea", "tea"),
    (Decimal | int, 5, 5),
    (int | float | None, 5.0, 5.0),
    (Node | Positive, Positive(1), {"number": 1}),
    (Literal["a", 1], 1, 1),
    (Cat, Cat(born=date(2026, 1, 1)), {"kind": "cat", "born": "2026-01-01"}),
    (list[Cat | Dog], [Dog(born=date(2026, 1, 1))], [{"kind": "dog", "born": "2026-01-01"}]),
    (Annotated[int, pydantic.Field(gt=0)], 5, 5),
    (Annotated[datetime, "a note"], MOMENT, "2026-11-23T10:30:00Z"),
    (pydantic.HttpUrl, pydantic.HttpUrl("https://a.b/"), "https://a.b/"),
]


@pytest.mark.parametrize(("hint", "value", "form"), PAIRS, ids=lambda part: str(part)[:40])
def test_a_value_survives_conversion_to_its_json_form_and_back(hint: Any, value: Any, form: Any) -> None:
    converter = converter_of(hint)
    encoded = codec.decode(codec.encode(converter.encode(value)))
    assert (encoded, type(encoded)) == (form, type(form))
    decoded = converter.decode(encoded)
    assert (decoded, type(decoded)) == (value, type(value))
    assert codec.decode(codec.encode(converter.encode(form))) == form  # the sender may write the JSON form itself


@pytest.mark.parametrize(
    ("hint", "form", "value"),
    [
        (datetime, "2026-11-23T10:30:00.000Z", MOMENT),  # as JavaScript writes it
        (timedelta, 1.5, timedelta(seconds=1.5)),
        (timedelta, "P1W", timedelta(days=7)),
        (timedelta, "PT0,25S", timedelta(milliseconds=250)),
        (Decimal, 9.99, Decimal("9.99")),
        (float, 5, 5.0),
        (int, 5.0, 5),
        (Point, [1, "2026-01-01"], Point(1, date(2026, 1, 1))),
    ],
)
def test_other_forms_that_a_node_developer_may_write_are_accepted(hint: Any, form: Any, value: Any) -> None:
    decoded = converter_of(hint).decode(form)
    assert (decoded, type(decoded)) == (value, type(value))


@pytest.mark.parametrize(
    ("hint", "form", "message"),
    [
        (datetime, "2026-11-23", "expected a date and time such as '2026-11-23T10:00:00Z', not '2026-11-23'"),
        (datetime, 1_700_000_000, "not 1700000000"),
        (date, "2026-11-23T00:00:00Z", "expected a date such as"),
        (timedelta, "P1Y", "expected a duration such as 'PT1H30M', or seconds, not 'P1Y'"),
        (timedelta, "PT", "not 'PT'"),
        (timedelta, 1e300, "expected a duration"),
        (Decimal, "NaN", "expected a decimal number, not 'NaN'"),
        (Decimal, True, "not True"),
        (UUID, "1", "expected a UUID"),
        (bytes, "ü", "expected bytes in base64"),
        (int, True, "expected an integer, not True"),
        (int, 1.5, "expected an integer, not 1.5"),
        (str, None, "expected a string, not None"),
        (Color, "green", "expected one of 'red', 'blue', not 'green'"),
        (Level, True, "expected one of 1, 2, not True"),
        (Color, [], r"not \[\]"),
        (Literal["a"], "b", "expected 'a', not 'b'"),
        (list[date], "2026-01-01", "expected an array, not"),
        (list[date], ["2026-01-01", 2], r"^\[1\]: expected a date"),
        (tuple[int, int], [1], "expected an array of 2 items, not 1"),
        (dict[int, date], {"a": "2026-01-01"}, "a: expected an integer"),
        (dict[str, date], {"a b": 1}, r"^\['a b'\]: expected a date"),
        (Options, {}, "since: missing"),
        (Node, {"value": 1, "children": [{}]}, r"^children\[0\].value: missing$"),
        (Node, {"val": 1}, "^value: missing; val: Node has no such field; did you mean 'value'"),
        (Positive, {"number": -1}, "^ValueError: it is negative$"),
        (Node | Positive, {"number": "x"}, "expected Node or Positive, not .*Positive: number: expected an integer"),
        (date | int, "x", "expected an integer or a date"),
        (Cat, {"born": "x"}, "^born: Input should be a valid date"),
        (Strange, {"kind": "dog"}, "^KeyError: 'dog'$"),
    ],
)
def test_a_mismatch_names_the_path_to_the_bad_value_and_what_was_expected(hint: Any, form: Any, message: str) -> None:
    with pytest.raises(Mismatch, match=message):
        converter_of(hint).decode(form)
    with pytest.raises(Mismatch):
        converter_of(hint).encode(form)


def test_only_the_first_problems_are_listed_and_long_values_are_cut() -> None:
    with pytest.raises(Mismatch, match=r"b: Node has no such field; and 3 more$"):
        converter_of(Node).decode(dict.fromkeys("abcde", 1))
    with pytest.raises(Mismatch, match=r"x… \(str\)$"):
        converter_of(date).decode("x" * 1000)


def test_an_alias_of_python_3_12_is_the_type_that_it_names_unless_it_contains_itself() -> None:
    class TypeAliasType:
        def __init__(self, value: Any = None) -> None:
            self.value = value

        @property
        def __value__(self) -> Any:
            return self.value or list[self]  # type: ignore[valid-type]

    assert converter_of(TypeAliasType(date)).decode("2026-01-01") == date(2026, 1, 1)
    with pytest.raises(NoConverter, match="is an alias that contains itself"):
        converter_of(TypeAliasType())


def test_a_subclass_whose_fields_would_be_lost_is_rejected() -> None:
    with pytest.raises(Mismatch, match="expected Node, not Special, whose field 'more' would be lost"):
        converter_of(Node).encode(Special(Decimal(1)))


@given(st.timedeltas())
def test_every_duration_survives_a_round_trip(length: timedelta) -> None:
    converter = converter_of(timedelta)
    assert converter.decode(converter.encode(length)) == length
    assert pydantic.TypeAdapter(timedelta).validate_python(converter.encode(length)) == length


@given(st.datetimes(timezones=st.none() | st.just(UTC)))
def test_every_datetime_survives_a_round_trip(moment: datetime) -> None:
    converter = converter_of(datetime)
    assert converter.decode(converter.encode(moment)) == moment


@pytest.mark.parametrize(
    "hint",
    [
        enum.Enum,
        enum.IntEnum,
        enum.Flag,
        object(),
        complex,
        type,
        typing.Callable,
        dict[tuple[int], str],
        list[complex],
        Holder,
        enum.Enum("E", {"A": ()}),
    ],
)
def test_a_type_without_a_json_form_has_no_converter(hint: Any) -> None:
    with pytest.raises(NoConverter):
        converter_of(hint)


JSON_NAMES = st.sampled_from(["a", "b", "c d"])


@st.composite
def typed_values(draw: st.DrawFn, depth: int = 3) -> tuple[Any, Any]:
    """Draw a hint and a value of it."""
    scalars: list[tuple[Any, st.SearchStrategy[Any]]] = [
        (datetime, st.datetimes(timezones=st.just(UTC))),
        (date, st.dates()),
        (timedelta, st.timedeltas()),
        (UUID, st.uuids()),
        (Decimal, st.decimals(allow_nan=False, allow_infinity=False)),
        (bytes, st.binary(max_size=5)),
        (Color, st.sampled_from(Color)),
        (int, st.integers(-1000, 1000)),
        (str, st.text(max_size=5)),
        (bool, st.booleans()),
    ]
    kind = draw(st.integers(0, 6 if depth else 1))
    if kind < 2:
        hint, values = draw(st.sampled_from(scalars))
        return hint, draw(values)
    hint, value = draw(typed_values(depth - 1))
    other_hint, other = draw(typed_values(depth - 1))
    pair: tuple[Any, Any] = draw(
        st.sampled_from(
            [
                (GenericAlias(list, (hint,)), [value, value]),
                (GenericAlias(tuple, (hint, other_hint)), (value, other)),
                (GenericAlias(tuple, (hint, ...)), (value,)),
                (GenericAlias(dict, (str, hint)), {draw(JSON_NAMES): value}),
                (hint | None, value),
                (hint | None, None),
            ]
        )
    )
    return pair


@given(typed_values())
def test_nested_values_of_any_type_survive_a_round_trip_and_match_the_schema(pair: tuple[Any, Any]) -> None:
    hint, value = pair
    converter = converter_of(hint)
    form = codec.decode(codec.encode(converter.encode(value)))
    assert converter.decode(form) == value
    validator(hint).validate(form)


# --- calls ------------------------------------------------------------------------------------------------------------


def conversion(function: Any, typed: bool | None = None, *, bind: bool = False) -> CallConversion:
    found = CallTypes(function, "t", skip_first=bind).conversion(typed)
    assert found is not None
    return found


def plain(
    count: int, tags: list[str], options: PlainOptions, level: Literal[1, 2] = 1, *more: float, **rest: Any
) -> str:
    return ""


def mixed(when: datetime, count: int, /, *days: date, note: str = "", **amounts: Decimal) -> None: ...


def test_nothing_is_converted_if_all_hints_are_jsons_own_types_or_hints_are_not_enforced() -> None:
    assert CallTypes(plain, "t", skip_first=False).conversion(None) is None
    assert CallTypes(lambda x: x, "t", skip_first=False).conversion(True) is None
    assert CallTypes(mixed, "t", skip_first=False).conversion(False) is None


def test_arguments_are_converted_by_position_name_and_in_variadic_parameters() -> None:
    calls = conversion(mixed)
    data = {"when": MOMENT, "count": "any", "days": [date(2026, 1, 1)], "amounts": {"a": Decimal(1)}}
    encoded = calls.encode_arguments(data)
    assert encoded == {
        "when": "2026-11-23T10:30:00Z",
        "count": "any",
        "days": ["2026-01-01"],
        "amounts": {"a": "1"},
    }
    args, kwargs = ("2026-11-23T10:30:00Z", "any", "2026-01-01"), {"note": 5, "a": "1"}
    assert calls.decode_arguments(args, kwargs) == (
        (MOMENT, "any", date(2026, 1, 1)),
        {"note": 5, "a": Decimal(1)},
    )


def test_all_bad_arguments_are_named_in_one_error() -> None:
    with pytest.raises(
        InvalidJobError, match=r"task t: when: .*; days\[0\]: .*; a: expected a decimal number, not 'x'$"
    ):
        conversion(mixed).decode_arguments(("x", 1, "x"), {"a": "x"})
    with pytest.raises(EncodeError, match=r"^the arguments of task t: when: .*; days\[0\]: .*; amounts.a: "):
        conversion(mixed).encode_arguments({"when": 1, "days": [1], "amounts": {"a": "x"}})


def test_with_typed_true_jsons_own_types_are_checked_too() -> None:
    calls = conversion(plain, typed=True)
    good: dict[str, Any] = {"count": 1, "tags": ["a"], "options": {"name": "x"}}
    assert calls.decode_arguments((), good) == ((), good)
    for bad in ({"count": "1"}, {"tags": [1]}, {"options": {"name": 1}}, {"level": 3}):
        with pytest.raises(InvalidJobError):
            calls.decode_arguments((), {**good, **bad})
        with pytest.raises(EncodeError):
            calls.encode_arguments({**good, **bad})
    with pytest.raises(EncodeError, match="the return value of task t: expected a string, not 5"):
        calls.encode_result(5)
    with pytest.raises(DecodeError, match="the return value of task t: expected a string, not 5"):
        calls.decode_result(5)


def test_a_value_that_contains_itself_is_an_error_of_the_call() -> None:
    loop: list[Any] = []
    loop.append(loop)
    node = Node(Decimal(1), loop)
    with pytest.raises(EncodeError, match="node"):
        _nodes().encode_arguments({"node": node})
    deep: dict[str, Any] = {"value": 1}
    for _ in range(2_000):
        deep = {"value": 1, "children": [deep]}
    with pytest.raises(InvalidJobError, match="node: contains a circular reference, or is nested too deeply"):
        _nodes().decode_arguments((), {"node": deep})


def _nodes() -> CallConversion:
    def run(node: Node) -> None: ...

    return conversion(run)


def test_a_value_may_be_nested_a_hundred_levels_deep() -> None:
    node = Node(Decimal(1))
    for _ in range(100):
        node = Node(Decimal(1), [node])
    encoded = _nodes().encode_arguments({"node": node})
    assert _nodes().decode_arguments((), encoded) == ((), {"node": node})
    assert _nodes().encode_arguments(encoded) == encoded


def test_if_values_are_hidden_messages_have_only_parameters_and_types() -> None:
    def run(when: date, *days: date, **amounts: Decimal) -> dict[str, Node]:
        return {}

    calls = CallTypes(run, "t", skip_first=False).conversion(None, lambda: True)
    assert calls is not None
    secret = "?" * 9
    hidden = r"\(the value is hidden, because the app encrypts payloads\)$"
    names = (
        rf"^.* task t: when: expected a date such as '2026-11-23'; .*\*\*amounts: expected a decimal number {hidden}"
    )
    with pytest.raises(InvalidJobError, match=names) as decoding:
        calls.decode_arguments((secret, secret), {secret: secret})
    with pytest.raises(EncodeError, match=r"^the arguments of task t: when: expected a date") as encoding:
        calls.encode_arguments({"when": secret, "days": [secret], "amounts": {secret: secret}})
    value = {secret: {"value": secret, secret: 1}}
    with pytest.raises(EncodeError, match=f"^the return value of task t: expected an object {hidden}") as result:
        calls.encode_result(value)
    with pytest.raises(DecodeError, match=f"^the return value of task t: expected an object {hidden}") as read:
        calls.decode_result(value)
    for caught in (decoding, encoding, result, read):
        assert secret not in "".join(traceback.format_exception(caught.value))


def test_a_hint_that_cannot_be_evaluated_or_converted_does_not_affect_the_others() -> None:
    def run(session: Session, number: complex, when: datetime) -> Session: ...

    types = CallTypes(run, "t", skip_first=False)
    assert types.problems.keys() == {"session", "number", "return"}
    calls = conversion(run)
    assert calls.encode_arguments({"session": 1, "number": 2, "when": MOMENT})["when"] == "2026-11-23T10:30:00Z"
    with pytest.raises(ConfigError, match="'t' has typed=True, but the type of the return value cannot be enforced"):
        types.conversion(True)


def test_a_parameter_or_field_whose_default_is_none_accepts_none() -> None:
    @dataclass
    class Period:
        since: date = None  # type: ignore[assignment]

    def run(when: datetime = None, *, count: int = None, pair: tuple[int, int] | None = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013

    calls = conversion(run, typed=True)
    nothing = {"when": None, "count": None, "pair": None}
    assert calls.decode_arguments((), nothing) == ((), nothing)
    assert calls.encode_arguments(nothing) == nothing
    assert converter_of(Period).decode({"since": None}) == Period()
    with pytest.raises(InvalidJobError, match="count: expected an integer, not '1'"):
        calls.decode_arguments((), {"count": "1"})
    schema = CallTypes(run, "t", skip_first=False).data_schema(Definitions())
    assert schema["properties"]["count"] == {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}


def test_the_context_of_a_bound_task_is_not_converted() -> None:
    def run(self: Session, when: datetime) -> None: ...

    assert conversion(run, bind=True).encode_arguments({"when": MOMENT}) == {"when": "2026-11-23T10:30:00Z"}


# --- options ----------------------------------------------------------------------------------------------------------


def days(first: date, count: int = 1) -> None: ...


@pytest.mark.parametrize(
    ("setting", "options", "converts", "checks"),
    [
        (None, {}, True, False),
        (True, {}, True, True),
        (False, {}, False, False),
        (False, {"typed": True}, True, True),
        (True, {"typed": False}, False, False),
        (None, {"pydantic": True}, True, False),
        (None, {"pydantic": False}, False, False),
        ("true", {}, True, True),
    ],
)
def test_the_option_and_the_setting_determine_which_hints_are_enforced(
    setting: Any, options: Any, converts: bool, checks: bool
) -> None:
    app = App("tested", task_typed=setting)
    task: Any = app.task(name="days", **options)(days)
    assert task._codec.decode({"first": "2026-01-01"})[1]["first"] == (date(2026, 1, 1) if converts else "2026-01-01")
    if checks:
        with pytest.raises(EncodeError, match="count: expected an integer"):
            task._codec.encode((date(2026, 1, 1), "2"), {})


def test_a_signature_does_not_freeze_the_other_settings() -> None:
    app = App("tested")
    assert app.task(name="days")(days)._codec.encode((date(2026, 1, 1),), {}) == {"first": "2026-01-01"}
    app.conf.task_default_queue = "mail"
    with pytest.raises(ConfigError, match="cannot set task_typed: a task has already used it"):
        app.conf.task_typed = True


def test_a_worker_does_not_start_with_a_hint_that_typed_true_cannot_enforce() -> None:
    app = App("tested")

    @app.task(name="run", typed=True)
    def run(number: complex) -> None: ...

    with pytest.raises(ConfigError, match="parameter 'number' cannot be enforced: complex is not a type that"):
        app._load_tasks()


@pytest.mark.parametrize("options", [{"typed": "yes"}, {"pydantic": 1}])
def test_the_options_are_checked_when_the_task_is_defined(options: Any) -> None:
    with pytest.raises(ConfigError, match="must be True or False"):
        App("tested").task(name="days", **options)(days)


def test_a_program_without_enforced_hints_does_not_import_pydantic() -> None:
    program = """
        import sys, typing
        from bulltask import App

        @App("tested").task(name="pay")
        def pay(sum: int, to: list[str], note: typing.Annotated[str, "note"] | None = None, **more: object) -> bool: ...

        print(pay._codec.decode(pay._codec.encode((5, ["a"]), {})))
        print([name for name in sys.modules if name.startswith("pydantic")])
    """
    completed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    assert completed.stdout == "((), {'sum': 5, 'to': ['a']})\n[]\n", completed.stderr


def test_without_pydantic_2_only_hints_that_need_it_are_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(registry, "pydantic_types")
    monkeypatch.delitem(sys.modules, "bulltask.registry.pydantic_types")
    monkeypatch.setitem(sys.modules, "pydantic_core", None)  # with pydantic 1, there is none
    app = App("tested")
    task: Any = app.task(name="days")(days)
    problem = (
        "the type hints of task 'days' need pydantic 2, but .*pydantic_core.*; run: pip install 'pydantic>=2.9,<3'"
    )
    with pytest.raises(ConfigError, match=problem):
        task.delay(date(2026, 1, 1))
    with pytest.raises(ConfigError, match=problem):
        app._load_tasks()
    assert conversion_of(plain, None) is None
    assert conversion_of(days, False) is None


def conversion_of(function: Any, typed: bool | None) -> CallConversion | None:
    return CallTypes(function, "t", skip_first=False).conversion(typed)


# --- schemas ----------------------------------------------------------------------------------------------------------


def validator(hint: Any, *, of_results: bool = False) -> Draft202012Validator:
    definitions = Definitions(of_results=of_results)
    schema = converter_of(hint).schema(definitions)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator({**schema, "$defs": definitions.schemas}, format_checker=FormatChecker())


@pytest.mark.parametrize(("hint", "value", "form"), PAIRS, ids=lambda part: str(part)[:40])
def test_the_json_form_of_a_value_matches_the_schema_of_its_type(hint: Any, value: Any, form: Any) -> None:
    validator(hint).validate(form)
    validator(hint, of_results=True).validate(form)
    assert hint is Options or not validator(hint).is_valid({"other": []})


def test_a_schema_lists_parameters_and_defaults_and_allows_no_others_without_kwargs() -> None:
    definitions = Definitions()
    schema = CallTypes(plain, "t", skip_first=False).data_schema(definitions)
    assert schema["required"] == ["count", "tags", "options"]
    assert schema["properties"]["level"] == {"enum": [1, 2], "default": 1}
    assert schema["properties"]["more"] == {"type": "array", "items": {"type": "number"}}
    assert "additionalProperties" not in schema
    assert CallTypes(days, "t", skip_first=False).data_schema(definitions)["additionalProperties"] is False


def test_models_of_pydantic_1_are_converted() -> None:
    v1 = pytest.importorskip("pydantic.v1")

    class Part(v1.BaseModel):  # type: ignore[misc,name-defined]
        made: date
        price: Decimal = v1.Field(alias="unitPrice", ge=0)

    class Whole(v1.BaseModel):  # type: ignore[misc,name-defined]
        parts: list[Part]

    Whole.update_forward_refs(Part=Part)  # a local name
    whole = Whole(parts=[Part(made=date(2026, 1, 2), unitPrice="1.5")])
    stored = {"parts": [{"made": "2026-01-02", "unitPrice": 1.5}]}
    converter = converter_of(Whole)
    assert not is_plain(Whole)
    assert (converter.encode(whole), converter.decode(stored)) == (stored, whole)
    assert converter.encode(stored) == stored
    assert converter_of(list[Whole] | None).decode([stored]) == [whole]
    for wrong, problem in [
        ({"parts": [{"made": "no", "unitPrice": -1}]}, r"parts\[0\].made: invalid date format; parts\[0\].unitPrice: "),
        ({}, "parts: field required"),
        (7, "Whole expected dict not int"),
    ]:
        with pytest.raises(Mismatch, match=problem):
            converter.decode(wrong)
    definitions = Definitions()
    assert converter.schema(definitions) == {"$ref": "#/$defs/Whole"}
    assert definitions.schemas["Whole"]["properties"]["parts"]["items"] == {"$ref": "#/$defs/Part"}


def test_computed_fields_of_a_model_are_neither_written_nor_in_the_schema() -> None:
    class Square(pydantic.BaseModel, extra="forbid"):
        side: int

        @pydantic.computed_field
        def area(self) -> int:
            return self.side**2

    converter, definitions = converter_of(list[Square]), Definitions(of_results=True)
    assert converter.decode(converter.encode([Square(side=2)])) == [Square(side=2)]
    assert converter.encode([Square(side=2)]) == [{"side": 2}]
    converter.schema(definitions)
    assert (definitions.schemas["Square"]["properties"].keys(), definitions.schemas["Square"]["required"]) == (
        {"side"},
        ["side"],
    )


def test_a_model_without_a_schema_is_described_as_such() -> None:
    class Odd(pydantic.BaseModel):
        run: typing.Callable[[], None]

    schema = converter_of(Odd).schema(Definitions())
    assert schema.keys() == {"description"}
    assert schema["description"].startswith("pydantic has no JSON Schema for Odd: Cannot generate a JsonSchema")


def test_classes_of_the_same_name_have_different_definitions() -> None:
    other = type("Cat", (), {"__annotations__": {"lives": int}})
    definitions = Definitions()
    for hint in (Cat, dataclass(other), list[Cat]):
        converter_of(hint).schema(definitions)
    assert definitions.schemas.keys() == {"Cat", "Cat2"}


def test_a_type_of_a_result_gets_a_name_that_no_other_type_has() -> None:
    data, results = Definitions(), Definitions(of_results=True)
    for definitions in (data, results):
        converter_of(Node).schema(definitions)
    data.schemas["NodeResult"] = {}
    assert results.rename_other(data.schemas) == {"Node": "NodeResult_"}


def test_the_schema_of_a_result_is_what_the_worker_writes() -> None:
    app = App("tested", task_default_queue="mail")

    @app.task(name="same")
    def same(node: Node, box: Box) -> tuple[Node, Box, PlainOptions]:
        """Return the arguments.

        More.
        """
        return node, box, {"name": ""}

    schema = schema_of([same], app._config)
    entry = schema["tasks"]["same"]
    assert (entry["description"], entry["queue"]) == ("Return the arguments.", "{mail}")
    assert entry["data"]["properties"] == {"node": {"$ref": "#/$defs/Node"}, "box": {"$ref": "#/$defs/Box"}}
    assert [item["$ref"] for item in entry["returnvalue"]["prefixItems"]] == [
        "#/$defs/NodeResult",
        "#/$defs/BoxResult",
        "#/$defs/PlainOptions",
    ]
    assert schema["$defs"]["BoxResult"]["properties"]["node"] == {"$ref": "#/$defs/NodeResult"}
    assert schema["$defs"]["NodeResult"]["required"] == ["value", "children", "parent"]
    assert schema["$defs"]["NodeResult"]["properties"]["value"] == {"type": "string", "format": "decimal"}


@pytest.mark.parametrize("hint", [int, list[int], dict[str, int], Node, Literal["a"], Node | int, dict[int, int]])
@pytest.mark.parametrize(
    "value",
    ["x" * 100_000, {"x" * 100_000: "y"}, [["x"] * 100_000], {"a": {"x" * 100_000: ["x" * 100_000]}}, 10**10_000],
    ids=["text", "key", "array", "nested", "number"],
)
def test_a_mismatch_is_short_even_if_the_value_is_long(hint: Any, value: Any) -> None:
    mismatch = None
    try:
        converter_of(hint).decode(value)
    except Mismatch as exc:
        mismatch = exc
    assert len(str(mismatch)) < 2_000


def test_an_error_of_the_codec_is_short_even_if_a_key_is_long() -> None:
    for value in ({"x" * 100_000: {1}}, {("x" * 100_000,): 1}, {"a": {"x" * 100_000: float("nan")}}):
        with pytest.raises(EncodeError) as caught:
            codec.encode(value)
        assert len(str(caught.value)) < 400


@dataclass
class Plus:
    operand: Plus | Minus | int
    label: str


@dataclass
class Minus:
    operand: Plus | Minus | int
    label: int


class PydanticPlus(pydantic.BaseModel):
    operand: PydanticPlus | PydanticMinus | int


class PydanticMinus(pydantic.BaseModel):
    operand: PydanticPlus | PydanticMinus | int


def nested(depth: int, innermost: object) -> Any:
    for _ in range(depth):
        innermost = {"operand": innermost, "label": 1}
    return innermost


@pytest.mark.parametrize("method", ["decode", "encode"])
@pytest.mark.parametrize("innermost", [1, "no number", {"operand": 1, "label": "no number"}])
@pytest.mark.parametrize("hint", [Plus | Minus, Minus | Plus, list[Minus | Plus] | Minus | Plus])
def test_a_union_of_classes_that_contain_themselves_takes_little_work(
    hint: Any, innermost: object, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0

    def counted(schema: Any) -> Any:
        def count(value: object, handler: Callable[[object], object]) -> object:
            nonlocal tries
            tries += 1
            return handler(value)

        return attempt(core_schema.no_info_wrap_validator_function(count, schema))

    attempt = pydantic_types._attempt
    monkeypatch.setattr(pydantic_types, "_attempt", counted)
    convert = getattr(converter_of(hint), method)

    def work(depth: int) -> int:
        nonlocal tries
        tries = 0
        with suppress(Mismatch):
            convert(nested(depth, innermost))
        return tries

    assert 0 < work(6) < 6 * work(3)  # if each level doubles the work, it is 8 times as much


def test_a_part_that_several_members_try_is_converted_correctly() -> None:
    converter = converter_of(Minus | Plus)
    value = {"operand": {"operand": {"operand": 1, "label": "a"}, "label": 2}, "label": "b"}
    decoded = Plus(Minus(Plus(1, "a"), 2), "b")
    assert converter.decode(value) == decoded
    assert converter.encode(decoded) == value
    assert converter.encode(value) == value


@pytest.mark.parametrize("method", ["decode", "encode"])
def test_a_union_of_models_that_contain_themselves_is_refused_if_it_is_nested_too_deeply(method: str) -> None:
    convert = getattr(converter_of(PydanticPlus | PydanticMinus), method)
    assert convert(nested(8, 1))
    with pytest.raises(Mismatch, match="use a discriminated union"):
        convert(nested(40, 1))
