"""Results of jobs: ``from bulltask.result import AsyncResult``."""

from __future__ import annotations

from bulltask.registry import results
from bulltask.registry.results import *

__all__ = results.__all__
