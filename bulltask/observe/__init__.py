"""Logs and metrics of a worker, written by listeners of its events.

This module imports nothing, so that ``prometheus_client`` is loaded only by a worker whose metrics are enabled.
"""

from __future__ import annotations
