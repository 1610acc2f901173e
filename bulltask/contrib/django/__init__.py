"""bulltask in a Django project: add ``"bulltask.contrib.django"`` to ``INSTALLED_APPS``.

``bulltask.contrib.django.app`` is the project's :class:`bulltask.App`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bulltask.app import App

    app: App
else:

    def __getattr__(name: str) -> object:
        """Create or find the app on first use: the settings may not be ready when Django imports this package."""
        if name != "app":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from bulltask.contrib.django.project import project_app  # noqa: PLC0415

        return project_app()
