"""``convert_untyped``: values of types that JSON lacks are sent without a type hint, as the text that hints produce."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

import pytest

from bulltask import App, Context
from bulltask.errors import EncodeError
from bulltask.jobs import codec
from bulltask.jobs.names import to_plain
from bulltask.testing import InlineWorker, assert_enqueued, use_server

pytestmark = pytest.mark.redis

MOMENT = datetime(2026, 11, 29, 2, 30, tzinfo=UTC)


class Color(enum.Enum):
    RED = "red"


VALUES: list[tuple[Any, Any]] = [
    (MOMENT, "2026-11-29T02:30:00Z"),
    (MOMENT.replace(tzinfo=None), "2026-11-29T02:30:00"),
    (date(2026, 11, 29), "2026-11-29"),
    (time(2, 30), "02:30:00"),
    (timedelta(hours=1, seconds=1.5), "PT1H1.5S"),
    (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
    (Decimal("1.10"), "1.10"),
    (b"\xff", "/w=="),
    (bytearray(b"\xff"), "/w=="),
    ({1}, [1]),
    (frozenset([MOMENT]), ["2026-11-29T02:30:00Z"]),
    (deque([b""]), [""]),
    (Color.RED, "red"),
    (PurePosixPath("/a"), "/a"),
    ({"deep": [(MOMENT.date(), {"set": {UUID(int=7)}})]}, {"deep": [["2026-11-29", {"set": [str(UUID(int=7))]}]]}),
]


@pytest.fixture(params=["plain", "compressed"])
def app(request: pytest.FixtureRequest, broker_url: str) -> Iterator[App]:
    settings: dict[str, Any] = (
        {"task_compression": "zlib", "compression_threshold": 1} if request.param == "compressed" else {}
    )
    app = App("untyped", "redis://unreachable.invalid:1", convert_untyped=True, **settings)
    with use_server(app, broker_url):
        yield app


@pytest.mark.parametrize(("value", "text"), VALUES, ids=lambda value: type(value).__name__)
def test_values_without_a_hint_are_sent_as_text(app: App, worker: InlineWorker, value: Any, text: Any) -> None:
    received: list[Any] = []

    @app.task(name="untyped", bind=True)
    def untyped(self: Context, x: Any, *rest: Any) -> Any:
        received.append([x, rest])
        self.update_state(state="HALF", meta=x)
        return value

    @app.task(name="add")
    def following(previous: Any, y: Any) -> list[Any]:
        return [previous, y]

    result = untyped.delay(value, value)
    if app.conf.task_compression is None:
        assert_enqueued(app, untyped, (value, value))
    assert result.get(timeout=5) == text
    assert received == [[text, (text,)]]
    assert (untyped.s(value) | following.s(value)).delay().get(timeout=5) == [text, text]
    assert untyped.apply((value,)).get() == text
    assert app.send_task("untyped", kwargs={"x": value}).get(timeout=5) == text


@pytest.mark.parametrize(("value", "text"), VALUES[:7] + VALUES[12:13], ids=lambda value: type(value).__name__)
def test_values_with_a_hint_have_the_same_text_and_their_type(
    app: App, worker: InlineWorker, value: Any, text: Any
) -> None:
    def typed(x: Any, y: Any) -> Any:
        return [type(x) is type(value), x == value, y]

    typed.__annotations__["x"] = type(value)
    task = app.task(name="typed")(typed)
    result: Any = task.delay(value, value)
    assert result.get(timeout=5) == [True, True, text]
    assert result.kwargs == {"x": text, "y": text}


@pytest.mark.parametrize("value", [value for value, _ in VALUES] + [Decimal("NaN"), object(), {1: 2}, float("nan")])
def test_they_are_refused_without_the_setting_and_other_values_always(app: App, value: Any) -> None:
    strict = App("strict", "redis://unreachable.invalid:1", set_as_current=False)
    with pytest.raises(EncodeError):
        strict.task(name="strict")(lambda x: x).delay(value)
    if not any(value is one for one, _ in VALUES):
        with pytest.raises(EncodeError):
            app.task(name="lenient")(lambda x: x).delay(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = [MOMENT]
    loop.append(loop)
    with pytest.raises(EncodeError, match="circular reference"):
        codec.encode(loop, convert=to_plain)
