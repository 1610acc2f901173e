"""How many workers a queue needs: from its minutes in gold, by a model of queues, with the reasons in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from bulltask.clock import Duration, to_ms
from bulltask.errors import ConfigError
from bulltask.lake.formatting import pluralize, significant
from bulltask.lake.log_histogram import mean_and_variance, merge_histograms
from bulltask.lake.queueing import Load, fewest_workers

__all__ = ["Choice", "Recommendation", "recommend"]

Row = Mapping[str, Any]

_BESIDE: Final = 3
"""How many numbers of workers below and above the recommended one are told of."""

_ASSUMPTIONS: Final = (
    "A worker runs one job at a time: a worker process with a concurrency of 8 counts as 8.",
    "Every worker takes every job of these queues, in the order of arrival; within the busiest minute jobs come at"
    " random. Priorities, rate limits, pauses and the mean_and_variance in which workers restart are not in the model.",
    "More workers make no job run longer: what the jobs share (a database, the CPU) has room for them.",
    "A delayed job counts in the minute in which it was added.",
)


@dataclass(frozen=True, slots=True)
class Choice:
    """What to expect of a number of workers in the busiest minute, peak factor included.

    Attributes:
        workers: the number.
        share: part of the attempts, 0 to 1, that wait no longer than asked for; 0 when the queue only grows.
        utilisation: part of the workers that is busy, 0 to 1; 1 when the queue only grows.
    """

    workers: int
    share: float
    utilisation: float


@dataclass(frozen=True, slots=True)
class Recommendation:
    """How many workers, and why.

    Attributes:
        workers: as many that ``share`` of the attempts wait no longer than ``within_s`` in the busiest minute.
        within_s: seconds that an attempt may wait.
        share: part of the attempts that may not wait longer, 0 to 1.
        peak_minute: the first moment of the busiest minute: of that in which the most work arrived.
        attempts_per_s: attempts that arrived in a second of it, on average.
        run_s: seconds that one of them runs, on average.
        load: workers that this keeps busy, times the peak factor.
        choices: what to expect of this and of some other numbers of workers, the fewest first.
        busy_seen: attempts that ran at a time, on average over the minutes given; none without ``capacity_minutes``.
        peak_seen: the most that ran at one moment; none without ``capacity_minutes``.
        reasoning: the way to the number, a sentence or two each.
        assumptions: what must hold for it to be right.
    """

    workers: int
    within_s: float
    share: float
    peak_minute: datetime
    attempts_per_s: float
    run_s: float
    load: float
    choices: tuple[Choice, ...]
    busy_seen: float | None
    peak_seen: int | None
    reasoning: tuple[str, ...]
    assumptions: tuple[str, ...]

    @property
    def expected(self) -> Choice:
        """What to expect of the recommended number."""
        return next(choice for choice in self.choices if choice.workers == self.workers)


def recommend(
    task_minutes: Iterable[Row],
    capacity_minutes: Iterable[Row] = (),
    *,
    within: Duration = 2.0,
    share: float = 0.99,
    peak_factor: float = 1.2,
) -> Recommendation | None:
    """Say how many workers are needed so that jobs do not wait too long.

    Args:
        task_minutes: rows of ``gold.task_minute``, some days of them, of one queue or of all queues that the same
            workers serve. ``run_counts`` may be a mapping or, as Arrow gives it, pairs.
        capacity_minutes: rows of ``gold.capacity_minute`` of the same queues and days, for what was seen.
        within: how long an attempt may wait for a worker (seconds or ``timedelta``).
        share: part of the attempts that may not wait longer, more than 0 and less than 1.
        peak_factor: by how much more may come than in the busiest minute seen, 1 or more.

    Returns:
        The recommendation; none when no job was added, or none of those has run yet.

    Raises:
        ConfigError: an argument is out of its range.
    """
    within_s = to_ms(within, "within") / 1000
    _check(share, peak_factor)
    rows, capacity_minutes = list(task_minutes), list(capacity_minutes)
    tasks = _tasks(rows)
    minutes = _minutes([row for row in rows if row["complete"]], tasks)
    left_out = {row["minute"] for row in rows if not row["complete"]}
    if not minutes:  # better than nothing
        minutes, left_out = _minutes(rows, tasks), set()
    if not minutes:
        return None
    peak = max(minutes.values(), key=lambda minute: (minute.busy_ms, minute.at))
    load = peak.load(peak_factor)
    workers = fewest_workers(load, within_s, share)
    busy, at_most = _by_minute(capacity_minutes, "busy_workers"), _by_minute(capacity_minutes, "peak_workers")
    busy_seen = sum(busy) / len(busy) if busy else None
    peak_seen = max(at_most) if at_most else None
    choices = _choices(load, workers, within_s)
    why = [
        *_load_told(peak, len(minutes), load, peak_factor),
        *_choice_told(choices, workers, within_s, load),
        *_seen_told(len(busy), busy_seen, peak_seen, len(left_out)),
    ]
    return Recommendation(
        workers, within_s, share, peak.at, load.per_s / peak_factor, load.run_s, load.workers, choices, busy_seen,
        peak_seen, tuple(why), _ASSUMPTIONS,
    )  # fmt: skip


def _check(share: float, peak_factor: float) -> None:
    if not 0 < share < 1:
        raise ConfigError(f"share must be more than 0 and less than 1, not {share!r}")
    if not 1 <= peak_factor < 1_000_000:
        raise ConfigError(f"peak_factor must be 1 or more, not {peak_factor!r}")


@dataclass(frozen=True, slots=True)
class _Task:
    """What one job of a task asks for: its attempts, and the mean run in ms and its variance."""

    attempts: float
    mean_ms: float
    variance: float


@dataclass(slots=True)
class _Minute:
    """What arrived in one minute."""

    at: datetime
    jobs: int = 0
    attempts: float = 0.0
    busy_ms: float = 0.0  # that its attempts run, whenever
    squares: float = field(default=0.0)  # of their runs, added up

    def load(self, factor: float) -> Load:
        mean_ms = self.busy_ms / self.attempts
        variation = self.squares / self.attempts / mean_ms**2 - 1 if mean_ms else 0.0
        return Load(self.attempts * factor / 60, mean_ms / 1000, max(variation, 0.0))


def _tasks(rows: list[Row]) -> dict[tuple[Any, Any], _Task]:
    """Tell of each task that has run what a job of it asks for, from all minutes."""
    of_task = defaultdict(list)
    for row in rows:
        of_task[row["queue"], row["name"]].append(row)
    found = {}
    for task, its in of_task.items():
        runs = merge_histograms(row["run_counts"] for row in its)
        last = sum(row["completed"] + row["failed"] for row in its)
        again = sum(row["retried"] + row["stalled"] + row["parked"] for row in its)
        if runs:
            found[task] = _Task((last + again) / last if last else 1.0, *mean_and_variance(runs))
    return found


def _minutes(rows: list[Row], tasks: Mapping[tuple[Any, Any], _Task]) -> dict[datetime, _Minute]:
    """Tell what arrived in each minute in which jobs were added that will run, as far as that is known."""
    minutes: dict[datetime, _Minute] = {}
    for row in rows:
        task = tasks.get((row["queue"], row["name"]))
        if task is None or not row["enqueued"]:
            continue
        minute = minutes.setdefault(row["minute"], _Minute(row["minute"]))
        attempts = row["enqueued"] * task.attempts
        minute.jobs += row["enqueued"]
        minute.attempts += attempts
        minute.busy_ms += attempts * task.mean_ms
        minute.squares += attempts * (task.variance + task.mean_ms**2)
    return minutes


def _by_minute(rows: Iterable[Row], column: str) -> list[Any]:
    """Add up a column of several queues' rows, minute by minute."""
    sums: dict[datetime, Any] = defaultdict(int)
    for row in rows:
        sums[row["minute"]] += row[column]
    return list(sums.values())


