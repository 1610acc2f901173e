"""How fast this machine is now, for tests whose sentence has a time in it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["scale_to_load"]


def scale_to_load(quiet: float) -> float:
    """How long may take now what takes so long at most on a machine that has nothing else to do.

    Twice as long for each process that wants a core: where four tests run at once, a worker's steps wait for theirs.
    Only for what would take much longer still if it did not work; whatever has an event to wait for needs no bound.

    Args:
        quiet: seconds, or milliseconds; the same comes back.
    """
    running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    wanted = max(os.getloadavg()[0], running) / (os.cpu_count() or 1)
    return quiet * max(1.0, 2 * wanted)
