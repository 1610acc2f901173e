"""Pictures in SVG: small lines, charts, bars of a timeline, and graphs of workflows.

They have no styles of their own: the page's style sheet gives their colours, for light, dark and print. Nothing is said
by colour alone: states have signs and names, lines have dashes, and each chart has a table of its values.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from math import ceil, floor, log10, sqrt
from typing import Final, Generic, TypeVar

from markupsafe import Markup, escape

__all__ = ["Box", "Line", "Place", "arrange", "bar", "chart", "graph", "moment", "place_in_layers", "sparkline"]

N = TypeVar("N")


def moment(time: float | datetime) -> Markup:
    """Return a time, which the browser shows in the reader's zone, with UTC in its title; a number is in milliseconds.

    Raises ``ValueError`` or ``OverflowError`` if it is too far away.
    """
    utc = time.astimezone(UTC) if isinstance(time, datetime) else datetime.fromtimestamp(time / 1000, UTC)
    text = f"{utc:%Y-%m-%d %H:%M:%S}"
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(utc.isoformat(), text, text)


# ---- lines and charts ----


def sparkline(values: Sequence[float], label: str, width: int = 120, height: int = 24) -> Markup:
    """Return a line through some values, the last one at the right; ``label`` says what they are."""
    if len(values) < 2:
        return Markup('<svg class="spark" width="{}" height="{}" role="img" aria-label="{}"></svg>').format(
            width, height, label
        )
    top = max(*values, 1e-9)
    step = width / (len(values) - 1)
    points = " ".join(
        f"{at * step:.1f},{height - 2 - value / top * (height - 4):.1f}" for at, value in enumerate(values)
    )
    text = f"{label}: now {_short(values[-1])}, from {_short(min(values))} to {_short(max(values))}"
    return Markup(
        '<svg class="spark" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img" aria-label="{text}">'
        '<title>{text}</title><polyline points="{points}"/></svg>'
    ).format(w=width, h=height, text=text, points=points)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart: its name, and a value for each time; ``None`` where it is not known."""

    name: str
    values: Sequence[float | None]


LINES: Final = 6
"""How many lines of a chart can be told apart."""

_WIDTH: Final = 640
_HEIGHT: Final = 226
_LEFT: Final = 64
_RIGHT: Final = 16
_TOP: Final = 12
_BOTTOM: Final = 34


def chart(title: str, unit: str, times_ms: Sequence[float], lines: Sequence[Line]) -> Markup:
    """Return lines over time with axes, whose values can be read by pointing at them, and as a table.

    Args:
        title: What is shown.
        unit: The unit of the values; ``"s"`` for durations, which are shown in minutes or hours if they are long.
        times_ms: The times of the values, in order. The axis counts back from the last one, so it needs no time zone.
        lines: The lines.
    """
    shown = [line for line in lines if any(value is not None for value in line.values)]
    if len(times_ms) < 2 or not shown:
        return Markup('<figure class="chart"><figcaption>{}</figcaption><p>No values yet.</p></figure>').format(title)
    first_ms, last_ms = times_ms[0], times_ms[-1]
    ticks = _ticks(max(value for line in shown for value in line.values if value is not None), unit)
    across, down = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(ms: float) -> float:
        return _LEFT + (ms - first_ms) / max(last_ms - first_ms, 1) * across

    def y(value: float) -> float:
        return _TOP + down - value / ticks[-1] * down

    parts = [
        Markup(
            '<figure class="chart"><figcaption>{}</figcaption>'
            '<svg viewBox="0 0 {} {}" role="img" aria-label="{}; its values are in the table below">'
        ).format(title, _WIDTH, _HEIGHT, title)
    ]
    parts += [
        Markup(
            '<path class="grid" d="M{} {y:.1f}H{}"/><text class="axis end" x="{}" y="{base:.1f}">{text}</text>'
        ).format(
            _LEFT,
            _WIDTH - _RIGHT,
            _LEFT - 6,
            y=y(value),
            base=y(value) + 4,
            text=_short(value) if unit == "jobs" else _with_unit(value, unit, ticks[-1]),
        )
        for value in ticks
    ]
    for share in (0, 0.5, 1):
        ms = first_ms + share * (last_ms - first_ms)
        anchor = {0: "start", 0.5: "middle", 1: "end"}[share]
        parts.append(
            Markup('<text class="axis {}" x="{x:.1f}" y="{}">{}</text>').format(
                anchor, _HEIGHT - 8, _ago(last_ms - ms), x=x(ms)
            )
        )
    for number, line in enumerate(shown):
        for points in _pieces(times_ms, line.values):
            path = "L".join(f"{x(ms):.1f} {y(value):.1f}" for ms, value in points)
            parts.append(Markup('<path class="line line{}" d="M{}{}"/>').format(number % LINES, path, _dot(points)))
    parts.append(_hits(times_ms, x, [(line, unit) for line in shown]))
    parts.append(Markup("</svg>"))
    parts.append(_legend(shown) if len(shown) > 1 else Markup(""))
    parts.append(_values(times_ms, shown, title, unit))
    return Markup("").join([*parts, Markup("</figure>")])


