"""Pictures of the dashboard: charts, and the layout of graphs."""

from __future__ import annotations

import re
from itertools import combinations
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import Markup

from bulltask.dashboard.drawings import Box, Line, Place, arrange, bar, chart, graph, place_in_layers, sparkline

pytestmark = pytest.mark.redis

SIZES = st.tuples(st.sampled_from([10.0, 40.0, 168.0, 900.0]), st.sampled_from([10.0, 44.0, 300.0]))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[dict[int, tuple[float, float]], list[tuple[int, int]]]:
    """Return boxes with sizes, and edges, which may close circles."""
    count = draw(st.integers(1, 14))
    numbers = st.integers(0, count - 1)
    return (
        dict(enumerate(draw(st.lists(SIZES, min_size=count, max_size=count)))),
        draw(st.lists(st.tuples(numbers, numbers), max_size=30)),
    )


def overlaps(one: Place, other: Place) -> bool:
    """Whether two boxes overlap; those that touch by a rounding error do not."""
    across = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
    down = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
    return across > 0.01 and down > 0.01


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_boxes_do_not_overlap_and_lines_lead_down(
    drawn: tuple[dict[int, tuple[float, float]], list[tuple[int, int]]],
) -> None:
    sizes, edges = drawn
    places, routes = place_in_layers(sizes, edges)
    assert set(places) == set(sizes)
    assert all((place.width, place.height) == sizes[box] for box, place in places.items())
    assert min(place.y for place in places.values()) == 0 <= min(place.x for place in places.values())
    assert not any(overlaps(one, other) for one, other in combinations(places.values(), 2))
    assert set(routes) <= set(edges)
    for (upper, lower), points in routes.items():
        assert places[upper].y + places[upper].height < places[lower].y
        assert points[0] == (places[upper].x + places[upper].width / 2, places[upper].y + places[upper].height)
        assert points[-1] == (places[lower].x + places[lower].width / 2, places[lower].y)
        assert [y for _, y in points] == sorted(y for _, y in points)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=25))
def test_a_tree_has_no_crossings_and_all_of_its_edges(parents: list[int]) -> None:
    edges = [(min(parent, child), child + 1) for child, parent in enumerate(parents)]
    _, routes = place_in_layers(dict.fromkeys(range(len(parents) + 1), (20.0, 20.0)), edges)
    assert set(routes) == set(edges)
    for ((a, b), (c, d)), one, other in (
        ((one, other), routes[one], routes[other]) for one, other in combinations(routes, 2)
    ):
        if one[0][1] == other[0][1] and a != c and b != d:
            assert (one[0][0] - other[0][0]) * (one[-1][0] - other[-1][0]) > 0


def boxes_of(edges: dict[str, list[str]], state: str = "waiting") -> list[Box]:
    """Return boxes that wait for others."""
    return [Box(key, f"/{key}", f"task {key}", state, f"task {key}", below) for key, below in edges.items()]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 12), max_size=12), min_size=1, max_size=30), st.booleans())
def test_a_job_is_above_those_that_it_waits_for_also_in_blocks(steps: list[list[int]], is_large: bool) -> None:
    edges = {str(at): [str(at + step) for step in found] for at, found in enumerate(steps)}
    edges |= {f"other {at}": [] for at in range(50)} if is_large else {}
    places, frames, lines = arrange(boxes_of(edges))
    assert set(places) == set(edges)
    assert not any(overlaps(one, other) for one, other in combinations(places.values(), 2))
    for upper, found in edges.items():
        for lower in found:
            if lower in places:
                assert places[upper].y + places[upper].height < places[lower].y
    for frame in frames:
        inside = [place for place in places.values() if overlaps(place, frame)]
        assert all(frame.x < place.x and place.x + place.width < frame.x + frame.width for place in inside)
    for _, route in lines:
        assert [y for _, y in route] == sorted(y for _, y in route)


def canvas(parts: int, length: int) -> dict[str, list[str]]:
    """Return the jobs of a step, then a group of chains, then a step that waits for them all."""
    edges = {"end": [f"{part}.0" for part in range(parts)], "start": []}
    for part in range(parts):
        edges |= {f"{part}.{at}": [f"{part}.{at + 1}"] for at in range(length - 1)}
        edges[f"{part}.{length - 1}"] = ["start"]
    return edges


@pytest.mark.parametrize(("parts", "length"), [(998, 1), (200, 5), (8, 3)])
def test_a_group_of_many_chains_fills_a_block_that_can_be_read(parts: int, length: int) -> None:
    places, [frame], lines = arrange(boxes_of(canvas(parts, length)))
    assert len(places) == parts * length + 2
    assert 0.7 < frame.width / frame.height < 4
    assert places["end"].y < frame.y
    assert frame.y + frame.height < places["start"].y
    assert len(lines) == parts * (length - 1) + 2


