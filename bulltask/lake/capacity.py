"""Recommend a concurrency for queues, from gold tables and a queueing model, and explain the calculation.

The model of how long jobs wait for a slot is M/M/c (Erlang C): jobs arrive at random, one by one, and the next free
slot takes the job that has waited longest. The results match textbook tables.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Final

from bulltask.jobs.clock import Duration, to_ms
from bulltask.jobs.errors import ConfigError
from bulltask.lake.formatting import Unit, format_value, pluralize
from bulltask.lake.log_histogram import mean_and_variance, merge_histograms
from bulltask.lake.records import Row


@dataclass(frozen=True, slots=True)
class Load:
    """The load on the slots.

    Attributes:
        per_s: The number of attempts that arrive per second.
        run_s: Their mean run time in seconds.
        variation: The squared coefficient of variation of the run times: variance / mean². It is 1 for exponential run
            times, for which the model is exact.
    """

    per_s: float
    run_s: float
    variation: float = 1.0

    @property
    def busy_slots(self) -> float:
        """The mean number of busy slots, in erlangs; with no more slots than that, the queue grows without bound."""
        return self.per_s * self.run_s

    def late_fraction(self, slots: int, max_wait_s: float) -> float:
        """Return the fraction of attempts, 0 to 1, that wait longer than ``max_wait_s`` seconds.

        Run times that vary more than exponential ones make long waits longer in proportion (heavy-traffic approximation
        of M/G/c); those that vary less are treated as exponential, which errs on the safe side.
        """
        spare = slots - self.busy_slots
        if spare <= 0:
            return 1.0
        spread = max(1.0, (1 + self.variation) / 2)
        decay = math.exp(-spare * max_wait_s / (self.run_s * spread)) if self.run_s else float(max_wait_s == 0)
        return waiting_probability(slots, self.busy_slots) * decay


def waiting_probability(slots: int, load: float) -> float:
    """Return the probability that an attempt must wait because all slots are busy: the Erlang C formula.

    ``load`` is the mean number of busy slots, in erlangs.
    """
    if load >= slots:
        return 1.0
    blocked = 1.0  # the Erlang B formula, one slot at a time: the factorials cancel out
    for count in range(1, slots + 1):
        blocked = load * blocked / (count + load * blocked)
    return slots * blocked / (slots - load * (1 - blocked))


def min_slots(load: Load, max_wait_s: float, target: float) -> int:
    """Return the minimum number of slots at which ``target`` of the attempts wait at most ``max_wait_s`` seconds."""
    low = math.floor(load.busy_slots)  # too few
    high = low + 1
    while load.late_fraction(high, max_wait_s) > 1 - target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if load.late_fraction(middle, max_wait_s) > 1 - target else (low, middle)
    return high


_number: Final = partial(format_value, unit=Unit.NUMBER)

_NEIGHBORS: Final = 3
"""How many lower and higher values are listed next to the recommended concurrency."""

_ASSUMPTIONS: Final = (
    "A slot runs one job at a time. A worker has one slot per child (--concurrency) for sync tasks, and up to"
    " --concurrency times --async-concurrency slots for async tasks.",
    "Every slot runs jobs of all these queues, in order of arrival. Jobs arrive at random within the busiest minute."
    " Priorities, rate limits, pauses and worker restarts are not part of the model.",
    "More slots do not slow jobs down: what the jobs share (a database, the CPU) has enough capacity.",
    "A delayed job counts in the minute in which it was added.",
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The expected effect of a concurrency in the busiest minute, including the peak factor.

    Attributes:
        concurrency: The number of slots, across all workers.
        in_time: The fraction of attempts, 0 to 1, that start in time; 0 if the queue grows without bound.
        utilization: The fraction of slots that are busy, 0 to 1; 1 if the queue grows without bound.
    """

    concurrency: Annotated[int, "Concurrency", Unit.COUNT]
    in_time: Annotated[float, "Start within target", Unit.FRACTION]
    utilization: Annotated[float, "Utilization", Unit.FRACTION]


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommended concurrency, with its reasoning.

    Attributes:
        concurrency: The minimum number of slots, across all workers, at which ``target`` of the attempts wait at most
            ``max_wait_s`` in the busiest minute.
        max_wait_s: The longest wait that meets the target, in seconds.
        target: The target fraction of attempts, 0 to 1.
        peak_minute: The start of the busiest minute, in which the most work arrived.
        load: The load in that minute, times the peak factor.
        estimates: The effect of this and other values of the concurrency, in ascending order.
        reasoning: How the number was computed, in sentences.
        assumptions: The assumptions of the model.
    """

    concurrency: int
    max_wait_s: float
    target: float
    peak_minute: datetime
    load: Load
    estimates: tuple[Estimate, ...]
    reasoning: tuple[str, ...]
    assumptions: tuple[str, ...]

    @property
    def expected(self) -> Estimate:
        """The effect of the recommended concurrency."""
        return next(estimate for estimate in self.estimates if estimate.concurrency == self.concurrency)


def recommend(
    task_minutes: Iterable[Row],
    capacity_minutes: Iterable[Row] = (),
    *,
    max_wait: Duration = 2.0,
    target: float = 0.99,
    peak_factor: float = 1.2,
) -> Recommendation | None:
    """Recommend the minimum concurrency at which jobs do not wait too long.

    Args:
        task_minutes: Rows of ``gold.task_minute`` for some days, of one queue or of all queues that the same workers
            process. ``run_histogram_ms`` may be a mapping or, as Arrow returns it, pairs.
        capacity_minutes: Rows of ``gold.capacity_minute`` for the same queues and days.
        max_wait: How long an attempt may wait for a worker (seconds or ``timedelta``).
        target: The fraction of attempts that wait no longer, between 0 and 1 (exclusive).
        peak_factor: Safety factor on the load of the busiest minute, at least 1.

    Returns:
        The recommendation; ``None`` if no jobs were added, or no job has run yet.

    Raises:
        ConfigError: An argument is out of range.
    """
    max_wait_s = to_ms(max_wait, "max_wait") / 1000
    if not 0 < target < 1:
        raise ConfigError(f"target must be more than 0 and less than 1, not {target!r}")
    if not 1 <= peak_factor < 1_000_000:
        raise ConfigError(f"peak_factor must be 1 or more, not {peak_factor!r}")
    rows = list(task_minutes)
    tasks = _tasks(rows)
    minutes = _minutes([row for row in rows if row["complete"]], tasks)
    incomplete = {row["minute"] for row in rows if not row["complete"]}
    if not minutes:  # incomplete minutes are better than no minutes
        minutes, incomplete = _minutes(rows, tasks), set()
    if not minutes:
        return None
    peak = max(minutes.values(), key=lambda minute: (minute.busy_ms, minute.at))
    load = peak.load(peak_factor)
    concurrency = min_slots(load, max_wait_s, target)
    numbers = range(max(concurrency - _NEIGHBORS, 1), concurrency + _NEIGHBORS + 1)
    estimates = tuple(
        Estimate(number, 1 - load.late_fraction(number, max_wait_s), min(load.busy_slots / number, 1.0))
        for number in numbers
    )
    reasoning = (
        *_explain_load(peak, len(minutes), load, peak_factor),
        *_explain_estimates(estimates, concurrency, max_wait_s, load),
        *_explain_observed(list(capacity_minutes), len(incomplete)),
    )
    return Recommendation(concurrency, max_wait_s, target, peak.at, load, estimates, reasoning, _ASSUMPTIONS)


_Work = tuple[float, float, float]
"""The work of a task's average job: attempts, and the mean and variance of their run times in ms."""


