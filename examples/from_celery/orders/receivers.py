"""Receivers of Celery's signals."""

from __future__ import annotations

from celery.signals import task_failure, task_prerun, task_retry, task_success, worker_ready

from orders.models import Event


@task_prerun.connect
def note_start(sender=None, task_id=None, task=None, args=None, kwargs=None, **extra):
    if task.name == "orders.tasks.charge":
        Event.objects.create(kind="prerun", text=task.name)


@task_success.connect
def note_success(sender=None, result=None, **extra):
    if sender.name == "orders.tasks.close":
        Event.objects.create(kind="success", text=result)


@task_retry.connect
def note_retry(sender=None, request=None, reason=None, einfo=None, **extra):
    Event.objects.create(kind="retry", text=sender.name)


@task_failure.connect
def note_failure(sender=None, task_id=None, exception=None, traceback=None, einfo=None, **extra):
    Event.objects.create(kind="failure", text=f"{sender.name} {type(exception).__name__}: {exception}")


@worker_ready.connect
def note_worker(sender=None, **extra):
    Event.objects.create(kind="worker", text="ready")