def _choices(load: Load, workers: int, within_s: float) -> tuple[Choice, ...]:
    numbers = range(max(workers - _BESIDE, 1), workers + _BESIDE + 1)
    return tuple(Choice(n, 1 - load.late_share(n, within_s), min(load.workers / n, 1.0)) for n in numbers)


def _load_told(peak: _Minute, minutes: int, load: Load, factor: float) -> list[str]:
    seen = peak.load(1.0)
    return [
        f"The busiest of {pluralize(minutes, 'minute')} with new jobs begins {peak.at:%Y-%m-%d %H:%M} UTC:"
        f" {pluralize(peak.jobs, 'job')}, {significant(peak.jobs / 60)} in a second, of"
        f" {pluralize(peak.attempts / peak.jobs, 'attempt', significant)} each.",
        f"An attempt of them runs {_seconds(seen.run_s)} on average: that keeps"
        f" {pluralize(seen.workers, 'worker', significant)} busy all the time.",
        f"With the peak factor {factor:g}, for what comes in bursts and for growth:"
        f" {pluralize(load.workers, 'worker', significant)}.",
    ]


def _choice_told(choices: tuple[Choice, ...], workers: int, within_s: float, load: Load) -> list[str]:
    of = {choice.workers: choice for choice in choices}
    chosen, one_less = of[workers], of.get(workers - 1)
    told = (
        f"With {pluralize(workers, 'worker')}, {_percent(chosen.share)} of the attempts start within"
        f" {_seconds(within_s)}, and {chosen.utilisation:.0%} of the workers are busy"
    )
    if one_less is not None:
        grows = "the queue would only grow" if one_less.utilisation >= 1 else f"it would be {_percent(one_less.share)}"
        told += f"; with {workers - 1:,}, {grows}"
    lines = [f"{told} (Erlang C)."]
    if load.variation > 1:
        lines.append(
            f"Runs vary much (variance {significant(load.variation)} times the square of the mean; 1 is what the model"
            " assumes), so long waits were taken to be longer in proportion."
        )
    return lines


def _seen_told(minutes: int, busy: float | None, peak: int | None, left_out: int) -> list[str]:
    lines = []
    if busy is not None:
        ran = pluralize(busy, "attempt", significant)
        lines.append(f"Seen in {pluralize(minutes, 'minute')}: {ran} ran at a time on average, {peak:,} at most.")
    if left_out:
        lines.append(f"Left out: {pluralize(left_out, 'minute')} with lost events, which may have been busier.")
    return lines


def _seconds(seconds: float) -> str:
    return f"{significant(seconds * 1000)} ms" if seconds < 1 else f"{significant(seconds)} s"


def _percent(share: float) -> str:
    percent = min(share * 100, 99.99)  # what is not all must not look so
    return f"{percent:.4g} %" if percent >= 1 else f"{significant(percent)} %"
