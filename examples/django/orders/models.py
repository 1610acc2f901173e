"""Orders."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """An order, with the id of the job that sends its receipt."""

    email = models.EmailField()
    total = models.IntegerField()
    receipt_job = models.CharField(max_length=64, blank=True)
    receipt_sent_at = models.DateTimeField(null=True)
