"""Tests of the shop: which jobs are sent, and what they do."""

from __future__ import annotations

from django.test import TestCase

from bulltask.contrib.django.test import JobsMixin
from orders.models import Order
from orders.tasks import count_orders, send_receipt


class OrderTest(JobsMixin, TestCase):
    def test_an_order_sends_its_receipt(self) -> None:
        with self.captureOnCommitCallbacks(execute=True):
            response = self.client.post("/orders", {"email": "eve@example.com", "total": 12})
        order = Order.objects.get(pk=response.json()["order"])
        self.assert_enqueued(send_receipt, (order.pk,), count=1)
        self.run_jobs()
        order.refresh_from_db()
        self.assertIsNotNone(order.receipt_sent_at)
        self.assertEqual(self.client.get(f"/orders/{order.pk}").json(), {"total": 12, "receipt": "SUCCESS"})

    def test_an_order_that_is_rolled_back_sends_nothing(self) -> None:
        with self.captureOnCommitCallbacks(execute=True):
            response = self.client.post("/orders", {"email": "eve@example.com", "total": 0})
        self.assertEqual(response.status_code, 422)
        self.assert_enqueued(send_receipt, count=0)

    def test_the_orders_are_counted_every_hour(self) -> None:
        self.assertGreaterEqual(len(self.run_for(2 * 3_600)), 2)
        self.assert_enqueued(count_orders, count=1)  # the next one


class ViewTest(TestCase):
    def test_a_test_without_the_mixin_sends_to_no_worker(self) -> None:
        with self.captureOnCommitCallbacks(execute=True):
            self.client.post("/orders", {"email": "eve@example.com", "total": 12})
        self.assertEqual(self.client.get("/orders/1").json()["receipt"], "PENDING")