def _pieces(times_ms: Sequence[float], values: Sequence[float | None]) -> Iterable[list[tuple[float, float]]]:
    """Yield the parts of a line between unknown values."""
    piece: list[tuple[float, float]] = []
    for ms, value in zip(times_ms, values, strict=True):
        if value is not None:
            piece.append((ms, value))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _dot(points: Sequence[object]) -> str:
    """Return the end of a path, so that a single point is visible."""
    return "h0.1" if len(points) == 1 else ""


def _hits(times_ms: Sequence[float], x: Callable[[float], float], lines: Sequence[tuple[Line, str]]) -> Markup:
    """Return a column for each time, which shows the values there while it is pointed at."""
    parts = []
    for at, ms in enumerate(times_ms):
        left = x(ms) if at == 0 else (x(times_ms[at - 1]) + x(ms)) / 2
        right = x(ms) if at == len(times_ms) - 1 else (x(times_ms[at + 1]) + x(ms)) / 2
        said = "; ".join(f"{line.name}: {_with_unit(line.values[at], unit)}" for line, unit in lines)
        parts.append(
            Markup(
                '<g class="hit"><rect x="{left:.1f}" y="{}" width="{w:.1f}" height="{h}"/>'
                '<path d="M{x:.1f} {}v{h}"/><title>{}</title></g>'
            ).format(
                _TOP,
                _TOP,
                f"{_ago(times_ms[-1] - ms)}: {said}",
                left=left,
                w=max(right - left, 0.5),
                h=_HEIGHT - _TOP - _BOTTOM,
                x=x(ms),
            )
        )
    return Markup("").join(parts)


def _legend(lines: Sequence[Line]) -> Markup:
    items = Markup("").join(
        Markup(
            '<li><svg width="28" height="10" aria-hidden="true"><path class="line line{}" d="M0 5H28"/></svg> {}</li>'
        ).format(number % LINES, line.name)
        for number, line in enumerate(lines)
    )
    return Markup('<ul class="legend">{}</ul>').format(items)


def _values(times_ms: Sequence[float], lines: Sequence[Line], title: str, unit: str) -> Markup:
    heads = Markup("").join(Markup('<th scope="col" class="n">{}</th>').format(line.name) for line in lines)
    rows = Markup("").join(
        Markup('<tr><th scope="row">{}</th>{}</tr>').format(moment(times_ms[at]), _cells(lines, at, unit))
        for at in reversed(range(len(times_ms)))
    )
    return Markup(
        '<details><summary>Values</summary><div class="scroll" tabindex="0" role="region" aria-label="{}">'
        "<table><caption>{}</caption>"
        '<thead><tr><th scope="col">time</th>{}</tr></thead><tbody>{}</tbody></table></div></details>'
    ).format(f"Values: {title}", title, heads, rows)


def _cells(lines: Sequence[Line], at: int, unit: str) -> Markup:
    return Markup("").join(Markup('<td class="n">{}</td>').format(_with_unit(line.values[at], unit)) for line in lines)


def _ticks(top: float, unit: str) -> list[float]:
    """Return three to six round numbers from 0 up to at least ``top``."""
    top = top or 1.0
    _, scale = _scale(top, unit)
    rough = max(top / scale, 4.0 if unit == "jobs" else 1e-6) / 4
    size = 10 ** floor(log10(rough))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= rough * 0.999)
    return [number * step * scale for number in range(max(1, ceil(top / scale / step * 0.999)) + 1)]


def _scale(value: float, unit: str) -> tuple[str, float]:
    """Return the unit in which a value is shown, and how large it is."""
    if unit != "s":
        return unit, 1.0
    for name, size in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0), ("s", 0.1)):
        if value >= 2 * size or (name == "s" and value == 0):
            return name, max(size, 1.0)
    return "ms", 0.001


