"""Estimate how long jobs wait for a slot, with the queueing model M/M/c (Erlang C).

Jobs arrive at random, one by one, and the next free slot takes the job that has waited longest. The results match
textbook tables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Load", "min_slots", "waiting_probability"]


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

    Args:
        slots: The number of slots, each for one job at a time.
        load: The mean number of busy slots, in erlangs.
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
