"""Tasks of the app ``orders``: bulltask imports ``tasks.py`` of each installed app."""

from __future__ import annotations

from django.utils import timezone

from bulltask import shared_task
from orders.models import Order


@shared_task
def send_receipt(order_id: int) -> str:
    """Send a receipt unless it has already been sent: a task may run more than once."""
    order = Order.objects.get(pk=order_id)
    if order.receipt_sent_at is None:
        # Send the email here.
        order.receipt_sent_at = timezone.now()
        order.save(update_fields=["receipt_sent_at"])
    return f"receipt for {order.total} sent to {order.email}"


@shared_task
def count_orders() -> int:
    """Count the orders; the schedule in the settings runs this every hour."""
    return Order.objects.count()
