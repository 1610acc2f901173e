"""Logs and metrics: subscribers of the events, which the core knows nothing about.

Nothing is imported here: ``prometheus_client`` is loaded only by a worker whose metrics are on.
"""

from __future__ import annotations