@dataclass(slots=True)
class _Minute:
    """The work that arrived in one minute."""

    at: datetime
    jobs: int = 0
    attempts: float = 0.0
    busy_ms: float = 0.0  # total run time of its attempts, whenever they run
    squares: float = 0.0  # sum of the squares of the run times

    def load(self, factor: float) -> Load:
        mean_ms = self.busy_ms / self.attempts
        variation = self.squares / self.attempts / mean_ms**2 - 1 if mean_ms else 0.0
        return Load(self.attempts * factor / 60, mean_ms / 1000, max(variation, 0.0))


def _tasks(rows: list[Row]) -> dict[tuple[Any, Any], _Work]:
    """Return the work of an average job for each task that has run, from all minutes."""
    by_task = defaultdict(list)
    for row in rows:
        by_task[row["queue"], row["name"]].append(row)
    tasks = {}
    for task, task_rows in by_task.items():
        runs = merge_histograms(row["run_histogram_ms"] for row in task_rows)
        final = sum(row["completed"] + row["failed"] for row in task_rows)
        repeated = sum(row["requeued"] + row["stalled"] + row["waiting_children"] for row in task_rows)
        if runs:
            tasks[task] = (final + repeated) / final if final else 1.0, *mean_and_variance(runs)
    return tasks


