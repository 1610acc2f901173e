"""Positions in a chart, and the formatting of values."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.lake.formatting import Unit, format_value, one_line
from bulltask.lake.log_histogram import bucket_of
from bulltask.lake.report.charts import Chart, Series, bands, ranges
from bulltask.lake.report.data import Axis, TaskAggregate

NOON = int(datetime(2026, 11, 22, 12, tzinfo=UTC).timestamp()) // 60
HOUR = Axis(NOON, 1, 60)


@pytest.mark.parametrize(
    ("minutes", "step", "points"),
    [(1, 1, 1), (240, 1, 240), (241, 2, 121), (1440, 10, 144), (10_080, 60, 168), (366 * 1440, 1440, 366)],
)
def test_an_axis_has_few_points_and_its_step_divides_a_day(minutes: int, step: int, points: int) -> None:
    midnight = NOON // 1440 * 1440
    assert Axis.spanning(midnight, midnight + minutes - 1) == Axis(midnight, step, points)


@given(st.integers(0, 10_000_000), st.integers(0, 400 * 1440))
def test_an_axis_has_a_point_for_each_of_its_minutes(first: int, length: int) -> None:
    axis = Axis.spanning(first, first + length)
    assert axis.index(first) == 0
    assert axis.index(first + length) == axis.points - 1
    assert 1440 % axis.step == 0


def test_a_line_has_steps_and_gaps() -> None:
    result = Chart("Jobs", "jobs", Axis(NOON, 1, 5), [Series("a", [0, 4, 4, None, 2])])
    assert result.curves[0].path == "M0.0 100H200V0H600M800.0 50H1000"
    assert [(tick.position, tick.text) for tick in result.y_ticks] == [
        (0, "0"),
        (25, "1"),
        (50, "2"),
        (75, "3"),
        (100, "4"),
    ]


def test_negative_values_are_drawn_below_a_line_at_zero() -> None:
    result = Chart("Backlog", "jobs", HOUR, [Series("a", [-50.0, 100.0] * 30)])
    assert (result.y_ticks[0].text, result.y_ticks[-1].text) == ("-50", "100")
    assert result.zero == pytest.approx(100 / 3, abs=0.01)


def test_durations_are_on_a_logarithmic_axis_with_whole_units() -> None:
    result = Chart("Wait", "ms", HOUR, [Series("a", [0.0, 45.0, 70_000.0, None] * 15)])
    texts = [tick.text for tick in result.y_ticks]
    assert texts == ["1 ms", "10 ms", "100 ms", "1 s", "10 s", "1 min", "10 min"]
    assert result.unit == "log scale"


def test_a_line_without_values_is_omitted_and_others_keep_their_style() -> None:
    result = Chart("Wait", "ms", HOUR, [Series("a", [None] * 60), Series("b", [1.0] * 60)])
    assert [(curve.label, curve.style) for curve in result.curves] == [("b", 1)]
    assert [line["label"] for line in result.payload["lines"]] == ["b"]


@pytest.mark.parametrize(
    ("axis", "first", "texts"),
    [
        (HOUR, 0, ["12:00", "12:10", "12:20", "12:30", "12:40", "12:50", "13:00"]),
        (Axis(NOON + 3, 1, 8), 0, ["12:03", "12:04", "12:05", "12:06", "12:07", "12:08", "12:09", "12:10", "12:11"]),
        (Axis(NOON, 10, 72), 0, ["12:00", "14:00", "16:00", "18:00", "20:00", "22:00", "23 Nov"]),
        (Axis(NOON, 60, 96), 0, ["12:00", "23 Nov", "12:00", "24 Nov", "12:00", "25 Nov", "12:00", "26 Nov", "12:00"]),
        (Axis(NOON, 720, 40), 2.5, ["23 Nov", "30 Nov", "7 Dec"]),
    ],
)
def test_time_ticks_have_round_values(axis: Axis, first: float, texts: list[str]) -> None:
    ticks = Chart("Jobs", "jobs", axis, [Series("a", [1.0] * axis.points)]).x_ticks
    assert ([tick.text for tick in ticks][: len(texts)], ticks[0].position) == (texts, first)
    assert len(ticks) <= 10


@given(
    st.lists(st.one_of(st.none(), st.floats(-1e9, 1e12)), min_size=1, max_size=50).filter(
        lambda values: any(value is not None for value in values)
    ),
    st.sampled_from(["ms", "jobs"]),
)
def test_every_value_is_within_the_Chart(values: list[float | None], unit: str) -> None:
    if unit == "ms":
        values = [None if value is None else abs(value) % 5e9 for value in values]
    result = Chart("Jobs", unit, Axis(NOON, 1, len(values)), [Series("a", values)])
    heights = [
        float(part.split("H")[0].split(" ")[-1]) for part in result.curves[0].path.replace("V", "M").split("M")[1:]
    ]
    assert all(-0.1 <= height <= 100.1 for height in heights)
    assert all(-0.01 <= tick.position <= 100.01 for tick in result.y_ticks)


def test_bands_of_lost_events_are_merged_and_have_a_minimum_width() -> None:
    axis = Axis(NOON, 1, 1000)
    minutes = [NOON + 10, NOON + 11, NOON + 12, NOON + 500, NOON - 5, NOON + 2000]
    assert bands(axis, minutes) == [(1.0, 0.4), (50.0, 0.4)]
    assert bands(Axis(NOON, 1, 10), [NOON + 8, NOON + 9]) == [(80.0, 20.0)]


def test_percentile_ranges_share_one_axis() -> None:
    counts = [{bucket_of(10): 50, bucket_of(100): 50}, {bucket_of(1000): 1}, {}]
    aggregates = [TaskAggregate([("q", str(n))], str(n), Counter(), sizes) for n, sizes in enumerate(counts)]
    result = ranges(aggregates, "wait")
    assert result
    assert [row.label for row in result.rows] == ["0", "1"]
    assert [tick.text for tick in result.ticks] == ["10 ms", "100 ms", "1 s", "10 s"][: len(result.ticks)]
    assert result.rows[0].positions == pytest.approx([0, 50, 50], abs=1)
    assert ranges(aggregates[2:], "wait") is None


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, Unit.COUNT, "–"),  # noqa: RUF001
        (12_345, Unit.COUNT, "12,345"),
        (0.5, Unit.MS, "0.5 ms"),
        (999, Unit.MS, "999 ms"),
        (1_500, Unit.MS, "1.5 s"),
        (90_000, Unit.MS, "1.5 min"),
        (7_200_000, Unit.MS, "2 h"),
        (200_000_000, Unit.MS, "2.31 d"),
        (90, Unit.SECONDS, "1.5 min"),
        (0.123456, Unit.FRACTION, "12.3%"),
        (0.99996, Unit.FRACTION, "99.996%"),
        (0.9999999, Unit.FRACTION, "99.999%"),
        (0.99, Unit.FRACTION, "99%"),
        (1.0, Unit.FRACTION, "100%"),
        (0.00001, Unit.FRACTION, "< 0.01%"),
        (-0.8, Unit.FRACTION, "-80%"),
        (Decimal("1234.5"), Unit.MONEY, "1,234.50"),
        (Decimal("0.000049"), Unit.MONEY, "0.000049"),
        (Decimal(0), Unit.MONEY, "0"),
        (0.0042, Unit.NUMBER, "0.004"),
        (0.00009, Unit.NUMBER, "< 0.0001"),
        (-0.00009, Unit.NUMBER, "> -0.0001"),
        (["a", "b\n"], Unit.TEXTS, "a, b\\n"),
        (datetime(2026, 11, 22, 9, 8, 7, tzinfo=UTC), Unit.TIME, "2026-11-22 09:08:07"),
        (False, Unit.FLAG, "no"),
    ],
)
def test_values_are_formatted_with_their_unit(value: object, unit: Unit, text: str) -> None:
    assert format_value(value, unit) == text


def test_control_characters_are_escaped() -> None:
    assert one_line("a\x1b[2Jb\r\nc\u202ed\u2028") == "a\\x1b[2Jb\\r\\nc\\u202ed\\u2028"
