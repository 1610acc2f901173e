from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.errors import InvalidJobError
from bulltask.jobs import codec
from bulltask.registry.call import Arguments

KINDS = [
    Parameter.POSITIONAL_ONLY,
    Parameter.POSITIONAL_OR_KEYWORD,
    Parameter.VAR_POSITIONAL,
    Parameter.KEYWORD_ONLY,
    Parameter.VAR_KEYWORD,
]
POSITIONAL = {Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD}
VARIADIC = {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}
NAMES = ["a", "b", "c", "d", "e", "args", "kwargs", "data"]

values = (
    st.none()
    | st.booleans()
    | st.integers(-1000, 1000)
    | st.text(max_size=5)
    | st.lists(st.integers(0, 9), max_size=3)
    | st.dictionaries(st.sampled_from(NAMES), st.integers(0, 9), max_size=3)
)


def arguments(function: Callable[..., Any], *, bind: bool = False) -> Arguments:
    return Arguments(function, "t", skip_first=bind)


def function_of(parameters: list[Parameter]) -> Callable[..., Any]:
    """Return a function with this signature that returns its arguments, defaults filled in."""
    signature = inspect.Signature(parameters)

    def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


@st.composite
def signatures(draw: st.DrawFn) -> list[Parameter]:
    names = list(draw(st.permutations(NAMES)))
    parameters: list[Parameter] = []
    optional = False
    for kind in KINDS:
        for _ in range(draw(st.integers(0, 1 if kind in VARIADIC else 2))):
            # A positional parameter after one with a default needs a default; a keyword-only parameter does not.
            needs_default = optional and kind in POSITIONAL
            optional = kind not in VARIADIC and (needs_default or draw(st.booleans()))
            default: Any = draw(values) if optional else Parameter.empty
            parameters.append(Parameter(names.pop(), kind, default=default))
    return parameters


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[Parameter], tuple[Any, ...], dict[str, Any]]:
    """Draw a signature and arguments that match it."""
    parameters = draw(signatures())
    chosen = [p for p in parameters if p.kind not in VARIADIC and (p.default is Parameter.empty or draw(st.booleans()))]
    positional = [p for p in parameters if p.kind in POSITIONAL]
    first_gap = next((index for index, p in enumerate(positional) if p not in chosen), len(positional))
    positional_only = sum(p.kind is Parameter.POSITIONAL_ONLY for p in positional[:first_gap])
    by_position = positional[: draw(st.integers(positional_only, first_gap))]
    args = [draw(values) for _ in by_position]
    named = [p for p in chosen if p not in by_position and p.kind is not Parameter.POSITIONAL_ONLY]
    kwargs = {p.name: draw(values) for p in named}
    for p in parameters:
        if p.kind is Parameter.VAR_POSITIONAL and by_position == positional:
            args += draw(st.lists(values, max_size=3))
        if p.kind is Parameter.VAR_KEYWORD:
            kwargs = draw(st.dictionaries(collectable_names(parameters, p.name), values, max_size=3)) | kwargs
    return parameters, tuple(args), kwargs


def collectable_names(parameters: list[Parameter], collector: str) -> st.SearchStrategy[str]:
    """Return names that the parameter ``**collector`` may collect, including its own name.

    The name of a positional-only parameter is included unless the parameter has a default: ``Signature.bind()`` of
    Python 3.11 rejects such a call.
    """
    free = {p.name for p in parameters if p.kind is Parameter.POSITIONAL_ONLY and p.default is Parameter.empty}
    used = {p.name for p in parameters} - free - {collector}
    return st.sampled_from([name for name in [*NAMES, "f", "g"] if name not in used])


@given(calls())
def test_a_call_survives_a_round_trip_through_json(
    call: tuple[list[Parameter], tuple[Any, ...], dict[str, Any]],
) -> None:
    parameters, args, kwargs = call
    function = function_of(parameters)
    expected = function(*args, **kwargs)
    stored = codec.encode(arguments(function).bind(args, kwargs))
    read_args, read_kwargs = arguments(function).unbind(codec.decode(stored))
    assert function(*read_args, **read_kwargs) == expected


# --- data as a Node developer would write it --------------------------------------------------------------------------


def send(to: str, subject: str = "hi", *, urgent: bool = False) -> None: ...


def total(first: int, *rest: int) -> None: ...