def _minutes(rows: list[Row], tasks: Mapping[tuple[Any, Any], _Work]) -> dict[datetime, _Minute]:
    """Return the work that arrived in each minute, for tasks whose work is known."""
    minutes: dict[datetime, _Minute] = {}
    for row in rows:
        if row["added"] and (task := tasks.get((row["queue"], row["name"]))) is not None:
            attempts, mean_ms, variance = row["added"] * task[0], *task[1:]
            minute = minutes.setdefault(row["minute"], _Minute(row["minute"]))
            minute.jobs += row["added"]
            minute.attempts += attempts
            minute.busy_ms += attempts * mean_ms
            minute.squares += attempts * (variance + mean_ms**2)
    return minutes


def _explain_load(peak: _Minute, minutes: int, load: Load, factor: float) -> list[str]:
    observed = peak.load(1.0)
    return [
        f"The busiest of {pluralize(minutes, 'minute')} with new jobs begins at {peak.at:%Y-%m-%d %H:%M} UTC:"
        f" {pluralize(peak.jobs, 'job')} ({_number(peak.jobs / 60)} per second) with"
        f" {pluralize(peak.attempts / peak.jobs, 'attempt', _number)} each.",
        f"An attempt runs for {format_value(observed.run_s, Unit.SECONDS)} on average, which keeps"
        f" {pluralize(observed.busy_slots, 'slot', _number)} busy all the time.",
        f"Multiplied by the peak factor {factor:g}, for bursts and growth, this is"
        f" {pluralize(load.busy_slots, 'slot', _number)}.",
    ]


def _explain_estimates(estimates: tuple[Estimate, ...], concurrency: int, max_wait_s: float, load: Load) -> list[str]:
    by_concurrency = {estimate.concurrency: estimate for estimate in estimates}
    chosen, fewer = by_concurrency[concurrency], by_concurrency.get(concurrency - 1)
    in_time = format_value(min(chosen.in_time, 0.9999), Unit.FRACTION)  # it is never 100%
    max_wait = format_value(max_wait_s, Unit.SECONDS)
    text = (
        f"With {pluralize(concurrency, 'slot')}, {in_time} of the attempts start within {max_wait}, and"
        f" {chosen.utilization:.0%} of the slots are busy"
    )
    if fewer is not None:
        in_time = format_value(fewer.in_time, Unit.FRACTION)
        effect = "the queue would grow without bound" if fewer.utilization >= 1 else f"it would be {in_time}"
        text += f"; with {concurrency - 1:,}, {effect}"
    lines = [f"{text} (Erlang C)."]
    if load.variation > 1:
        lines.append(
            f"Run times vary widely (the variance is {_number(load.variation)} times the square of the mean; the"
            " model assumes 1), so the estimates of long waits were increased in proportion."
        )
    return lines


def _explain_observed(rows: list[Row], incomplete: int) -> list[str]:
    lines = []
    if rows:
        busy, peak = defaultdict[datetime, float](float), defaultdict[datetime, int](int)  # of all queues
        for row in rows:
            busy[row["minute"]] += row["busy_slots"]
            peak[row["minute"]] += row["peak_slots"]
        mean = pluralize(sum(busy.values()) / len(busy), "busy slot", _number)
        minutes = pluralize(len(busy), "minute")
        lines.append(f"Observed in {minutes}: {mean} on average, {max(peak.values()):,} at most.")
    if incomplete:
        lines.append(f"Not counted: {pluralize(incomplete, 'minute')} with lost events, which may have been busier.")
    return lines
