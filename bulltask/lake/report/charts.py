"""The charts of a report: time series, and their geometry, which a template puts on the page.

Only the lines are SVG, stretched to the available width. Ticks and legends are HTML text, with the same size on all
screens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any, Final, NamedTuple

from bulltask.lake.formatting import Unit, format_value, shorten
from bulltask.lake.log_histogram import percentile
from bulltask.lake.report.data import (
    MAX_SERIES,
    Axis,
    DurationHistograms,
    QueueAggregate,
    ReportData,
    TaskAggregate,
    aggregated,
    sums,
)


@dataclass(slots=True)
class Series:
    """A value or ``None`` for each point of the axis; ``others`` combines all tasks or queues without a series."""

    label: str
    values: list[float | None]
    others: bool = False


def rates(data: ReportData, axis: Axis, names: Sequence[str]) -> list[Series]:
    """Return how many jobs or attempts there were per minute, for some counters of gold.task_minute."""
    lines = [Series(name, [0.0] * axis.points) for name in names]
    for row in aggregated(data.tasks, ["at"], sums(*names)).to_pylist():
        for line in lines:
            line.values[axis.index(row["at"])] = (row[line.label] or 0) / axis.step
    return lines


def percentiles(
    histograms: DurationHistograms, axis: Axis, labels: Sequence[str], quantile: float, *, others: bool
) -> list[Series]:
    """Return a percentile over time for each line of the ``waits`` or ``runs`` of the data.

    With ``others``, the last line combines all tasks without a separate line.
    """
    times, last = range(axis.start, axis.start + axis.minutes, axis.step), len(labels) - 1
    return [
        Series(
            label,
            [percentile(histograms.over_time.get((line, at), {}), quantile) for at in times],
            others=others and line == last,
        )
        for line, label in enumerate(labels)
    ]


def backlog(data: ReportData, axis: Axis, aggregates: Sequence[QueueAggregate]) -> list[Series]:
    """Return how much each queue has grown since the start of the axis, up to its first lost event.

    After the first lost event the backlog is unknown: a job whose *added* event was lost would only count when it
    finishes.
    """
    lines = queue_lines(data, axis, aggregates, "backlog_delta", 1)
    known_points = [axis.points] * len(lines)
    for index, aggregate in enumerate(aggregates):
        line = min(index, len(lines) - 1)  # the last line may combine several queues
        lost = data.incomplete.get(aggregate.queue, ())
        first_lost = min(map(axis.index, lost), default=axis.points)
        known_points[line] = min(known_points[line], max(first_lost, 0))
    for series, points in zip(lines, known_points, strict=True):
        sums = accumulate(value or 0 for value in series.values[:points])
        series.values = [*sums, *([None] * (axis.points - points))]
    return lines


def queue_lines(
    data: ReportData, axis: Axis, aggregates: Sequence[QueueAggregate], column: str, divisor: int
) -> list[Series]:
    """Return a column of ``gold.capacity_minute`` over time, divided, for each queue."""
    has_rest = len(aggregates) > MAX_SERIES
    shown = [aggregate.queue for aggregate in aggregates[: MAX_SERIES - 1 if has_rest else MAX_SERIES]]
    lines = {queue: Series(shorten(queue), [0.0] * axis.points) for queue in shown}
    rest = Series(f"{len(aggregates) - len(shown)} others", [0.0] * axis.points, others=True)
    for row in data.queues.select(["queue", "at", column]).to_pylist():
        values, index = lines.get(row["queue"], rest).values, axis.index(row["at"])
        values[index] = (values[index] or 0.0) + (row[column] or 0) / divisor
    return [*lines.values(), *([rest] if has_rest else [])]


WIDTH, HEIGHT = 1000, 100
"""The size of the SVG in its own coordinates."""

_TIMES_MS: Final = (1, 10, 100, 1_000, 10_000, 60_000, 600_000, 3_600_000, 36_000_000, 864_000_000, 8_640_000_000)
_TICK_MINUTES: Final = (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880, 7 * 1440, 14 * 1440, 28 * 1440)
_MAX_TICKS: Final = 9
_DAY: Final = 1440


class Tick(NamedTuple):
    """A tick of an axis: a position in percent and a label. Minor ticks are hidden on small screens."""

    position: float
    text: str
    minor: bool = False


class Curve(NamedTuple):
    """A drawn line: an SVG path's ``d``. Lines with the same number as ``style`` look the same in all charts."""

    label: str
    path: str
    style: int
    others: bool


