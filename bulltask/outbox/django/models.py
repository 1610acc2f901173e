"""The outbox's table as a model."""

from __future__ import annotations

from typing import Any

from django.db import models

from bulltask.outbox.outbox import TABLE

__all__ = ["OutboxRow"]


class OutboxRow(models.Model):  # type: ignore[misc]
    """A row: the jobs of one call, waiting to be sent."""

    objects: Any
    id = models.BigAutoField(primary_key=True)
    version = models.IntegerField()
    created_ms = models.BigIntegerField()
    payload = models.TextField()
    error = models.TextField(null=True)

    class Meta:
        """Options of the model."""

        app_label = TABLE
        db_table = TABLE