def _with_unit(value: float | None, unit: str, like: float | None = None) -> str:
    """Return a value with its unit: that in which another value, ``like``, is shown, or a suitable one."""
    if value is None:
        return "?"
    name, scale = _scale(value if like is None else like, unit)
    return f"{_short(value / scale)} {name}".rstrip()


def _short(value: float) -> str:
    """Return a number with three digits or more: ``0.042``, ``4.2``, ``1,234``, ``2.5 M``."""
    if abs(value) >= 10_000_000:
        return f"{value / 1_000_000:,.0f} M"
    if abs(value) >= 100 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _ago(ms: float) -> str:
    if ms <= 0:
        return "now"
    name, scale = _scale(ms / 1000, "s")
    return f"{ms / 1000 / scale:.2g} {name} ago" if ms < 100_000 * scale else f"{_with_unit(ms / 1000, 's')} ago"


def bar(start: float, length: float, state: str, label: str) -> Markup:
    """Return a bar of a timeline; ``start`` and ``length`` are shares of its whole length."""
    left = min(max(start, 0.0), 0.985) * 200
    width = min(max(length * 200, 3.0), 200 - left)
    return Markup(
        '<svg class="bar" width="200" height="14" viewBox="0 0 200 14" preserveAspectRatio="none" role="img" '
        'aria-label="{}">'
        '<path class="grid" d="M0 7H200"/>'
        '<rect class="of-{}" x="{x:.1f}" y="1" width="{w:.1f}" height="12" rx="2"/></svg>'
    ).format(label, state, x=left, w=width)


# ---- layout of graphs ----

LAYER_GAP: Final = 40.0
"""The distance between two layers of a graph."""
GAP: Final = 16.0
"""The distance between two boxes of a layer."""

_SWEEPS: Final = 6
_MAX_BENDS: Final = 2_000
"""How many bends lines may have that pass through layers; in a graph with more, they are straight."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a box is: its upper left corner, and its size."""

    x: float
    y: float
    width: float
    height: float


def place_in_layers(
    sizes: Mapping[N, tuple[float, float]], edges: Iterable[tuple[N, N]]
) -> tuple[dict[N, Place], dict[tuple[N, N], list[tuple[float, float]]]]:
    """Place the boxes of a graph, each below those from which edges lead to it; boxes do not overlap.

    Args:
        sizes: The boxes, with their widths and heights.
        edges: Pairs of an upper and a lower box. An edge that would close a cycle is ignored.

    Returns:
        The places, from x = 0 and y = 0; and for each edge the points through which its line passes, from the middle
        of the upper box's lower side to that of the lower box's upper side.
    """
    layout = _Layout(sizes, edges)
    return layout.places, layout.routes