def test_a_small_group_has_a_line_for_each_job() -> None:
    _, frames, lines = arrange(boxes_of(canvas(4, 2)))
    assert not frames
    assert len(lines) == 12


def test_a_thousand_jobs_that_one_waits_for_fill_a_block_that_can_be_read() -> None:
    places, [frame], lines = arrange(
        boxes_of({"top": [f"{at}" for at in range(1_000)], **{f"{at}": [] for at in range(1_000)}})
    )
    assert len(places) == 1_001
    assert 1 < frame.width / frame.height < 3
    assert [key for key, _ in lines] == [""]


def test_a_long_chain_does_not_exceed_the_recursion_limit() -> None:
    places, _, lines = arrange(boxes_of({str(at): [str(at + 1)] for at in range(3_000)}))
    assert len(places) == 3_000
    assert len(lines) == 2_999
    assert {place.x for place in places.values()} == {0.0}


def parsed(picture: Markup) -> ElementTree.Element:
    """Return a picture, which must be well-formed, and must not contain a style or script."""
    assert not re.search(r"style\s*=|<script|\son\w+=", picture)
    return ElementTree.fromstring(f"<all>{picture}</all>")


HOSTILE = '"><script>alert(1)</script>&<b style="x">'


def test_hostile_texts_do_nothing_in_a_picture() -> None:
    box = Box(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, [HOSTILE], 3)
    for picture in (
        graph([box], HOSTILE, HOSTILE),
        chart(HOSTILE, HOSTILE, [0, 1000], [Line(HOSTILE, [1, 2]), Line("b", [2, None])]),
        sparkline([1, 2], HOSTILE),
        bar(0, 1, HOSTILE, HOSTILE),
    ):
        assert "<script" not in picture
        assert 'b style="x"' not in picture
        ElementTree.fromstring(f"<all>{picture}</all>")


def test_each_job_is_a_link_that_says_its_state_without_colour() -> None:
    states = ["failed", "completed", "active", "waiting", "delayed", "waiting-children", "unheard-of"]
    boxes = [Box(state, f"/{state}", "shop.add", state, f"shop.add, {state}", [], 0) for state in states]
    links = parsed(graph(boxes, "failed", "w")).findall(".//a")
    assert [link.get("href") for link in links] == [f"/{state}" for state in states]
    texts = ["".join(text.text or "" for text in link.findall("text")) for link in links]
    assert [text.removeprefix("shop.add") for text in texts] == [
        "✕ failed", "✓ completed", "▶ active", "○ waiting", "◷ delayed", "⋯ waiting-children", "? unheard-of",
    ]  # fmt: skip
    assert [link.get("aria-current") for link in links] == ["true", *[None] * 6]


def test_a_chart_has_axes_with_units_and_its_values_as_texts_and_as_a_table() -> None:
    times = [1_700_000_000_000 + 60_000 * at for at in range(5)]
    picture = parsed(chart("Oldest", "s", times, [Line("mail", [0, 60, 150, None, 7_200]), Line("none", [None] * 5)]))
    axis = [text.text for text in picture.findall(".//text")]
    assert axis == ["0 h", "0.5 h", "1 h", "1.5 h", "2 h", "4 min ago", "2 min ago", "now"]
    hints = [title.text for title in picture.findall(".//g/title")]
    assert hints[0] == "4 min ago: mail: 0 s"
    assert hints[2:] == ["2 min ago: mail: 2.5 min", "60 s ago: mail: ?", "now: mail: 2 h"]
    rows = ["".join(row.itertext()) for row in picture.findall(".//tbody/tr")]
    assert rows[0] == "2023-11-14 22:17:202 h"
    assert len(rows) == 5
    assert len(picture.findall(".//path[@class='line line0']")) == 2, "an unknown value is a gap"


@pytest.mark.parametrize("values", [[], [3.0], [0.0, 0.0], [1e12, 0.5], [1e-9, 1e-8]])
def test_charts_and_lines_of_few_or_extreme_values_are_drawn(values: list[float]) -> None:
    parsed(sparkline(values, "waiting"))
    times = [1_000.0 * at for at in range(len(values))]
    for unit in ("s", "jobs", "/s"):
        parsed(chart("t", unit, times, [Line("a", values)]))


def test_a_chart_of_zeros_has_an_axis_to_one() -> None:
    for unit, last in (("s", "1 s"), ("/s", "1 /s"), ("jobs", "1")):
        axis = [text.text for text in parsed(chart("t", unit, [0, 1_000], [Line("a", [0, 0])])).findall(".//text")]
        assert axis[-4] == last
