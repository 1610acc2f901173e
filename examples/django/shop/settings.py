"""The project's settings; those of bulltask are in ``BULLTASK``."""

from __future__ import annotations

import os
from pathlib import Path

BASE_DIR = Path(__file__).parent.parent
SECRET_KEY = os.environ.get("SECRET_KEY", "only for this example")
DEBUG = True
ROOT_URLCONF = "shop.urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
TIME_ZONE = "Europe/Berlin"

INSTALLED_APPS = ["bulltask.contrib.django", "orders"]

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("SHOP_DATABASE", BASE_DIR / "db.sqlite3"),
    }
}

BULLTASK = {
    "broker_url": "embedded://",  # in production: redis://…
    "beat_schedule": {"count-orders": {"task": "orders.tasks.count_orders", "schedule": 3600}},
}
