"""bulltask and cron-parser 4.9, which BullMQ uses, calculate the same next run of a pattern."""

from __future__ import annotations

import itertools
import random
import re
import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bulltask.errors import ConfigError
from bulltask.jobs.clock import zone_of
from bulltask.jobs.cron import Cron
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
    zone = zone_of(name)
    offsets = [datetime.fromtimestamp(start + day * 86_400, zone).utcoffset() for day in range(367)]
    days = [day for day, (earlier, later) in enumerate(itertools.pairwise(offsets)) if earlier != later]
    steps = [start + day * 86_400 + half * 1800 for day in days for half in range(1, 49)]
    moved = [
        step
        for step in steps
        if datetime.fromtimestamp(step, zone).utcoffset() != datetime.fromtimestamp(step - 1800, zone).utcoffset()
    ]
    return [*moved, start + 200 * 86_400]


def changes_of(name: str) -> list[tuple[datetime, datetime]]:
    """Return the local times at which a zone's clocks change in 2026, by the clocks before and after."""
    zone = zone_of(name)
    return [
        (datetime.fromtimestamp(second - 1, zone) + timedelta(seconds=1), datetime.fromtimestamp(second, zone))
        for second in changes(name, 2026)[:-1]
    ]


def kind_of(change: tuple[datetime, datetime]) -> tuple[int, int, float]:
    before, after = change
    return before.hour, before.minute, (after.replace(tzinfo=None) - before.replace(tzinfo=None)).total_seconds()


def moments(rng: random.Random, change: int) -> list[int]:
    """Return epoch milliseconds around a change: days, seconds and hours from it.

    None is in the hour after it: cron-parser, asked then, does not know that the clocks have changed.
    """
    offsets = [
        rng.choice([rng.randint(-30 * 3600, -1), rng.randint(3600, 6 * 3600)]),
        rng.choice([rng.randint(-5000, -1), rng.randint(3600, 5000)]),
        rng.choice([-7200, -3600, -1, 3600]),
    ]
    return [(change + seconds) * 1000 + rng.choice([0, 5, 999]) for seconds in offsets]


def test_the_parsers_differ_only_in_the_zones_that_the_documentation_lists(session_node: NodeBridge) -> None:
    alike: dict[frozenset[tuple[int, int, float]], list[str]] = {}  # zones that change their clocks in the same way
    for name in sorted(zoneinfo.available_timezones() - {"localtime"}):
        alike.setdefault(frozenset(map(kind_of, changes_of(name))), []).append(name)
    cases: list[tuple[str, str, int]] = []
    for zones in alike.values():
        for before, after in changes_of(zones[0]):
            first = min(before, after).replace(tzinfo=None) - timedelta(minutes=30)
            minutes = [first + timedelta(minutes=30 * half) for half in range(7)]
            since = (round(before.timestamp()) - 30 * 3600) * 1000
            cases += [(f"{minute.minute} {minute.hour} * * *", zones[0], since) for minute in minutes]
    differing: set[str] = set()
    for _ in range(3):  # each compares the next time
        replies = session_node.call("cron.next", cases=cases, timeout=300)
        ours = [next_of(*case) for case in cases]
        differing |= {
            zone for (_, zone, _), node_ms, our_ms in zip(cases, replies, ours, strict=True) if our_ms != node_ms
        }
        cases = [
            (pattern, zone, our_ms)
            for (pattern, zone, _), our_ms in zip(cases, ours, strict=True)
            if isinstance(our_ms, int)
        ]
    page = (Path(__file__).parents[2] / "docs/how-to/schedules.md").read_text()
    listed = set(re.findall("`([A-Z][a-z]+/[A-Za-z_]+)`", page.partition("## Use with Node.js")[2]))
    assert {zones[0] for zones in alike.values() if listed.intersection(zones)} == differing


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
