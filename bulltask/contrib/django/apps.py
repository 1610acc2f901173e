"""The Django app."""

from __future__ import annotations

from django.apps import AppConfig
from django.core import checks

from bulltask.contrib.django.project import check_schedule, project_app

__all__ = ["BulltaskConfig"]


class BulltaskConfig(AppConfig):  # type: ignore[misc]
    """The Django app ``bulltask.contrib.django``."""

    name = "bulltask.contrib.django"
    label = "bulltask"

    def ready(self) -> None:
        """Create or import the project's app, so that ``@shared_task`` finds it in every process."""
        project_app()
        checks.register(check_schedule)
