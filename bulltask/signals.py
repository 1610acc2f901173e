"""Celery's signals, under Celery's names: ``from bulltask.signals import task_failure``."""

from __future__ import annotations

from bulltask.observe import signals
from bulltask.observe.signals import *

__all__ = signals.__all__

__getattr__ = signals.__getattr__
