"""A dashboard for the queues, workers and jobs of a server: see :class:`Dashboard`, and ``bulltask dashboard``.

It needs the extra ``dashboard`` (``pip install 'bulltask[dashboard]'``).
"""

from __future__ import annotations

from bulltask.dashboard.access import Access, Role
from bulltask.dashboard.site import Dashboard

__all__ = ["Access", "Dashboard", "Role"]
