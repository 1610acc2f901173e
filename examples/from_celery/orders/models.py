"""Orders, and a log of events."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    customer = models.EmailField()
    lines = models.JSONField(default=dict)
    total = models.IntegerField(default=0)
    state = models.CharField(max_length=20, default="new")


class Event(models.Model):
    kind = models.CharField(max_length=40)
    text = models.TextField()
