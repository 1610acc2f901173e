"""Time limits that scale with the load of this machine, for tests that check how long something takes."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["scale_to_load"]


def scale_to_load(idle_time: float) -> float:
    """Return the time that something may take now if it takes at most ``idle_time`` on an idle machine.

    With ``n`` running processes per core, the limit is ``2 * n`` times the idle time. Use it only if a failure would
    take much longer. If there is an event to wait for, no limit is needed.

    Args:
        idle_time: Seconds or milliseconds; the result has the same unit.
    """
    running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    wanted = max(os.getloadavg()[0], running) / (os.cpu_count() or 1)
    return idle_time * max(1.0, 2 * wanted)
