"""Hooks around sending and running jobs: middleware of an app."""

from __future__ import annotations

from bulltask.observe import hooks
from bulltask.observe.hooks import *

__all__ = hooks.__all__
