"""Signatures, chains and groups as dictionaries in the format of Celery's JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import jsonschema
import pytest

from bulltask import App, Signature, chain, chord, group, signature
from bulltask.errors import EncodeError
from bulltask.jobs import codec
from bulltask.registry.canvas import Canvas
from bulltask.registry.types import Definitions


class Tasks:
    """An app's tasks."""

    def __init__(self) -> None:
        self.app = app = App("dictionaries")

        @app.task(name="add", queue="sums")
        def add(x: int, y: int = 1) -> int:
            return x + y

        @app.task(name="total")
        def total(numbers: list[int]) -> int:
            return sum(numbers)

        @app.task(name="hinted")
        def hinted(call: Signature[Any, int], then: Signature | None = None) -> str:
            return repr(call if then is None else then)

        @app.task(name="plain")
        def plain(calls: Any) -> Any:
            return calls

        self.add, self.total, self.hinted, self.plain = add, total, hinted, plain


@pytest.fixture
def tasks() -> Tasks:
    return Tasks()


def test_a_signature_has_the_fields_of_celerys_json(tasks: Tasks) -> None:
    call = tasks.add.si(1, y=2).set(countdown=timedelta(seconds=90), queue="slow")
    call.link(tasks.total.si([1]))
    assert call.to_dict() == {
        "task": "add",
        "args": [1],
        "kwargs": {"y": 2},
        "options": {"countdown": 90.0, "queue": "slow", "link": [tasks.total.si([1]).to_dict()]},
        "subtask_type": None,
        "immutable": True,
    }
    steps = chain(tasks.add.s(1), tasks.add.s(2)).on_error(tasks.total.s())
    assert steps.to_dict() == {
        "task": "celery.chain",
        "args": [],
        "kwargs": {"tasks": [tasks.add.s(1).to_dict(), tasks.add.s(2).to_dict()]},
        "options": {"link_error": [tasks.total.s().to_dict()]},
        "subtask_type": "chain",
        "immutable": False,
    }


CANVASES: Mapping[str, Callable[[Tasks], Canvas[Any, Any]]] = {
    "signature": lambda t: t.add.s(1).set(eta=datetime(2026, 11, 23, tzinfo=UTC), priority=3, link=t.add.s(1)),
    "immutable signature": lambda t: t.add.si(1, 2),
    "task of another app": lambda t: t.app.signature("other", kwargs={"a": 1}),
    "chain": lambda t: chain(t.add.s(1, 2), t.add.s(3), t.add.s(4)).on_error(t.total.s()),
    "group": lambda t: group(t.add.s(1, 2), t.add.s(3) | t.add.s(4)),
    "chord": lambda t: chord([t.add.s(1, 2), t.add.s(3, 4)], t.total.s()) | t.add.s(1),
    "starmap": lambda t: t.add.starmap([(1, 2), (3,)]),
}


@pytest.mark.parametrize("make", CANVASES.values(), ids=CANVASES)
def test_a_canvas_survives_a_round_trip_through_json(tasks: Tasks, make: Callable[[Tasks], Canvas[Any, Any]]) -> None:
    canvas = make(tasks)
    rebuilt = signature(json.loads(codec.encode(canvas)))
    assert type(rebuilt) is type(canvas)
    assert rebuilt.to_dict() == canvas.to_dict()
    for before, after in zip(canvas.calls(), rebuilt.calls(), strict=True):
        assert after.options == before.options
        if before.task.name != "other":
            assert after.task._build({}, after.options).queue == before.task._build({}, before.options).queue
    assert Signature.from_dict(canvas.to_dict(), app=tasks.app).to_dict() == canvas.to_dict()


def test_a_chord_as_celery_writes_it_becomes_a_chord(tasks: Tasks) -> None:
    member: dict[str, Any] = {
        "task": "add",
        "args": [1, 2],
        "kwargs": {},
        "options": {},
        "subtask_type": None,
        "immutable": False,
    }
    header = {"task": "celery.group", "args": [], "kwargs": {"tasks": [member]}, "options": {}, "subtask_type": "group"}
    body: Any = {**member, "task": "total", "args": []}
    for written in (header, [member]):
        written_chord = {
            "task": "celery.chord", "args": [], "kwargs": {"header": written, "body": body}, "options": {"priority": 3},
            "subtask_type": "chord",
        }  # fmt: skip
        assert repr(signature(written_chord)) == "group(add(1, 2)) | total()"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "does not describe a signature"),
        ({"task": "celery.map", "subtask_type": "xmap"}, "does not describe a signature"),
        ({"subtask_type": "chain", "kwargs": {}}, "does not describe a signature"),
        ({"task": "add", "args": [1, 2, 3]}, "too many positional arguments"),
        ({"task": "add", "options": {"countdwon": 1}}, "unknown option 'countdwon'"),
    ],
)
def test_another_dictionary_is_rejected(tasks: Tasks, given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        signature(given)


def test_a_signature_among_the_arguments_arrives_as_its_hint_says(tasks: Tasks) -> None:
    call = tasks.add.s(1, 2)
    assert tasks.hinted.apply((call,)).get() == "add(1, 2)"
    assert tasks.hinted.apply((call.to_dict(),)).get() == "add(1, 2)"
    assert tasks.hinted.apply((call, call | tasks.add.s(3))).get() == "add(1, 2) | add(3)"
    assert tasks.plain.apply(([call, {"then": group(call)}],)).get() == [
        call.to_dict(),
        {"then": group(call).to_dict()},
    ]


def test_the_json_schema_of_a_signature_accepts_its_dictionary(tasks: Tasks) -> None:
    schema = tasks.hinted._codec.types.type_of("call").schema(Definitions())
    for canvas in (tasks.add.s(1), chain(tasks.add.s(1), tasks.add.s(2))):
        jsonschema.validate(canvas.to_dict(), schema)
        assert schema["properties"].keys() == canvas.to_dict().keys()


def test_a_value_that_is_not_a_signature_is_rejected_when_it_is_sent(tasks: Tasks) -> None:
    wrong: Any = tasks.hinted
    with pytest.raises(EncodeError, match="call: expected a signature, not 5"):
        wrong.apply((5,))
    for broken in (
        {},
        {"subtask_type": "group", "kwargs": {"tasks": [5]}},
        {"task": "add", "options": {"eta": "soon"}},
    ):
        with pytest.raises(EncodeError, match="call: expected a signature: "):
            wrong.apply((broken,))


def test_an_argument_of_a_signature_that_json_does_not_support_is_named(tasks: Tasks) -> None:
    with pytest.raises(EncodeError, match=r"\['args'\]\[0\] is of type builtins.object"):
        tasks.plain.apply((tasks.app.signature("other", [object()]),))
