"""The Django app that contains the outbox's table."""

from __future__ import annotations

from django.apps import AppConfig

from bulltask.outbox.outbox import TABLE

__all__ = ["OutboxConfig"]


class OutboxConfig(AppConfig):  # type: ignore[misc]
    """Configuration of the app."""

    name = "bulltask.outbox.django"
    label = TABLE
