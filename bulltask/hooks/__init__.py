"""Hooks around sending and running jobs: middleware of an app, and the signals of :mod:`bulltask.signals`."""

from __future__ import annotations

from bulltask.hooks.middleware import Middleware
from bulltask.hooks.outgoing import OutgoingJob

__all__ = ["Middleware", "OutgoingJob"]
