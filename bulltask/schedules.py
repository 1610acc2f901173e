"""Celery's names for schedules: ``from bulltask.schedules import crontab, schedule``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bulltask.jobs import schedules
from bulltask.jobs.schedules import *

__all__ = schedules.__all__

if not TYPE_CHECKING:
    __getattr__ = schedules.__getattr__
