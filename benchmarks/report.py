"""From measurements to text: medians with their range, and ratios taken pair by pair within a round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["closing_line", "noise", "problems", "ratios", "report", "spread"]

Rounds = Sequence[Mapping[str, Mapping[str, Mapping[str, Any]]]]
"""For each round: measure, then peer, then the numbers."""

COLUMNS: Mapping[str, Mapping[str, str]] = {
    "drain": {
        "rate": "jobs/s",
        "worker_us": "worker CPU µs/job",
        "redis_us": "Redis CPU µs/job",
        "lost": "lost",
        "duplicated": "run twice",
        "foreign": "CPU of others",
    },
    "single": {"rate": "jobs/s", "redis_us": "Redis CPU µs/job", "foreign": "CPU of others"},
    "bulk": {"rate": "jobs/s", "redis_us": "Redis CPU µs/job", "foreign": "CPU of others"},
    "latency": {"p50_ms": "p50 ms", "p95_ms": "p95 ms", "p99_ms": "p99 ms", "foreign": "CPU of others"},
}
TITLES = {
    "drain": "Drain of a filled queue",
    "single": "Sending one by one",
    "bulk": "Sending many at once",
    "latency": "From send to result in hand, idle worker",
}
US, OTHERS = "bulltask", ("celery", "bullmq")
MOST_NOISE = 0.1


def report(rounds: Rounds) -> str:
    """All tables, and the ratios to each other peer."""
    parts = []
    for measure, title in TITLES.items():
        peers = [peer for peer in rounds[0].get(measure, {}) if _values(rounds, measure, peer, _main(measure))]
        if peers:
            parts += [
                f"**{title}**",
                "",
                *_table(rounds, measure, peers),
                "",
                *_ratio_lines(rounds, measure, peers),
                "",
            ]
    return "\n".join(parts)


def closing_line(rounds: Rounds) -> str:
    """``drain: bulltask N jobs/s, celery M jobs/s, ratio X, bullmq …``, as far as it was measured."""
    rates = {peer: _values(rounds, "drain", peer, "rate") for peer in (US, *OTHERS)}
    parts = []
    for peer, found in rates.items():
        if found:
            parts.append(f"{peer} {statistics.median(found):,.0f} jobs/s")
        if found and peer != US and rates[US]:
            parts.append(f"ratio {statistics.median(ratios(rounds, 'drain', US, peer)):.2f}")
    return f"drain: {', '.join(parts)}" if parts else ""


def problems(rounds: Rounds) -> list[str]:
    """Every drain that lost a job, ran one twice, or lost a result."""
    found = []
    for number, measures in enumerate(rounds, 1):
        for peer, result in measures.get("drain", {}).items():
            stored = result["done"] if result["stored"] is None else result["stored"]
            if result["lost"] or result["duplicated"] or stored != result["done"]:
                found.append(
                    f"round {number}, {peer}: {result['lost']} jobs lost, {result['duplicated']} run twice; "
                    f"{result['done']} done, {stored} results"
                )
    return found


def noise(rounds: Rounds) -> str:
    """A warning when processes outside the benchmark had a good part of the machine; empty when they had not."""
    shares = [
        result["foreign"]
        for measures in rounds
        for peers in measures.values()
        for result in peers.values()
        if "foreign" in result
    ]
    worst = max(shares, default=0.0)
    if worst <= MOST_NOISE:
        return ""
    return (
        f"noisy: other processes had up to {worst:.0%} of the CPU during a measurement; run it again when they are done"
    )


def ratios(rounds: Rounds, measure: str, ours: str, other: str) -> list[float]:
    """How many times better ``ours`` was, round by round; for times the smaller one is better."""
    name = _main(measure)
    pairs = []
    for measures in rounds:
        results = measures.get(measure, {})
        if name in results.get(ours, {}) and name in results.get(other, {}):
            one, two = results[ours][name], results[other][name]
            pairs.append(one / two if name == "rate" else two / one)
    return pairs


def spread(values: Sequence[float], digits: int = 0) -> str:
    """``median (min-max)``; just the value where there is one only."""
    middle = f"{statistics.median(values):,.{digits}f}"
    if min(values) == max(values):
        return middle
    return f"{middle} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def _main(measure: str) -> str:
    return next(iter(COLUMNS[measure]))


def _values(rounds: Rounds, measure: str, peer: str, name: str) -> list[float]:
    results = (measures.get(measure, {}).get(peer, {}) for measures in rounds)
    return [result[name] for result in results if name in result]


def _table(rounds: Rounds, measure: str, peers: Sequence[str]) -> list[str]:
    columns = COLUMNS[measure]
    cells = [["", *columns.values()]]
    cells += [[peer, *(_cell(_values(rounds, measure, peer, name), name) for name in columns)] for peer in peers]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [f"| {' | '.join(_aligned(row, widths))} |" for row in cells]
    return [lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))]


def _cell(values: Sequence[float], name: str) -> str:
    if name in {"lost", "duplicated"}:
        return f"{sum(values):.0f}"  # of all rounds: a median would hide one
    if name == "foreign":
        return f"{max(values):.0%}"
    return spread(values, 2 if name.endswith("_ms") else 0)


def _ratio_lines(rounds: Rounds, measure: str, peers: Sequence[str]) -> list[str]:
    if US not in peers:
        return []
    others = [peer for peer in peers if peer != US]
    return [f"{US} : {peer} = {spread(ratios(rounds, measure, US, peer), 2)}" for peer in others]
