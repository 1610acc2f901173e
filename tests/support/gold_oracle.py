"""The gold tables, computed row by row in plain Python from their definitions, and random histories."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any

from bulltask.lake.log_histogram import bucket_of
from bulltask.lake.slo_config import SLOConfig

__all__ = ["History", "Oracle", "random_history"]

Row = dict[str, Any]
MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
COUNTER_OF_OUTCOME = {
    "completed": "completed", "failed": "failed", "requeued": "requeued", "stalled": "stalled",
    "waiting-children": "waiting_children", "released": "released",
}  # fmt: skip


@dataclass
class History:
    """Rows of bronze and silver; only the latest row of each key."""

    added: list[Row] = field(default_factory=list)
    attempts: list[Row] = field(default_factory=list)
    jobs: list[Row] = field(default_factory=list)
    gaps: list[Row] = field(default_factory=list)


def ms(length: timedelta) -> int:
    return length // timedelta(milliseconds=1)


def minute_of(at: datetime) -> datetime:
    return at.replace(second=0, microsecond=0)


def day_of(at: datetime) -> str:
    return at.strftime("%Y-%m-%d")


def overlap(row: Row, start: datetime, length: timedelta) -> int:
    """Return how many milliseconds of a minute or a day an attempt ran."""
    started, ended, end = row["started_at"], row["ended_at"], start + length
    if started is None or ended is None or ended <= start or started >= end:
        return 0
    return max(ms(min(ended, end) - max(started, start)), 0)


def steps_of(row: Row) -> Iterable[datetime]:
    """Yield the minutes in which an attempt ran, even if it took no time."""
    if row["started_at"] is not None and row["ended_at"] is not None:
        step = minute_of(row["started_at"])
        while step <= row["ended_at"]:
            yield step
            step += MINUTE


def overlapping_gaps(gaps: list[Row], queue: str, start: datetime, length: timedelta) -> list[Row]:
    """Return the gaps of a queue that overlap a minute or a day."""
    overlapping = []
    for gap in gaps:
        until = gap["first_at_after"] or gap["detected_at"]
        since = gap["last_at_before"]
        if since is not None:
            until = max(until, since)
        if gap["queue"] == queue and until >= start and (since is None or since < start + length):
            overlapping.append(gap)
    return overlapping


def makes_row(gap: Row, minute: datetime) -> bool:
    """Return whether a gap alone creates a row for a minute; if its start is unknown, only its last minute does."""
    known = gap["last_at_before"] is not None or minute_of(gap["first_at_after"] or gap["detected_at"]) == minute
    return known and bool(overlapping_gaps([gap], gap["queue"], minute, MINUTE))


def nearest_rank(values: Sequence[int], fraction: float) -> int | None:
    return sorted(values)[max(math.ceil(fraction * len(values)), 1) - 1] if values else None


def counts(values: Iterable[int]) -> dict[int, int]:
    buckets: defaultdict[int, int] = defaultdict(int)
    for value in values:
        buckets[bucket_of(value)] += 1
    return dict(sorted(buckets.items()))


def by_task(rows: Iterable[Row]) -> defaultdict[tuple[str, str | None], list[Row]]:
    """Return the rows of each queue and task."""
    tasks: defaultdict[tuple[str, str | None], list[Row]] = defaultdict(list)
    for row in rows:
        tasks[row["queue"], row["name"]].append(row)
    return tasks


class Oracle:
    """The expected gold tables for some days.

    Args:
        history: The events, attempts and jobs.
        days: The days.
        slo_config: Objectives, prices and capacities.
    """

    def __init__(self, history: History, days: Iterable[date], slo_config: SLOConfig) -> None:
        self.history, self.days, self.slo_config = history, {day.isoformat() for day in days}, slo_config
        self._added, self._attempts, self._jobs = map(by_task, (history.added, history.attempts, history.jobs))

    def has(self, at: datetime | None) -> bool:
        return at is not None and day_of(at) in self.days

    def task_minute(self) -> list[Row]:
        return [self._minute(*key) for key in self._keys()]

    def _keys(self) -> set[tuple[str, str | None, datetime]]:
        """Return every minute of a task that has a row."""
        times = [(row, row["event_at"]) for row in self.history.added]
        times += [(row, row[end]) for row in self.history.attempts for end in ("started_at", "ended_at")]
        times += [(row, step) for row in self.history.attempts for step in steps_of(row)]
        times += [(row, finished_or_removed_at(row)) for row in self.history.jobs]
        keys = {(row["queue"], row["name"], minute_of(at)) for row, at in times if self.has(at)}
        for start in (datetime.fromisoformat(day).replace(tzinfo=UTC) for day in self.days):
            for minute in (start + number * MINUTE for number in range(1440)):
                keys |= {(gap["queue"], None, minute) for gap in self.history.gaps if makes_row(gap, minute)}
        return keys

    def _minute(self, queue: str, name: str | None, minute: datetime) -> Row:
        end = minute + MINUTE

        def at(value: datetime | None) -> bool:
            return value is not None and minute <= value < end

        added, attempts, jobs = self._added[queue, name], self._attempts[queue, name], self._jobs[queue, name]
        started = [row for row in attempts if at(row["started_at"])]
        ended = [row for row in attempts if at(row["ended_at"])]
        waits = [row["wait_ms"] for row in started if row["wait_ms"] is not None]
        runs = [row["run_ms"] for row in ended if row["run_ms"] is not None]
        gaps = overlapping_gaps(self.history.gaps, queue, minute, MINUTE)
        wasted = [row for row in attempts if row["outcome"] in {"failed", "requeued", "stalled"}]
        return {
            "queue": queue, "name": name, "minute": minute, "dt": day_of(minute),
            "added": sum(at(row["event_at"]) for row in added),
            "started": len(started),
            **{counter: sum(row["outcome"] == word for row in ended) for word, counter in COUNTER_OF_OUTCOME.items()},
            "finished": sum(at(row["finished_at"]) for row in jobs),
            "removed": sum(row["state"] == "removed" and at(row["as_of"]) for row in jobs),
            "busy_ms": sum(overlap(row, minute, MINUTE) for row in attempts),
            "wasted_ms": sum(overlap(row, minute, MINUTE) for row in wasted),
            "wait_histogram_ms": counts(waits), "run_histogram_ms": counts(runs),
            "events_lost": sum(gap["lost"] for gap in gaps), "complete": not gaps,
            "waits": waits, "runs": runs,
        }  # fmt: skip

    def capacity_minute(self, minutes: list[Row]) -> list[Row]:
        of_queue: defaultdict[tuple[str, datetime], list[Row]] = defaultdict(list)
        for row in minutes:
            of_queue[row["queue"], row["minute"]].append(row)
        rows = []
        for (queue, minute), tasks in of_queue.items():
            total = {name: sum(row[name] for row in tasks) for name in ("added", "finished", "removed", "busy_ms")}
            finished_or_removed = total["finished"] + total["removed"]
            rows.append({
                "queue": queue, "minute": minute, "dt": day_of(minute),
                "added": total["added"], "finished_or_removed": finished_or_removed,
                "backlog_delta": total["added"] - finished_or_removed,
                "busy_slots": total["busy_ms"] / 60_000, "peak_slots": self._peak(queue, minute),
                "complete": all(row["complete"] for row in tasks),
                "waits": [wait for row in tasks for wait in row["waits"]],
            })  # fmt: skip
        for row in rows:
            same_day = [
                other["peak_slots"] for other in rows if (other["queue"], other["dt"]) == (row["queue"], row["dt"])
            ]
            capacities = self.slo_config.capacities
            row["capacity"] = capacities.get(row["queue"], capacities.get("*")) or max(same_day) or None
            row["utilization"] = row["busy_slots"] / row["capacity"] if row["capacity"] else None
        return rows

    def _peak(self, queue: str, minute: datetime) -> int:
        """Return the maximum number of concurrent attempts, checked at the start of each."""
        attempts = [row for row in self.history.attempts if row["queue"] == queue and overlap(row, minute, MINUTE)]
        starts, ends = (sorted(row[end] for row in attempts) for end in ("started_at", "ended_at"))
        times = {max(start, minute) for start in starts}
        return max((bisect_right(starts, at) - bisect_right(ends, at) for at in times), default=0)

    def errors_day(self) -> list[Row]:
        kinds: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
        of_task: defaultdict[tuple[Any, ...], int] = defaultdict(int)
        for row in self.history.attempts:
            if row["outcome"] == "failed" and self.has(row["ended_at"]):
                task = day_of(row["ended_at"]), row["queue"], row["name"]
                kinds[*task, row["error_fingerprint"]].append(row)
                of_task[task] += 1
        errors = []
        for (dt, queue, name, key), rows in kinds.items():
            newest = sorted(rows, key=lambda row: (-row["ended_at"].timestamp(), row["job_id"]))
            errors.append({
                "dt": dt, "queue": queue, "name": name, "error_fingerprint": key, "count": len(rows),
                "fraction": len(rows) / of_task[dt, queue, name],
                "first_seen": newest[-1]["ended_at"], "last_seen": newest[0]["ended_at"],
                "sample_failed_reason": newest[0]["failed_reason"],
                "sample_job_ids": [row["job_id"] for row in newest[:5]],
            })  # fmt: skip
        return errors

    def slo_day(self) -> list[Row]:
        attempts, jobs = self.history.attempts, self.history.jobs
        measured = [(row, "wait", row["started_at"], True) for row in attempts if row["attempt"] == 1]
        measured += [(row, "run", row["ended_at"], True) for row in attempts]
        measured += [(row, "total", row["finished_at"], row["state"] == "completed") for row in jobs]
        kinds: defaultdict[tuple[Any, ...], list[bool]] = defaultdict(list)
        for row, metric, at, may_be_good in measured:
            length = row[f"{metric}_ms"]
            if not self.has(at) or length is None:
                continue
            for limit, target in self._objectives(row, metric).items():
                kinds[row["queue"], row["name"], metric, limit, target, day_of(at)].append(
                    may_be_good and length <= limit
                )
        return [self._slo(key, good) for key, good in kinds.items()]

    def _objectives(self, row: Row, metric: str) -> dict[int, float]:
        targets: dict[int, float] = {}
        for objective in self.slo_config.objectives:
            if objective.metric != metric:
                continue
            if matches(row["queue"], objective.queue) and matches(row["name"], objective.name):
                targets.setdefault(objective.threshold_ms, objective.target)
        return targets

    def _slo(self, key: tuple[Any, ...], good: list[bool]) -> Row:
        queue, name, metric, limit, target, dt = key
        attainment = sum(good) / len(good)
        return {
            "queue": queue, "name": name, "metric": metric, "threshold_ms": limit, "target": target, "dt": dt,
            "measured": len(good), "good": sum(good), "attainment": attainment,
            "error_budget_remaining": 1 - (1 - attainment) / (1 - target), "complete": self._is_complete(queue, dt),
        }  # fmt: skip

    def _is_complete(self, queue: str, dt: str) -> bool:
        return not overlapping_gaps(self.history.gaps, queue, datetime.fromisoformat(dt).replace(tzinfo=UTC), DAY)

    def cost_day(self) -> list[Row]:
        costs = []
        rows = self.history.attempts + self.history.jobs
        for queue, name in {(row["queue"], row["name"]) for row in rows}:
            for dt in self.days:
                row = self._cost(queue, name, dt)
                if row["jobs"] or row["attempts"] or row["busy_s"]:
                    costs.append(row)
        return costs

    def _cost(self, queue: str, name: str | None, dt: str) -> Row:
        start = datetime.fromisoformat(dt).replace(tzinfo=UTC)
        attempts = [row for row in self.history.attempts if (row["queue"], row["name"]) == (queue, name)]
        busy = sum(overlap(row, start, DAY) for row in attempts)
        wasted = sum(
            overlap(row, start, DAY) for row in attempts if row["outcome"] in {"failed", "requeued", "stalled"}
        )
        jobs = sum(
            row["finished_at"] is not None and day_of(row["finished_at"]) == dt
            for row in self.history.jobs
            if (row["queue"], row["name"]) == (queue, name)
        )
        price = self.slo_config.prices.get(queue, self.slo_config.prices.get("*"))
        cost = None if price is None else busy * price / 3_600_000
        return {
            "queue": queue, "name": name, "dt": dt, "jobs": jobs,
            "attempts": sum(
                row["ended_at"] is not None and day_of(row["ended_at"]) == dt and row["outcome"] != "released"
                for row in attempts
            ),
            "busy_s": busy / 1000, "wasted_s": wasted / 1000, "cost": round_money(cost),
            "cost_per_job": round_money(cost / jobs if cost is not None and jobs else None),
            "complete": self._is_complete(queue, dt),
        }  # fmt: skip


def finished_or_removed_at(job: Row) -> datetime | None:
    at: datetime | None = job["finished_at"] or (job["as_of"] if job["state"] == "removed" else None)
    return at


def matches(text: str | None, pattern: str) -> bool:
    plain = pattern.replace("[", "[[]").replace("?", "[?]")
    return pattern == "*" or (text is not None and fnmatchcase(text, plain))


def round_money(money: Decimal | None) -> Decimal | None:
    return None if money is None else round(money, 6)


TASKS: Mapping[str, Sequence[str | None]] = {
    "mail": ("send", "mail.*", "count [x]", None),
    "{images}": ("resize", "send"),
    "007": ("job",),
}
OUTCOMES = ("completed", "failed", "requeued", "stalled", "waiting-children", "released", "open")


def random_history(seed: int, jobs: int, since: datetime, until: datetime) -> History:
    """Create a random history of jobs that were added between two times, many of them around midnight."""
    rng, history = random.Random(seed), History()
    for number in range(jobs):
        queue = rng.choice(list(TASKS))
        _job(history, rng, since + (until - since) * rng.random(), queue, f"j{number}")
    return history


def _job(history: History, rng: random.Random, at: datetime, queue: str, job_id: str) -> None:
    if rng.random() < 0.4:  # close to midnight
        at = at.replace(hour=23, minute=59)
    at = at.replace(microsecond=rng.randrange(1000) * 1000)
    name, incarnation = rng.choice(TASKS[queue]), f"{ms(at - datetime.fromtimestamp(0, UTC))}-0"
    if name is not None:
        history.added.append({"queue": queue, "name": name, "event_at": at, "job_id": job_id, "event_id": incarnation})
    base = {"queue": queue, "name": name, "job_id": job_id, "incarnation": incarnation}
    now, outcome, state = at, "", "completed"
    for attempt in range(1, rng.choice((1, 1, 2, 3)) + 1):
        row = _attempt(rng, now, attempt)
        history.attempts.append({**base, **row})
        outcome, now = row["outcome"], row["ended_at"] or row["started_at"] or now
    state = {"failed": "failed", "open": rng.choice(("active", "removed"))}.get(outcome, "completed")
    ended = now if state in {"completed", "failed"} else None
    total = None if name is None or ended is None else ms(ended - at)
    history.jobs.append({
        **base, "created_at": None if name is None else at, "finished_at": ended, "state": state, "total_ms": total,
        "as_of": now,
    })  # fmt: skip


def _attempt(rng: random.Random, now: datetime, attempt: int) -> Row:
    wait = int(rng.lognormvariate(6, 3)) if rng.random() < 0.9 else None
    run = rng.choice((0, 1, 60_000, int(rng.lognormvariate(5, 3)), int(rng.lognormvariate(9, 2))))
    run = min(run, 30 * 3_600_000)
    outcome = rng.choice(OUTCOMES) if rng.random() < 0.5 else "completed"
    started = now + timedelta(milliseconds=min(wait or 0, 3_600_000))
    ended = None if outcome == "open" else started + timedelta(milliseconds=run)
    # The start of the attempt was lost in a gap, or there was none.
    start_lost = ended is not None and (rng.random() < 0.05 or outcome == "released")
    if start_lost:
        wait = None
    length = None if start_lost or ended is None else run
    reason = rng.choice(("timeout after 3 s", "no such 'user_7'", None)) if outcome == "failed" else None
    key = None if reason is None else "".join("#" if char.isdigit() else char for char in reason)
    return {
        "attempt": -attempt if outcome == "released" else attempt, "outcome": outcome,
        "started_at": None if start_lost else started, "ended_at": ended, "wait_ms": wait, "run_ms": length,
        "failed_reason": reason, "error_fingerprint": key, "as_of": ended or started,
    }  # fmt: skip
