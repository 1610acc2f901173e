"""Creates the Celery app with the project, so that ``shared_task`` uses it everywhere."""

from __future__ import annotations

from shop.celery import app as celery_app

__all__ = ["celery_app"]
