"""The exceptions of bulltask."""

from __future__ import annotations

from bulltask.jobs import errors
from bulltask.jobs.errors import *

__all__ = errors.__all__