class _Layout(Generic[N]):
    """A layered layout: layers by the longest way from above, their order by barycentres, then the coordinates.

    Boxes have numbers; those after the boxes of the graph are the bends of edges that pass through layers.
    """

    def __init__(self, sizes: Mapping[N, tuple[float, float]], edges: Iterable[tuple[N, N]]) -> None:
        names = list(sizes)
        number = {name: at for at, name in enumerate(names)}
        self._sizes = [sizes[name] for name in names]
        wanted = dict.fromkeys((number[a], number[b]) for a, b in edges if a in number and b in number and a != b)
        forward = _without_cycles(len(names), list(wanted))
        self._layer = _layers(len(names), forward)
        chains = self._add_bends(forward)
        self._above: list[list[int]] = [[] for _ in self._sizes]
        self._below: list[list[int]] = [[] for _ in self._sizes]
        for chain in chains.values():
            for upper, lower in pairwise(chain):
                self._above[lower].append(upper)
                self._below[upper].append(lower)
        self._rows: list[list[int]] = [[] for _ in range(max(self._layer, default=-1) + 1)]
        for box in self._in_depth_first_order():
            self._rows[self._layer[box]].append(box)
        self._order_rows()
        x, y = self._coordinates()
        self.places = {name: Place(x[at], y[at], *self._sizes[at]) for at, name in enumerate(names)}
        self.routes = {
            (names[a], names[b]): [
                (x[a] + self._sizes[a][0] / 2, y[a] + self._sizes[a][1]),
                *((x[bend] + self._sizes[bend][0] / 2, y[bend] + self._sizes[bend][1] / 2) for bend in chain[1:-1]),
                (x[b] + self._sizes[b][0] / 2, y[b]),
            ]
            for (a, b), chain in chains.items()
        }

    def _add_bends(self, edges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], list[int]]:
        """Return the boxes and bends through which each edge passes."""
        layer = self._layer
        bends = sum(layer[b] - layer[a] - 1 for a, b in edges)
        chains = {}
        for a, b in edges:
            between = list(range(layer[a] + 1, layer[b])) if bends <= _MAX_BENDS else []
            chains[a, b] = [a, *range(len(self._sizes), len(self._sizes) + len(between)), b]
            self._sizes += [(0.0, 0.0)] * len(between)
            layer += between
        return chains

    def _in_depth_first_order(self) -> Iterable[int]:
        """Yield all boxes so that those below one box are together: then a tree has no crossing from the beginning."""
        seen = [False] * len(self._sizes)
        todo = [box for box in reversed(range(len(self._sizes))) if not self._above[box]]
        while todo:
            box = todo.pop()
            if seen[box]:
                continue
            seen[box] = True
            yield box
            todo += reversed(self._below[box])

    def _order_rows(self) -> None:
        """Sort each row by the mean position of its neighbours in the row above, or below, in turns.

        The order with the fewest crossings wins; a tree has none from the beginning.
        """
        position = [0] * len(self._sizes)
        for row in self._rows:
            _number(row, position)
        best, fewest = [list(row) for row in self._rows], self._crossings(position)
        for sweep in range(_SWEEPS):
            if not fewest:
                break
            near = self._above if sweep % 2 == 0 else self._below
            for row in self._rows if sweep % 2 == 0 else reversed(self._rows):
                means = {
                    box: sum(position[one] for one in near[box]) / len(near[box]) if near[box] else position[box]
                    for box in row
                }
                row.sort(key=means.__getitem__)
                _number(row, position)
            crossings = self._crossings(position)
            if crossings < fewest:
                best, fewest = [list(row) for row in self._rows], crossings
        self._rows = best

    def _crossings(self, position: Sequence[int]) -> int:
        """Count how often lines between neighbouring rows cross."""
        crossings = 0
        for row in self._rows:
            ends: list[int] = []
            for box in sorted(row, key=position.__getitem__):
                found = sorted(position[lower] for lower in self._below[box])
                crossings += sum(len(ends) - bisect_right(ends, end) for end in found)
                for end in found:
                    insort(ends, end)
        return crossings

    def _coordinates(self) -> tuple[list[float], list[float]]:
        x, y, top = [0.0] * len(self._sizes), [0.0] * len(self._sizes), 0.0
        for row in self._rows:
            left = 0.0
            for box in row:
                x[box], y[box] = left, top
                left += self._sizes[box][0] + GAP
            top += max(self._sizes[box][1] for box in row) + LAYER_GAP
        for sweep in range(_SWEEPS):
            # The last sweep goes up, so that boxes are in the middle above those below them.
            neighbours = self._above if sweep % 2 == 0 else self._below
            for row in self._rows if sweep % 2 == 0 else self._rows[::-1]:
                wanted = [self._left_of_mean(box, neighbours[box], x) for box in row]
                found = _apart(wanted, [self._sizes[box][0] + GAP for box in row])
                for box, left in zip(row, found, strict=True):
                    x[box] = left
        first = min(x, default=0.0)
        return [left - first for left in x], y

    def _left_of_mean(self, box: int, near: Sequence[int], x: Sequence[float]) -> float:
        """Return where a box is in the middle of its neighbours; without any, where it is."""
        if not near:
            return x[box]
        middle = sum(x[one] + self._sizes[one][0] / 2 for one in near) / len(near)
        return middle - self._sizes[box][0] / 2


def _number(row: Sequence[int], position: list[int]) -> None:
    for at, box in enumerate(row):
        position[box] = at