def note(**fields: object) -> None: ...


def defaults(a: int = 1, b: int = 2, /, *more: int) -> None: ...


def mixed(a: int, /, b: int, *more: int, c: int = 0, **rest: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "data"),
    [
        (send, ("a@b",), {}, {"to": "a@b"}),
        (send, ("a@b",), {"urgent": True}, {"to": "a@b", "urgent": True}),
        (send, (), {"subject": "x", "to": "a@b"}, {"to": "a@b", "subject": "x"}),
        (total, (1, 2, 3), {}, {"first": 1, "rest": [2, 3]}),
        (total, (1,), {}, {"first": 1}),
        (note, (), {"x": 1}, {"fields": {"x": 1}}),
        (mixed, (1, 2, 3), {"d": 4}, {"a": 1, "b": 2, "more": [3], "rest": {"d": 4}}),
    ],
)
def test_arguments_are_stored_by_parameter_name(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], data: dict[str, Any]
) -> None:
    assert arguments(function).bind(args, kwargs) == data


@pytest.mark.parametrize(
    ("function", "data", "args", "kwargs"),
    [
        (send, {"to": "a@b", "subject": "x"}, (), {"to": "a@b", "subject": "x"}),
        (send, ["a@b", "x"], ("a@b", "x"), {}),
        (send, "a@b", ("a@b",), {}),
        (note, None, (), {}),
        (note, {}, (), {}),
        (note, {"x": 1, "y": 2}, (), {"x": 1, "y": 2}),
        (note, {"x": 1, "fields": {"y": 2}}, (), {"x": 1, "y": 2}),
        (note, {"fields": 5}, (), {"fields": 5}),
        (total, [1, 2, 3], (1, 2, 3), {}),
        (total, 1, (1,), {}),
        (total, {"first": 1, "rest": 2}, (1, 2), {}),
        (total, {"first": 1, "rest": []}, (), {"first": 1}),
        (mixed, {"a": 1, "b": 2, "e": 5}, (1,), {"b": 2, "e": 5}),
        (defaults, {"b": 5}, (1, 5), {}),
        (defaults, {"more": [5]}, (1, 2, 5), {}),
        (defaults, {"a": 5}, (5,), {}),
    ],
)
def test_job_data_of_other_clients_is_matched_by_name_or_position(
    function: Callable[..., Any], data: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert arguments(function).unbind(data) == (args, kwargs)


@pytest.mark.parametrize(
    ("function", "data", "message"),
    [
        (send, {"subject": "x"}, "missing a required argument: 'to'"),
        (send, {"to": "a", "cc": "b"}, "unexpected keyword argument 'cc'"),
        (send, ["a", "b", "c"], "too many positional arguments"),
        (send, None, "missing a required argument"),
        (total, {"rest": [2]}, "missing a required argument: 'first'"),
        (mixed, {"b": 2}, "missing a required argument: 'a'"),
    ],
)
def test_data_that_does_not_match_is_rejected_with_signature_and_argument(
    function: Callable[..., Any], data: Any, message: str
) -> None:
    with pytest.raises(InvalidJobError, match=message) as caught:
        arguments(function).unbind(data)
    assert "the job's data does not match t(" in str(caught.value)


def test_a_call_with_wrong_arguments_raises_pythons_error_message() -> None:
    with pytest.raises(TypeError, match=r"^t\(\) got an unexpected keyword argument 'cc'$"):
        arguments(send).bind(("a",), {"cc": "b"})
    with pytest.raises(TypeError, match=r"^t\(\) missing a required argument: 'to'$"):
        arguments(send).bind((), {})
    misspelt = "missing a required argument: 'to', and got an unexpected keyword argument 'too', 'cc'$"
    with pytest.raises(TypeError, match=misspelt):
        arguments(send).bind((), {"subject": "s", "too": "ann", "cc": "bob"})
    with pytest.raises(InvalidJobError, match=misspelt):
        arguments(send).unbind({"subject": "s", "too": "ann", "cc": "bob"})


def test_the_context_of_a_bound_task_is_not_an_argument() -> None:
    def bound(self: object, x: int) -> None: ...

    assert arguments(bound, bind=True).bind((1,), {}) == {"x": 1}
    assert arguments(bound, bind=True).unbind({"x": 1}) == ((), {"x": 1})
