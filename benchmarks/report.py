"""The report: a summary, then for each measurement medians with their range, and ratios computed within a round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["closing_line", "noise", "problems", "ratios", "report", "spread", "summary"]

Rounds = Sequence[Mapping[str, Mapping[str, Mapping[str, Any]]]]
"""For each round: measure, then framework, then the numbers."""

COLUMNS: Mapping[str, Mapping[str, str]] = {
    "throughput": {
        "rate": "jobs/s",
        "worker_us": "worker CPU µs/job",
        "redis_us": "Redis CPU µs/job",
        "pss_mib": "MiB (PSS)",
        "lost": "lost",
        "duplicated": "run twice",
        "other_cpu": "other CPU",
    },
    "single": {"rate": "jobs/s", "redis_us": "Redis CPU µs/job", "other_cpu": "other CPU"},
    "bulk": {"rate": "jobs/s", "redis_us": "Redis CPU µs/job", "other_cpu": "other CPU"},
    "latency": {
        "result_p50_ms": "result p50 ms",
        "result_p99_ms": "p99 ms",
        "task_p50_ms": "task p50 ms",
        "task_p99_ms": "p99 ms",
        "idle_mib": "MiB (PSS)",
        "other_cpu": "other CPU",
    },
    "busy": {"of_ideal": "of ideal", "rate": "jobs/s", "other_cpu": "other CPU"},
    "sleep": {"of_ideal": "of ideal", "rate": "jobs/s", "worker_us": "worker CPU µs/job", "other_cpu": "other CPU"},
}
TITLES = {
    "throughput": "Processing a backlog",
    "single": "Sending one by one",
    "bulk": "Bulk sends",
    "latency": "Time from send to result, and to the end of the task, idle worker",
    "busy": "Jobs that use the CPU for 5 ms",
    "sleep": "Jobs that sleep for 50 ms, 200 at the same time",
}
SUMMARY: Sequence[tuple[str, str, str, int]] = (
    ("backlog of no-op jobs, jobs/s", "throughput", "rate", 0),
    ("worker CPU, µs/job", "throughput", "worker_us", 0),
    ("Redis CPU, µs/job", "throughput", "redis_us", 0),
    ("memory after the backlog, MiB", "throughput", "pss_mib", 0),
    ("sending one by one, jobs/s", "single", "rate", 0),
    ("bulk sends, jobs/s", "bulk", "rate", 0),
    ("send to end of task, p50 ms", "latency", "task_p50_ms", 2),
    ("send to result, p50 ms", "latency", "result_p50_ms", 2),
    ("send to result, p99 ms", "latency", "result_p99_ms", 2),
    ("5 ms of CPU per job, % of ideal", "busy", "of_ideal", 0),
    ("sleeping 50 ms, 200 at once, % of ideal", "sleep", "of_ideal", 0),
)
"""The rows of the summary: label, measure, number, digits."""
BULLTASK, OTHERS = "bulltask", ("celery", "bullmq", "baseline-32")
MAX_OTHER_CPU = 0.1


def report(rounds: Rounds) -> str:
    """Return all tables, and the ratios of bulltask to every other framework."""
    parts = []
    for measure, title in TITLES.items():
        frameworks = [
            framework for framework in rounds[0].get(measure, {}) if _values(rounds, measure, framework, _main(measure))
        ]
        if frameworks:
            parts += [
                f"**{title}**",
                "",
                *_table(rounds, measure, frameworks),
                "",
                *_ratio_lines(rounds, measure, frameworks),
                "",
            ]
    return "\n".join(parts)


def summary(rounds: Rounds) -> str:
    """Return one table of medians, with a column for each framework."""
    frameworks = list(dict.fromkeys(framework for measures in rounds[0].values() for framework in measures))
    rows = [["", *frameworks]]
    for label, measure, name, digits in SUMMARY:
        values = [_values(rounds, measure, framework, name) for framework in frameworks]
        if any(values):
            rows.append([label, *(_median(each, name, digits) for each in values)])
    return "\n".join(_lines(rows))


def _median(values: Sequence[float], name: str, digits: int) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values) * (100 if name == 'of_ideal' else 1):,.{digits}f}"


def closing_line(rounds: Rounds) -> str:
    """Return ``throughput: bulltask N jobs/s, celery M jobs/s, ratio X, bullmq …`` for the measured frameworks."""
    rates = {framework: _values(rounds, "throughput", framework, "rate") for framework in (BULLTASK, *OTHERS)}
    parts = []
    for framework, values in rates.items():
        if values:
            parts.append(f"{framework} {statistics.median(values):,.0f} jobs/s")
        if values and framework != BULLTASK and rates[BULLTASK]:
            parts.append(f"ratio {statistics.median(ratios(rounds, 'throughput', BULLTASK, framework)):.2f}")
    return f"throughput: {', '.join(parts)}" if parts else ""


def problems(rounds: Rounds) -> list[str]:
    """Return a message for each throughput measurement that lost or duplicated a job, or lost a result."""
    messages = []
    for number, measures in enumerate(rounds, 1):
        for framework, result in measures.get("throughput", {}).items():
            stored = result["done"] if result["stored"] is None else result["stored"]
            if result["lost"] or result["duplicated"] or stored != result["done"]:
                messages.append(
                    f"round {number}, {framework}: {result['lost']} jobs lost, {result['duplicated']} run twice; "
                    f"{result['done']} done, {stored} results"
                )
    return messages


def noise(rounds: Rounds) -> str:
    """Return a warning if processes outside the benchmark used too much CPU time; otherwise an empty string."""
    fractions = [
        result["other_cpu"]
        for measures in rounds
        for frameworks in measures.values()
        for result in frameworks.values()
        if "other_cpu" in result
    ]
    highest = max(fractions, default=0.0)
    if highest <= MAX_OTHER_CPU:
        return ""
    return f"noisy: other processes used up to {highest:.0%} of the CPU during a measurement; run it again later"


def ratios(rounds: Rounds, measure: str, framework: str, other: str) -> list[float]:
    """Return the ratio of ``framework`` to ``other`` in each round; for latencies, the inverse ratio."""
    name = _main(measure)
    pairs = []
    for measures in rounds:
        results = measures.get(measure, {})
        if name in results.get(framework, {}) and name in results.get(other, {}):
            value, other_value = results[framework][name], results[other][name]
            pairs.append(other_value / value if name.endswith("_ms") else value / other_value)
    return pairs


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Return ``median (min-max)``, or only the value if all are equal."""
    middle = f"{statistics.median(values):,.{digits}f}"
    if min(values) == max(values):
        return middle
    return f"{middle} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def _main(measure: str) -> str:
    return next(iter(COLUMNS[measure]))