class Range(NamedTuple):
    """The 50th, 95th and 99th percentile of one task: positions in percent, and labels."""

    label: str
    positions: Sequence[float]
    texts: Sequence[str]


class Ranges(NamedTuple):
    """Percentiles of tasks on a common logarithmic axis."""

    ticks: Sequence[Tick]
    rows: Sequence[Range]


class _Scale:
    """Maps values to percent of the height, with round values at both ends."""

    def __init__(self, values: Sequence[float], unit: Unit) -> None:
        self._unit = unit
        self.values = _round_times(values) if unit is Unit.MS else _round_numbers(values)
        self.low = self.values[0]
        self.high = self.values[-1]

    def position(self, value: float) -> float:
        if self._unit is not Unit.MS:
            return (value - self.low) / (self.high - self.low) * 100
        return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low) * 100

    @property
    def ticks(self) -> list[Tick]:
        return [Tick(round(self.position(value), 2), format_value(value, self._unit)) for value in self.values]


def _round_times(values: Sequence[float]) -> Sequence[float]:
    smallest, largest = max(min(values), 1), max(*values, 1)
    low = max(tick for tick in _TIMES_MS if tick <= smallest)
    high = next((tick for tick in _TIMES_MS if tick >= largest and tick > low), _TIMES_MS[-1])
    return [tick for tick in _TIMES_MS if low <= tick <= high]


def _round_numbers(values: Sequence[float]) -> Sequence[float]:
    low, high = min(0.0, *values), max(0.0, *values)
    if high - low < 1e-6:
        high = low + 1
    rough = (high - low) / 4
    power = 10 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= rough * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step - 0.001)
    return [round(count * step, 10) for count in range(first, last + 1)]


class Chart:
    """A chart of lines over time, of which at least one has values.

    Args:
        title: The title.
        unit: The unit of the y axis; ``ms`` makes it logarithmic.
        axis: The x axis.
        lines: The lines. Those without values are omitted; all others keep their style.
        lost: The result of :func:`bands`.

    Attributes:
        curves: The drawn lines.
        x_ticks: Ticks from left to right.
        y_ticks: Ticks from the bottom up.
        zero: The position of 0 in percent, if it is above the bottom.
        bands: Left ends and widths, in percent, of times with lost events.
        summary: A description for screen readers.
        payload: Start (epoch seconds), step (seconds), unit and values, for the page's script.
    """

    def __init__(
        self, title: str, unit: str, axis: Axis, lines: Sequence[Series], lost: Sequence[tuple[float, float]] = ()
    ) -> None:
        drawn = [(style, line) for style, line in enumerate(lines) if any(value is not None for value in line.values)]
        kind = Unit.MS if unit == "ms" else Unit.NUMBER
        scale = _Scale([value for _, line in drawn for value in line.values if value is not None], kind)
        self.title = title
        self.bands = lost
        self.unit = "log scale" if kind is Unit.MS else unit
        self.curves = [Curve(line.label, _path(line.values, scale), style, line.others) for style, line in drawn]
        self.x_ticks = _x_ticks(axis)
        self.y_ticks = scale.ticks
        self.zero = round(scale.position(0), 2) if scale.low < 0 < scale.high else None
        self.summary = f"{title}. {'; '.join(_highest(line, axis, kind) for _, line in drawn)}."
        self.payload: dict[str, Any] = {
            "start": axis.start * 60,
            "step": axis.step * 60,
            "unit": kind.value,
            "lines": [{"label": line.label, "values": [_short(value) for value in line.values]} for _, line in drawn],
        }


