"""Celery's names for exceptions, for code that imports them from ``celery.exceptions``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bulltask.contrib.celery import exceptions
from bulltask.contrib.celery.exceptions import *

__all__ = exceptions.__all__

if not TYPE_CHECKING:
    __getattr__ = exceptions.__getattr__
