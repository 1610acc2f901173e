"""The operations on orders, which views and commands share."""

from __future__ import annotations

from django.db import transaction

from orders.models import Order
from orders.tasks import send_receipt


@transaction.atomic
def place_order(email: str, total: int) -> Order:
    """Store an order, and send a job for its receipt when the transaction commits."""
    order = Order.objects.create(email=email, total=total)
    order.receipt_job = send_receipt.delay_on_commit(order.pk).id
    order.save()
    if total <= 0:
        raise ValueError("the total must be positive")  # rolls back: no order, no job
    return order