def bands(axis: Axis, minutes: Iterable[int]) -> list[tuple[float, float]]:
    """Return left ends and widths in percent of some minutes on an axis; narrow bands are widened."""
    points = sorted({axis.index(minute) for minute in minutes if 0 <= axis.index(minute) < axis.points})
    merged: list[list[int]] = []
    for point in points:
        if merged and merged[-1][1] == point:
            merged[-1][1] = point + 1
        else:
            merged.append([point, point + 1])
    return [
        (round(begin / axis.points * 100, 2), max(0.4, round((end - begin) / axis.points * 100, 2)))
        for begin, end in merged
    ]


def ranges(aggregates: Sequence[TaskAggregate], metric: str) -> Ranges | None:
    """Return the percentiles of tasks, ``wait`` or ``run``, on a common axis; ``None`` if nothing was measured."""
    measured = [
        (aggregate.label, [percentile(histogram, quantile) or 0 for quantile in (0.5, 0.95, 0.99)])
        for aggregate in aggregates
        if (histogram := getattr(aggregate, metric))
    ]
    if not measured:
        return None
    scale = _Scale([value for _, values in measured for value in values], Unit.MS)
    rows = [
        Range(
            label,
            [round(scale.position(value), 2) for value in values],
            [format_value(value, Unit.MS) for value in values],
        )
        for label, values in measured
    ]
    return Ranges(scale.ticks, rows)


def _x_ticks(axis: Axis) -> list[Tick]:
    end = axis.start + axis.minutes
    step = next((size for size in _TICK_MINUTES if axis.minutes / size <= _MAX_TICKS), _TICK_MINUTES[-1])
    first = -(-axis.start // min(step, _DAY)) * min(step, _DAY)  # the first midnight, if ticks are days
    return [
        Tick(round((minute - axis.start) / axis.minutes * 100, 2), _time_text(minute, step), minor=index % 2 == 1)
        for index, minute in enumerate(range(first, end + 1, step))
    ]


def _time_text(minute: int, step: int) -> str:
    moment = datetime.fromtimestamp(minute * 60, UTC)
    return f"{moment.day} {moment:%b}" if step >= _DAY or minute % _DAY == 0 else f"{moment:%H:%M}"


def _path(values: Sequence[float | None], scale: _Scale) -> str:
    """Return an SVG path of steps from left to right, with a gap where there is no value."""
    width = WIDTH / len(values)
    parts: list[str] = []
    last: str | None = None
    for index, value in enumerate(values):
        if value is None:
            last = None
            continue
        height = f"{HEIGHT - scale.position(value) * HEIGHT / 100:.1f}".removesuffix(".0")
        right = f"{(index + 1) * width:.1f}".removesuffix(".0")
        if last is None:
            parts.append(f"M{index * width:.1f} {height}H{right}")
        elif height == last:
            parts[-1] = parts[-1][: parts[-1].rindex("H")] + f"H{right}"
        else:
            parts.append(f"V{height}H{right}")
        last = height
    return "".join(parts)


def _short(value: float | None) -> float | None:
    """Return a value with three digits, enough for a tooltip."""
    return None if value is None else float(f"{value:.3g}") if abs(value) < 1_000 else round(value)


def _highest(line: Series, axis: Axis, kind: Unit) -> str:
    """Return a line's highest value as text, and when it was reached first."""
    value, index = max(((value, -index) for index, value in enumerate(line.values) if value is not None))
    at = datetime.fromtimestamp((axis.start - index * axis.step) * 60, UTC)
    return f"{line.label}: at most {format_value(value, kind)}, {at:%Y-%m-%d %H:%M} UTC"
