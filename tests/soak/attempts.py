"""Why did a job run more than once? From the starts and ends of its attempts, and the kills."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

__all__ = ["Attempt", "causes_of_repetitions", "read_attempts"]

OUTCOME_MS: Final = 2_000
"""How long a process may take to store the outcome of a task that has returned."""


@dataclass(slots=True)
class Attempt:
    """An attempt: its process, its start and its end in epoch milliseconds."""

    pid: int
    start_ms: int
    end_ms: int | None = None


def read_attempts(file: Path) -> dict[str, list[Attempt]]:
    """Return the attempts of each job in the order of their starts, from a file of lines ``start ID PID MS``."""
    result: dict[str, list[Attempt]] = defaultdict(list)
    for line in file.read_text().splitlines():
        what, job, pid, at_ms = line.split()
        if what == "start":
            result[job].append(Attempt(int(pid), int(at_ms)))
        else:
            running = [each for each in result[job] if each.pid == int(pid) and each.end_ms is None]
            running[0].end_ms = int(at_ms)
    return result


def causes_of_repetitions(
    attempts: Mapping[str, Sequence[Attempt]],
    killed: Mapping[int, int],
    clients: Mapping[int, str],
    stalls: Mapping[str, Sequence[int]],
) -> tuple[Counter[str], list[str]]:
    """Count the causes of all attempts that were not a job's last.

    Args:
        attempts: The attempts of each job.
        killed: When a process was killed, by process id.
        clients: The client of a process; others are bulltask's children.
        stalls: When a stalled check found that a job's lock had expired.

    Returns:
        The number of attempts by cause, and descriptions of those without a known cause.
    """
    causes: Counter[str] = Counter()
    unknown: list[str] = []
    for job, found in attempts.items():
        for attempt, following in pairwise(found):
            client, killed_ms = clients.get(attempt.pid, "bulltask"), killed.get(attempt.pid)
            expired = any(attempt.start_ms <= at_ms <= following.start_ms for at_ms in stalls.get(job, ()))
            if killed_ms is not None and attempt.end_ms is None:
                cause = "its process was killed while it ran"
            elif killed_ms is not None and attempt.end_ms is not None and killed_ms < attempt.end_ms + OUTCOME_MS:
                cause = "its process was killed after the task had returned, before the outcome was stored"
            elif expired:
                cause = "its lock expired while its process was running"
            else:
                cause = "unknown"
                unknown.append(f"{job} in {client}: {attempt}, killed {killed_ms}, then {following}")
            causes[f"{client}: {cause}"] += 1
    return causes, unknown
