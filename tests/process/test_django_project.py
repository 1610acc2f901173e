"""A Django project written for Celery runs after the import and the broker's URL are changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

FILES = {
    "proj/__init__.py": "from .celery import app as celery_app\n\n__all__ = ('celery_app',)\n",
    "proj/celery.py": """
import os

from bulltask import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "proj.settings")

app = Celery("proj")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
""",
    "proj/settings.py": """
import os

SECRET_KEY = "for a test"
USE_TZ = True
ROOT_URLCONF = "proj.urls"
INSTALLED_APPS = ["shop.apps.ShopConfig", "mail"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
CELERY_BROKER_URL = os.environ["SERVER_OF_TEST"]
CELERY_RESULT_BACKEND = CELERY_BROKER_URL
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TASK_SERIALIZER = "json"
CELERY_TASK_DEFAULT_QUEUE = "orders"
CELERY_TASK_ACKS_LATE = True
CELERY_TIMEZONE = "Europe/Berlin"
""",
    "shop/__init__.py": "",
    "shop/apps.py": "from django.apps import AppConfig\n\n\nclass ShopConfig(AppConfig):\n    name = 'shop'\n",
    "shop/models.py": """
from django.db import models


class Order(models.Model):
    total = models.IntegerField()
""",
    "shop/tasks.py": """
from bulltask import shared_task

from shop.models import Order


@shared_task
def total(amount):
    return Order(total=amount).total
""",
    "shop/views.py": """
from bulltask import shared_task
from django.http import HttpResponse


@shared_task
def visit(page):
    return page


def index(request):
    visit.delay(request.path)
    return HttpResponse("")
""",
    "shop/urls.py": "from django.urls import path\nfrom shop import views\n\nurlpatterns = [path('', views.index)]\n",
    "proj/urls.py": "from django.urls import include, path\n\nurlpatterns = [path('shop/', include('shop.urls'))]\n",
    "mail/__init__.py": "",
}


def test_a_django_project_written_for_celery_runs(harness: WorkerHarness, tmp_path: Path) -> None:
    project = tmp_path / "project"
    for name, text in FILES.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    environ = {"PYTHONPATH": str(project), "SERVER_OF_TEST": harness.url}
    worker = harness.worker(children=1, options=["-A", "proj"], environ=environ, fresh=True)
    assert worker.wait_for_line("Registered tasks")[0]["tasks"] == ["shop.tasks.total", "shop.views.visit"]
    job = harness.app.send_task("shop.tasks.total", kwargs={"amount": 17}, queue="orders")
    assert job.get(timeout=60) == 17


def test_a_worker_without_tasks_warns_and_says_what_to_do(harness: WorkerHarness, tmp_path: Path) -> None:
    (tmp_path / "empty_app.py").write_text("from bulltask import App\napp = App('empty')\n")
    worker = harness.worker(children=1, options=["-A", "empty_app"], environ={"PYTHONPATH": str(tmp_path)}, fresh=True)
    worker.wait_for_line("Worker started")
    assert [line["event"] for line in worker.warnings()] == [
        "This app has no tasks, so this worker cannot run any jobs: import its task modules with include, -I "
        "or autodiscover_tasks"
    ]
