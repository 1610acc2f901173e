"""The conditions of a measurement: how busy the machine is, and how fast."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["Conditions", "conditions"]

Conditions = dict[str, float]

_STEAL = 8
_LOOPS = 200_000


def conditions() -> Conditions:
    """Return the load, the steal time since the machine started, and the time of a fixed calibration loop.

    If the loop takes longer in one run than in another, the CPU is slower or shared with others, so the rates of the
    two runs cannot be compared.
    """
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    started = time.perf_counter()
    for _ in range(_LOOPS):
        pass
    return {
        "load": os.getloadavg()[0],
        "steal_s": int(fields[_STEAL]) / os.sysconf("SC_CLK_TCK"),
        "loop_ms": (time.perf_counter() - started) * 1e3,
    }
