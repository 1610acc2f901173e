"""bulltask and cron-parser 4.9, which BullMQ uses, agree on when a pattern fires next."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from bulltask.clock import zone_of
from bulltask.errors import ConfigError
from bulltask.schedule.cron import Cron
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
REFUSED = "60 * * * * | * 24 * * * | * * 0 * * | */0 * * * * | * * * foo * | 1, * * * * | 5-1 * * * * | 0 0 30 2 *"


def patterns(text: str) -> list[str]:
    return [pattern.strip() for line in text.strip().splitlines() for pattern in line.split("|")]


def drawn(chance: random.Random, count: int) -> Iterator[str]:
    """Random patterns of 5 and 6 fields."""

    def atom(low: int, high: int) -> str:
        first, last = sorted((chance.randint(low, high), chance.randint(low, high)))
        forms = [
            "*",
            f"*/{chance.randint(2, 15)}",
            f"{first}",
            f"{first}-{last}",
            f"{first}-{last}/{chance.randint(1, 5)}",
        ]
        return chance.choice([*forms, f"{first}/{chance.randint(1, 7)}"])

    def field(low: int, high: int, kept: float = 1.0, special: tuple[str, ...] = ()) -> str:
        if chance.random() > kept:
            return "*"
        if special and chance.random() < 0.2:
            return chance.choice(special)
        return ",".join(atom(low, high) for _ in range(chance.choice([1, 1, 1, 2, 3])))

    for _ in range(count):
        words = [field(0, 59), field(0, 23), field(1, 31, 0.5, ("L", "?")), field(1, 12, 0.3, ("jan", "feb-may"))]
        words.append(field(0, 7, 0.5, ("5L", "1#2", "mon-fri", "sun", "?", "1-7")))
        yield " ".join([field(0, 59), *words] if chance.random() < 0.3 else words)


def changes(name: str, year: int) -> list[int]:
    """The epoch seconds at which the zone's clocks change in a year, and one of a plain day."""
    start = int(datetime(year, 1, 1, tzinfo=UTC).timestamp())
    steps = range(start, start + 366 * 86_400, 1800)
    offsets = [datetime.fromtimestamp(second, zone_of(name)).utcoffset() for second in steps]
    moved = [second for second, (one, two) in zip(steps[1:], itertools.pairwise(offsets), strict=True) if one != two]
    return [*moved, start + 200 * 86_400]


def moments(chance: random.Random, change: int) -> list[int]:
    """Epoch milliseconds around a change: the day before, the seconds around it, its very hours."""
    away = [
        chance.randint(-30 * 3600, 6 * 3600),
        chance.randint(-5000, 5000),
        chance.choice([-7200, -3600, 0, 1, 3600]),
    ]
    return [(change + seconds) * 1000 + chance.choice([0, 5, 999]) for seconds in away]


@pytest.mark.timeout(400)
def test_both_parsers_agree_in_four_zones_around_clock_changes(session_node: NodeBridge, rng: random.Random) -> None:
    chosen = [*patterns(CHOSEN), *drawn(rng, 150)]
    cases: list[tuple[str, str, int]] = [
        (pattern, zone, moment)
        for zone in ZONES
        for change in changes(zone, 2026)
        for pattern in chosen
        for moment in moments(rng, change)
    ]
    answers = session_node.call("cron.next", cases=cases, timeout=300)
    differ = [
        f"{pattern} in {zone} after {moment}: Node {theirs}, we {ours}"
        for (pattern, zone, moment), theirs in zip(cases, answers, strict=True)
        if (ours := next_of(pattern, zone, moment)) != theirs
    ]
    assert differ == []
    assert len(cases) > 4000


def test_both_parsers_reject_the_same_patterns(session_node: NodeBridge) -> None:
    cases = [[pattern, "UTC", 0] for pattern in patterns(REFUSED)]
    assert set(session_node.call("cron.next", cases=cases)) == {"refused"}
    assert {next_of(pattern, "UTC", 0) for pattern in patterns(REFUSED)} == {"refused"}


def next_of(pattern: str, zone: str, after_ms: int) -> int | str | None:
    try:
        return Cron.parse(pattern).next_ms(after_ms, zone_of(zone))
    except ConfigError:
        return "refused"