def _without_cycles(boxes: int, edges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the edges, except those that lead back to a box from which they come."""
    below: list[list[int]] = [[] for _ in range(boxes)]
    has_above = [False] * boxes
    for a, b in edges:
        below[a].append(b)
        has_above[b] = True
    state, kept = [0] * boxes, []  # 1: on the way to the current box; 2: done
    for root in sorted(range(boxes), key=lambda box: has_above[box]):
        if state[root]:
            continue
        state[root] = 1
        way = [(root, iter(below[root]))]
        while way:
            box, rest = way[-1]
            following = next(rest, None)
            if following is None:
                state[box] = 2
                way.pop()
            elif state[following] != 1:
                kept.append((box, following))
                if state[following] == 0:
                    state[following] = 1
                    way.append((following, iter(below[following])))
    return kept


def _layers(boxes: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return each box's layer: one more than that of the lowest box above it."""
    below: list[list[int]] = [[] for _ in range(boxes)]
    missing = [0] * boxes
    for a, b in edges:
        below[a].append(b)
        missing[b] += 1
    layer = [0] * boxes
    ready = [box for box in range(boxes) if not missing[box]]
    for box in ready:  # the loop appends to it
        for lower in below[box]:
            layer[lower] = max(layer[lower], layer[box] + 1)
            missing[lower] -= 1
            if not missing[lower]:
                ready.append(lower)
    return layer


def _apart(wanted: Sequence[float], widths: Sequence[float]) -> list[float]:
    """Return positions that are as near as possible to the wanted ones, in the same order, and ``widths`` apart.

    Boxes that would overlap become one block, whose position is the mean of what its boxes want (the method of least
    squares, by pooling adjacent violators).
    """
    offsets = [0.0]
    for width in widths[:-1]:
        offsets.append(offsets[-1] + width)
    blocks: list[tuple[float, int]] = []
    for value in (want - offset for want, offset in zip(wanted, offsets, strict=True)):
        total, count = value, 1
        while blocks and blocks[-1][0] / blocks[-1][1] >= total / count:
            before, its_count = blocks.pop()
            total, count = total + before, count + its_count
        blocks.append((total, count))
    found = [total / count for total, count in blocks for _ in range(count)]
    return [at + offset for at, offset in zip(found, offsets, strict=True)]


# ---- graphs of workflows ----


@dataclass(frozen=True, slots=True)
class Box:
    """A job in a graph.

    Attributes:
        key: Its full key.
        href: Where its page is.
        name: What is written into it.
        state: Its state.
        title: What is said of it when it is pointed at, and to screen readers.
        below: The keys of the jobs that it waits for.
        left_out: How many more it waits for.
    """

    key: str
    href: str
    name: str
    state: str
    title: str
    below: Sequence[str]
    left_out: int = 0


SIGNS: Final[Mapping[str, str]] = {
    "completed": "✓",
    "failed": "✕",
    "active": "▶",
    "waiting": "○",
    "prioritized": "○",
    "delayed": "◷",
    "waiting-children": "⋯",
}
_RANK: Final = {
    state: rank
    for rank, state in enumerate(
        ("failed", "active", "waiting-children", "waiting", "prioritized", "delayed", "completed")
    )
}

_BOX: Final = (168.0, 44.0)
_TEXT: Final = 19
_MARGIN: Final = 16.0

_BLOCK_GAP: Final = 8.0
_PADDING: Final = 10.0
_SMALL: Final = 40
"""How many boxes a graph has at most, so that it shows each line; in a larger one, even two boxes form a block."""
_ROUNDS: Final = 24
"""How deeply parts are nested at most; deeper ones stay where the layers put them."""
_MANY: Final = 7
"""From how many boxes on also a small graph has blocks."""


@dataclass(slots=True, eq=False)
class _Part:
    """A part of a graph that is placed as one: a box, a stack of parts, or a block of them in a frame.

    Attributes:
        size: Its width and height.
        rank: What the most urgent state in it is.
        key: The key of a box.
        stack: The parts of a stack, from above.
        block: The parts of a block, with their places in it.
    """

    size: tuple[float, float]
    rank: int
    key: str = ""
    stack: list[_Part] = field(default_factory=list)
    block: list[tuple[_Part, float, float]] = field(default_factory=list)

    @classmethod
    def of_box(cls, box: Box) -> _Part:
        return cls(_BOX, _RANK.get(box.state, len(_RANK)), box.key)

    @classmethod
    def of_stack(cls, parts: Sequence[_Part]) -> _Part:
        parts = [one for part in parts for one in (part.stack or [part])]
        width = max(part.size[0] for part in parts)
        height = sum(part.size[1] + LAYER_GAP for part in parts) - LAYER_GAP
        return cls((width, height), min(part.rank for part in parts), stack=parts)

    @classmethod
    def of_block(cls, parts: Sequence[_Part]) -> _Part:
        """Place parts in rows, those with a failed job first, so that the block is about twice as wide as high."""
        parts = sorted(parts, key=lambda part: part.rank)
        area = sum((part.size[0] + _BLOCK_GAP) * (part.size[1] + _BLOCK_GAP) for part in parts)
        most = max(sqrt(2 * area), *(part.size[0] for part in parts))
        x = y = height = width = 0.0
        placed = []
        for part in parts:
            if x and x + part.size[0] > most:
                x, y, height = 0.0, y + height + _BLOCK_GAP, 0.0
            placed.append((part, x + _PADDING, y + _PADDING))
            x, height = x + part.size[0] + _BLOCK_GAP, max(height, part.size[1])
            width = max(width, x - _BLOCK_GAP)
        return cls((width + 2 * _PADDING, y + height + 2 * _PADDING), parts[0].rank, block=placed)

    @property
    def top(self) -> str:
        """The key of the box at its top; ``""`` if there is a block."""
        return self.stack[0].key if self.stack else self.key


_Links = dict[_Part, dict[_Part, None]]


class _Arrangement:
    """Where the boxes of a workflow are; see :func:`arrange`.

    Chains, chords and trees are made of parts in series and parts in parallel, which are found one within the other:
    parts in series become a stack, and parts in parallel, between the same others, a block. What remains is a graph of
    few parts, whose layers can be read even if the workflow has a thousand jobs.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._fewest = _MANY if len(boxes) <= _SMALL else 2
        number = {box.key: at for at, box in enumerate(boxes)}
        wanted = dict.fromkeys((number[box.key], number[key]) for box in boxes for key in box.below if key in number)
        parts = [_Part.of_box(box) for box in boxes]
        self._below: _Links = {part: {} for part in parts}
        self._above: _Links = {part: {} for part in parts}
        for upper, lower in _without_cycles(len(boxes), [edge for edge in wanted if edge[0] != edge[1]]):
            self._below[parts[upper]][parts[lower]] = None
            self._above[parts[lower]][parts[upper]] = None
        for _ in range(_ROUNDS):
            if not (self._make_blocks() or self._make_stacks()):
                break
        self.places: dict[str, Place] = {}
        self.frames: list[Place] = []
        self.lines: list[tuple[str, list[tuple[float, float]]]] = []
        edges = [(upper, lower) for upper, found in self._below.items() for lower in found]
        found, routes = place_in_layers({part: part.size for part in self._below}, edges)
        self.lines += [(lower.top, route) for (_, lower), route in routes.items()]
        for part, place in found.items():
            self._place(part, place.x, place.y)

    def _make_blocks(self) -> bool:
        """Make a block of each set of parts that wait for the same parts, and for which the same parts wait."""
        twins: dict[tuple[frozenset[_Part], frozenset[_Part]], list[_Part]] = {}
        for part in self._below:
            twins.setdefault((frozenset(self._above[part]), frozenset(self._below[part])), []).append(part)
        found = [parts for parts in twins.values() if len(parts) >= self._fewest]
        for parts in found:
            self._replace(parts, _Part.of_block(parts), self._above[parts[0]], self._below[parts[0]])
        return bool(found)

    def _make_stacks(self) -> bool:
        """Make a stack of each chain: parts of which each waits only for the next, and nothing else waits for that."""
        chains = []
        for part in self._below:
            if self._next(part) is None or any(self._next(upper) is part for upper in self._above[part]):
                continue
            chain = [part]
            while (following := self._next(chain[-1])) is not None:
                chain.append(following)
            chains.append(chain)
        for chain in chains:
            self._replace(chain, _Part.of_stack(chain), self._above[chain[0]], self._below[chain[-1]])
        return bool(chains)

    def _next(self, part: _Part) -> _Part | None:
        if len(self._below[part]) != 1:
            return None
        [lower] = self._below[part]
        return lower if len(self._above[lower]) == 1 else None

    def _replace(self, parts: Sequence[_Part], by: _Part, above: Iterable[_Part], below: Iterable[_Part]) -> None:
        self._above[by], self._below[by] = dict.fromkeys(above), dict.fromkeys(below)
        for part in parts:
            for upper in self._above.pop(part):
                if upper in self._below:
                    self._below[upper].pop(part, None)
            for lower in self._below.pop(part):
                if lower in self._above:
                    self._above[lower].pop(part, None)
        for upper in self._above[by]:
            self._below[upper][by] = None
        for lower in self._below[by]:
            self._above[lower][by] = None

    def _place(self, part: _Part, x: float, y: float) -> None:
        todo = [(part, x, y)]
        while todo:  # no recursion, as parts may be nested deeply
            part, x, y = todo.pop()
            width, height = part.size
            if part.key:
                self.places[part.key] = Place(x, y, width, height)
            elif part.block:
                self.frames.append(Place(x, y, width, height))
                todo += [(inner, x + left, y + top) for inner, left, top in part.block]
            middle, top = x + width / 2, y
            for at, inner in enumerate(part.stack):
                if at:
                    self.lines.append((inner.top, [(middle, top - LAYER_GAP), (middle, top)]))
                todo.append((inner, middle - inner.size[0] / 2, top))
                top += inner.size[1] + LAYER_GAP


def arrange(boxes: Sequence[Box]) -> tuple[dict[str, Place], list[Place], list[tuple[str, list[tuple[float, float]]]]]:
    """Place the jobs of a workflow, those that wait above those for which they wait.

    Many jobs between the same others would make a graph too wide to be read: they form a block, with one line.

    Returns:
        The places by key; the frames of blocks, outer ones first; and the lines, each with the key of the job to which
        it leads (``""`` for a block).
    """
    found = _Arrangement(boxes)
    return found.places, found.frames, found.lines


def graph(boxes: Sequence[Box], here: str, label: str) -> Markup:
    """Return the graph of a workflow: boxes with links; arrows lead from a job to those that wait for it.

    ``here`` is the key of the job that is marked.
    """
    places, frames, lines = arrange(boxes)
    width = max(place.x + place.width for place in [*places.values(), *frames]) + 2 * _MARGIN
    height = max(place.y + place.height for place in [*places.values(), *frames]) + 2 * _MARGIN + 14
    states = {box.key: box.state for box in boxes}
    # Not Markup.format for each part: a thousand boxes take 10 ms this way. Only texts and addresses come from outside.
    parts = [
        f'<svg class="graph" width="{width:.0f}" height="{height:.0f}" viewBox="{-_MARGIN:.0f} {-_MARGIN:.0f} '
        f'{width:.0f} {height:.0f}" role="group" aria-label="{escape(label)}"><defs><marker id="arrow" '
        'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto-start-reverse">'
        '<path d="M0 0L8 4L0 8z"/></marker></defs>'
    ]
    parts += [
        f'<rect class="frame" x="{at.x:.0f}" y="{at.y:.0f}" width="{at.width:.0f}" height="{at.height:.0f}" rx="8"/>'
        for at in frames
    ]
    for key, points in lines:
        state = escape(states[key]) if key else "block"
        parts.append(f'<path class="edge from-{state}" d="{_curve(points)}" marker-start="url(#arrow)"/>')
    for box in boxes:
        at, state = places[box.key], escape(box.state)
        sign = SIGNS.get(box.state, "?")
        mark = ' aria-current="true"' if box.key == here else ""
        parts.append(
            f'<a href="{escape(box.href)}" class="job is-{state}" aria-label="{escape(box.title)}"{mark}>'
            f"<title>{escape(box.title)}</title>"
            f'<rect x="{at.x:.0f}" y="{at.y:.0f}" width="{at.width:.0f}" height="{at.height:.0f}" rx="6"/>'
            f'<text class="name" x="{at.x + 10:.0f}" y="{at.y + 18:.0f}">{escape(_cut(box.name, _TEXT))}</text>'
            f'<text x="{at.x + 10:.0f}" y="{at.y + 35:.0f}">{sign} {state}</text></a>'
        )
        if box.left_out:
            parts.append(
                f'<text class="more" x="{at.x + at.width - 10:.0f}" y="{at.y + 35:.0f}">+{box.left_out:,}'
                f"<title>{box.left_out:,} more child jobs, which are not shown</title></text>"
            )
    return Markup("".join([*parts, "</svg>"]))  # noqa: S704 - see above


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length // 2 - 1]}…{text[-(length - length // 2) :]}"


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """Return a path that leaves each point vertically."""
    (x, y), *rest = points
    path = f"M{x:.0f} {y:.0f}"
    for to_x, to_y in rest:
        half = (y + to_y) / 2
        path += f"C{x:.0f} {half:.0f} {to_x:.0f} {half:.0f} {to_x:.0f} {to_y:.0f}"
        x, y = to_x, to_y
    return path
