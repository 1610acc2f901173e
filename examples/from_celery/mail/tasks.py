"""Tasks that send mail; routed to their own queue."""

from __future__ import annotations

from threading import Event as Pause

from celery import shared_task
from celery.exceptions import SoftTimeLimitExceeded
from celery.utils.log import get_task_logger
from orders.models import Event, Order

logger = get_task_logger(__name__)


@shared_task(ignore_result=True)
def send_mail(text, to):
    logger.info("to %s: %s", to, text)
    Event.objects.create(kind="mail", text=f"{to}: {text}")


@shared_task(bind=True, soft_time_limit=1, time_limit=10)
def newsletter(self, seconds):
    try:
        Pause().wait(seconds)  # a slow mail server
    except SoftTimeLimitExceeded:
        return f"{self.name} stopped early"
    return "sent to all"


@shared_task
def daily_report(to):
    send_mail.delay(f"{Order.objects.filter(state='closed').count()} orders", to)
