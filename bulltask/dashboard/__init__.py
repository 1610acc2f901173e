"""A dashboard for the queues, workers and jobs of a server: see :class:`Dashboard`, and ``bulltask dashboard``.

It needs the extra ``dashboard`` (``pip install 'bulltask[dashboard]'``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bulltask.jobs.errors import look_up

if TYPE_CHECKING:
    from bulltask.dashboard.access import Access, Role
    from bulltask.dashboard.site import Dashboard

__all__ = ["Access", "Dashboard", "Role"]

_MODULES: Final = {
    "Access": "bulltask.dashboard.access",
    "Dashboard": "bulltask.dashboard.site",
    "Role": "bulltask.dashboard.access",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    return look_up(__name__, name, _MODULES, "dashboard", {"jinja2", "markupsafe", "starlette"})
