"""The module from which some examples import the tasks."""

from __future__ import annotations

from proj.tasks import add, mul, tsum, xsum

__all__ = ["add", "mul", "tsum", "xsum"]