def _values(rounds: Rounds, measure: str, framework: str, name: str) -> list[float]:
    results = (measures.get(measure, {}).get(framework, {}) for measures in rounds)
    return [result[name] for result in results if name in result]


def _table(rounds: Rounds, measure: str, frameworks: Sequence[str]) -> list[str]:
    columns = COLUMNS[measure]
    cells = [["", *columns.values()]]
    cells += [
        [framework, *(_cell(_values(rounds, measure, framework, name), name) for name in columns)]
        for framework in frameworks
    ]
    return _lines(cells)


def _lines(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [f"| {' | '.join(_align(row, widths))} |" for row in cells]
    return [lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]]


def _align(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))]


def _cell(values: Sequence[float], name: str) -> str:
    if name in {"lost", "duplicated"}:
        return f"{sum(values):.0f}"  # the sum of all rounds, because a median would hide a problem in only one of them
    if name == "other_cpu":
        return f"{max(values):.0%}"
    if name == "of_ideal":
        return f"{spread([value * 100 for value in values], 1)}%"
    return spread(values, 2 if name.endswith("_ms") else 0)


def _ratio_lines(rounds: Rounds, measure: str, frameworks: Sequence[str]) -> list[str]:
    if BULLTASK not in frameworks:
        return []
    others = [framework for framework in frameworks if framework != BULLTASK]
    lines = []
    for framework in others:
        names = f"{framework} : {BULLTASK}" if measure == "latency" else f"{BULLTASK} : {framework}"
        lines.append(f"{names} = {spread(ratios(rounds, measure, BULLTASK, framework), 2)}")
    return lines
