"""Error categories: transient (retry), permanent (do not retry) or unknown."""

from __future__ import annotations

from bulltask.jobs import categories
from bulltask.jobs.categories import *

__all__ = categories.__all__
