"""Tasks for orders."""

from __future__ import annotations

from celery import chain, chord, group, shared_task
from celery.exceptions import Ignore, MaxRetriesExceededError
from celery.utils.log import get_task_logger

from catalog.tasks import price_of, take_from_stock
from mail.tasks import send_mail
from orders.models import Event, Order

logger = get_task_logger(__name__)


class Declined(Exception):
    """The bank declined the payment."""


class Busy(Exception):
    """A partner's service is busy."""


@shared_task
def total(prices):
    return sum(prices)


@shared_task(bind=True, max_retries=3, default_retry_delay=0.1)
def charge(self, amount, order_id, failures=0):
    try:
        if self.request.retries < failures:
            raise Busy(f"attempt {self.request.retries}")
        if amount > 100_000:
            raise Declined(f"{amount} is too much")
    except Busy as exc:
        raise self.retry(exc=exc, countdown=0.1)
    Order.objects.filter(pk=order_id).update(total=amount, state="paid")
    return {"order": order_id, "amount": amount, "attempts": self.request.retries + 1}


@shared_task(autoretry_for=(Busy,), retry_backoff=True, retry_backoff_max=1, retry_jitter=False, max_retries=2)
def reserve_delivery(order_id, failures=0):
    if Event.objects.filter(kind="delivery", text=order_id).count() < failures:
        Event.objects.create(kind="delivery", text=order_id)
        raise Busy("no van")
    return f"van for {order_id}"


@shared_task(throws=(Order.DoesNotExist,))
def close(payment):
    order = Order.objects.get(pk=payment["order"])
    order.state = "closed"
    order.save()
    return f"order {order.pk} of {order.customer} is closed"


@shared_task
def mark_failed(task_id, order_id=None):
    """Called by ``link_error``."""
    Order.objects.filter(pk=order_id).update(state="failed")
    Event.objects.create(kind="errback", text="called with an id" if isinstance(task_id, str) else str(task_id))


@shared_task(bind=True, max_retries=1)
def poll_partner(self, partner):
    try:
        self.retry(countdown=0)
    except MaxRetriesExceededError:
        return f"gave up on {partner} after {self.request.retries} retry"


@shared_task(bind=True)
def cancel(self, order_id):
    if not Order.objects.filter(pk=order_id, state="new").update(state="cancelled"):
        self.update_state(state="CANCELLED", meta={"order": order_id})
        raise Ignore()
    return True


@shared_task
def checkout(order_id, failures=0):
    """Start the workflow of an order; called by the website."""
    order = Order.objects.get(pk=order_id)
    prices = chord((price_of.s(name, quantity) for name, quantity in order.lines.items()), total.s())
    stock = group(take_from_stock.si(name, quantity) for name, quantity in order.lines.items())
    stock.apply_async()
    workflow = chain(prices, charge.s(order_id, failures=failures), close.s())
    workflow.link(send_mail.s(order.customer))
    return workflow.apply_async(link_error=mark_failed.s(order_id)).id
