"""How long jobs wait for a worker, by the model of queues with several servers (M/M/c, Erlang C).

Jobs come at random, one by one, and the first worker that is free takes the one that waits longest. What is told here
is what textbooks have tables of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Load", "fewest_workers", "waiting_share"]


@dataclass(frozen=True, slots=True)
class Load:
    """What comes to the workers.

    Attributes:
        per_s: attempts that are to begin in a second, on average.
        run_s: seconds that one runs, on average.
        variation: squared coefficient of variation of the runs: variance / mean². It is 1 for exponential ones, for
            which the model is exact.
    """

    per_s: float
    run_s: float
    variation: float = 1.0

    @property
    def workers(self) -> float:
        """How many workers it keeps busy on average, in Erlang; with no more than that the queue grows for ever."""
        return self.per_s * self.run_s

    def late_share(self, workers: int, within_s: float) -> float:
        """Return the share, 0 to 1, of attempts that wait longer than ``within_s`` seconds.

        Runs that vary more than exponential ones make the long waits longer in proportion (heavy-traffic approximation
        of M/G/c); those that vary less are taken for exponential, which is the cautious side.
        """
        spare = workers - self.workers
        if spare <= 0:
            return 1.0
        spread = max(1.0, (1 + self.variation) / 2)
        decay = math.exp(-spare * within_s / (self.run_s * spread)) if self.run_s else float(within_s == 0)
        return waiting_share(workers, self.workers) * decay


def waiting_share(workers: int, load: float) -> float:
    """Return the share of attempts, 0 to 1, that find all workers busy: Erlang's formula C.

    Args:
        workers: how many there are, each for one job at a time.
        load: how many are busy on average, in Erlang.
    """
    if load >= workers:
        return 1.0
    blocked = 1.0  # Erlang's formula B, from one number of workers to the next: the factorials cancel out
    for count in range(1, workers + 1):
        blocked = load * blocked / (count + load * blocked)
    return workers * blocked / (workers - load * (1 - blocked))


def fewest_workers(load: Load, within_s: float, share: float) -> int:
    """Return the fewest workers with which at least ``share`` of the attempts wait at most ``within_s`` seconds."""
    low = math.floor(load.workers)  # too few
    high = low + 1
    while load.late_share(high, within_s) > 1 - share:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if load.late_share(middle, within_s) > 1 - share else (low, middle)
    return high
