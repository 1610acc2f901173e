"""bulltask and cron-parser 4.9, which BullMQ uses, calculate the same next run of a pattern."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from bulltask.clock import zone_of
from bulltask.errors import ConfigError
from bulltask.schedules.cron import Cron
from tests.interop.node_bridge import NodeBridge

pytestmark = pytest.mark.interop

ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Australia/Sydney")

CHOSEN = """
*/5 * * * * | 0 * * * * | 30 2 * * * | 0 2 * * * | 30 1 * * * | 15 1,2,3 * * * | 0 */2 * * * | */30 */3 * * *
0 9 * * mon-fri | 0 0 1 * * | 0 0 1 * 1 | 0 0 */2 * 1 | 0 0 1-30 * 1 | 0 0 L * * | 0 0 15,L * * | 0 0 * * 5L
0 0 * * friL | 0 0 * * 1#2 | 0 0 1 * 1#2 | */10 * * * * * | 0 30 2 * * * | 0 */15 1-3 * * * | 5/15 * * * *
0 0 29 2 * | 0 12 * * 0,7 | 0 12 * * 5-7 | 0 12 * * 1-7/3 | 0 3 ? * 1 | 0 0 * jan,jul * | @daily | @hourly
@weekly | 12 * * * | * | 0-59/7 0-23/5 * * * | 0 0 31 * * | 59 59 23 31 12 ?
"""
INVALID = "60 * * * * | * 24 * * * | * * 0 * * | */0 * * * * | * * * foo * | 1, * * * * | 5-1 * * * * | 0 0 30 2 *"


def patterns(text: str) -> list[str]:
    return [pattern.strip() for line in text.strip().splitlines() for pattern in line.split("|")]


def random_patterns(rng: random.Random, count: int) -> Iterator[str]:
    """Yield random patterns of 5 and 6 fields."""

    def atom(low: int, high: int) -> str:
        first, last = sorted((rng.randint(low, high), rng.randint(low, high)))
        forms = [
            "*",
            f"*/{rng.randint(2, 15)}",
            f"{first}",
            f"{first}-{last}",
            f"{first}-{last}/{rng.randint(1, 5)}",
        ]
        return rng.choice([*forms, f"{first}/{rng.randint(1, 7)}"])

    def field(low: int, high: int, probability: float = 1.0, special: tuple[str, ...] = ()) -> str:
        if rng.random() > probability:
            return "*"
        if special and rng.random() < 0.2:
            return rng.choice(special)
        return ",".join(atom(low, high) for _ in range(rng.choice([1, 1, 1, 2, 3])))

    for _ in range(count):
        fields = [field(0, 59), field(0, 23), field(1, 31, 0.5, ("L", "?")), field(1, 12, 0.3, ("jan", "feb-may"))]
        fields.append(field(0, 7, 0.5, ("5L", "1#2", "mon-fri", "sun", "?", "1-7")))
        yield " ".join([field(0, 59), *fields] if rng.random() < 0.3 else fields)


def changes(name: str, year: int) -> list[int]:
    """Return the epoch seconds at which the zone's clocks change in a year, and one on an ordinary day."""
    start = int(datetime(year, 1, 1, tzinfo=UTC).timestamp())
    steps = range(start, start + 366 * 86_400, 1800)
    offsets = [datetime.fromtimestamp(second, zone_of(name)).utcoffset() for second in steps]
    moved = [
        second
        for second, (earlier, later) in zip(steps[1:], itertools.pairwise(offsets), strict=True)
        if earlier != later
    ]
    return [*moved, start + 200 * 86_400]


def moments(rng: random.Random, change: int) -> list[int]:
    """Return epoch milliseconds around a change: days, seconds and hours from it."""
    offsets = [
        rng.randint(-30 * 3600, 6 * 3600),
        rng.randint(-5000, 5000),
        rng.choice([-7200, -3600, 0, 1, 3600]),
    ]
    return [(change + seconds) * 1000 + rng.choice([0, 5, 999]) for seconds in offsets]


@pytest.mark.timeout(400)
def test_both_parsers_agree_in_four_zones_around_clock_changes(session_node: NodeBridge, rng: random.Random) -> None:
    times = [(zone, change) for zone in ZONES for change in changes(zone, 2026)]
    cases = [
        (pattern, zone, moment)
        for pattern in patterns(CHOSEN)
        for zone, change in times
        for moment in moments(rng, change)
    ]
    # Node takes milliseconds for a pattern that matches rarely, so each random pattern is checked at a few times only.
    for pattern in random_patterns(rng, 200):
        cases += [(pattern, zone, rng.choice(moments(rng, change))) for zone, change in rng.sample(times, 4)]
    replies = session_node.call("cron.next", cases=cases, timeout=300)
    differ = [
        f"{pattern} in {zone} after {moment}: Node {node_ms}, bulltask {bulltask_ms}"
        for (pattern, zone, moment), node_ms in zip(cases, replies, strict=True)
        if (bulltask_ms := next_of(pattern, zone, moment)) != node_ms
    ]
    assert differ == []
    assert len(cases) > 1900


def test_both_parsers_reject_the_same_patterns(session_node: NodeBridge) -> None:
    cases = [[pattern, "UTC", 0] for pattern in patterns(INVALID)]
    assert set(session_node.call("cron.next", cases=cases)) == {"invalid"}
    assert {next_of(pattern, "UTC", 0) for pattern in patterns(INVALID)} == {"invalid"}


def next_of(pattern: str, zone: str, after_ms: int) -> int | str | None:
    try:
        return Cron.parse(pattern).next_ms(after_ms, zone_of(zone))
    except ConfigError:
        return "invalid"
