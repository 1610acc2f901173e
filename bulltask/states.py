"""Celery's names for states: ``from bulltask import states``, as in ``result.state == states.SUCCESS``."""

from __future__ import annotations

from bulltask.contrib.celery import states
from bulltask.contrib.celery.states import *

__all__ = states.__all__
