"""Django's settings, and Celery's with the prefix ``CELERY_``."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from celery.schedules import crontab

SECRET_KEY = "only for this example"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
ROOT_URLCONF = "shop.urls"
INSTALLED_APPS = ["catalog", "orders.apps.OrdersConfig", "mail"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("SHOP_DATABASE", Path(__file__).parent.parent / "shop.sqlite3"),
        "OPTIONS": {"timeout": 30, "transaction_mode": "IMMEDIATE"},
    }
}

CELERY_BROKER_URL = "redis://localhost:6379/0"
CELERY_RESULT_BACKEND = CELERY_BROKER_URL
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TASK_SERIALIZER = "json"
CELERY_RESULT_SERIALIZER = "json"
CELERY_RESULT_EXPIRES = timedelta(hours=6)
CELERY_TIMEZONE = "Europe/Berlin"
CELERY_ENABLE_UTC = True
CELERY_TASK_DEFAULT_QUEUE = "orders"
CELERY_TASK_TRACK_STARTED = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_TIME_LIMIT = 120
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_MAX_TASKS_PER_CHILD = 1000
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_TASK_ROUTES = {"mail.tasks.*": {"queue": "mail"}, "catalog.tasks.reindex": {"queue": "catalog"}}
CELERY_BEAT_SCHEDULE = {
    "end sales that have expired": {"task": "catalog.tasks.end_sales", "schedule": 1.0},
    "send the report of the day": {
        "task": "mail.tasks.daily_report",
        "schedule": crontab(hour=7, minute=30, day_of_week="mon-fri"),
        "args": ("sales@example.com",),
    },
}
