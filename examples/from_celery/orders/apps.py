"""Connects the receivers when Django starts."""

from __future__ import annotations

from django.apps import AppConfig


class OrdersConfig(AppConfig):
    name = "orders"

    def ready(self):
        from orders import receivers  # noqa: F401, PLC0415 - connects the receivers, which need the models
