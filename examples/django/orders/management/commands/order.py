"""``manage.py order``: place an order and another one that is rolled back, then wait for the receipt."""

from __future__ import annotations

from django.core.management.base import BaseCommand

from bulltask.contrib.django import app
from orders.models import Order
from orders.services import place_order


class Command(BaseCommand):
    help = "Place two orders; the second one is rolled back."

    def handle(self, *_: object, **_options: object) -> None:
        order = place_order("ada@example.com", 30)
        self.stdout.write(f"order {order.pk} has job {order.receipt_job}")
        try:
            place_order("bob@example.com", -5)
        except ValueError as error:
            self.stdout.write(f"rolled back: {error}")
        self.stdout.write(app.AsyncResult(order.receipt_job).get(timeout=60))
        order = Order.objects.get(pk=order.pk)
        self.stdout.write(f"stored by the task: {order.receipt_sent_at is not None}")
