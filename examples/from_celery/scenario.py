"""Use every task of the shop, and print what happens: one line of JSON for each situation.

A worker must be running. The output is the same with Celery and with bulltask.
"""

from __future__ import annotations

import json
import os
import time
from threading import Event as Pause

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
django.setup()

from catalog.models import Product  # noqa: E402 - after the setup
from catalog.tasks import delete_product, import_product, price_of, reindex, take_from_stock  # noqa: E402
from celery import chain, chord, group  # noqa: E402
from django.test import Client  # noqa: E402
from mail.tasks import daily_report, newsletter, send_mail  # noqa: E402
from orders.models import Event, Order  # noqa: E402
from orders.tasks import cancel, charge, close, mark_failed, poll_partner, reserve_delivery, total  # noqa: E402

TIMEOUT = 30


def say(situation, *outcome):
    print(json.dumps([situation, *outcome]), flush=True)


def wait_for(condition):
    deadline = time.monotonic() + TIMEOUT
    while not (found := condition()):
        if time.monotonic() > deadline:
            return "timeout"
        Pause().wait(0.02)
    return found


def texts(kind):
    return sorted(Event.objects.filter(kind=kind).values_list("text", flat=True))


def new_order(**lines):
    return Order.objects.create(customer="ada@example.com", lines=lines).pk


def simple_calls():
    say("delay", import_product.delay("chair", 4_500, stock=10).get(timeout=TIMEOUT))
    on_sale = import_product.s("table", 19_900, on_sale=True)
    say("signature", on_sale.apply_async(countdown=0.2).get(timeout=TIMEOUT))
    lamps = group(import_product.s(f"lamp {number}", 100 * number, 5) for number in range(3))
    say("group", lamps.delay().get(timeout=TIMEOUT))
    result = send_mail.delay("hello", "ada@example.com")
    say("ignore_result", wait_for(lambda: texts("mail")), result.get(timeout=TIMEOUT))
    result = reindex.delay()
    say("routes", result.get(timeout=TIMEOUT), result.status, result.successful())
    say("plain call", total([1, 2, 3]))


def canvas():
    prices = [price_of.s("chair", 2), price_of.s("lamp 2", 1)]
    say("chord", chord(prices)(total.s()).get(timeout=TIMEOUT))
    say("chord with |", (group(prices) | total.s()).apply_async().get(timeout=TIMEOUT))
    steps = chain(price_of.s("chair", 1), charge.s(new_order()), close.si({"order": new_order()}))
    result = steps.apply_async()
    say("chain", result.get(timeout=TIMEOUT).split()[-1], result.parent.get(timeout=TIMEOUT)["amount"])
    stock = take_from_stock.chunks([("chair", 1), ("lamp 1", 2), ("table", 1)], 2)
    say("chunks", stock.apply_async().get(timeout=TIMEOUT), Product.objects.get(name="chair").stock)
    say("starmap", take_from_stock.starmap([("chair", 1), ("lamp 1", 9)]).delay().get(timeout=TIMEOUT))


def retries_and_failures():
    order = new_order()
    say("self.retry", charge.delay(500, order, failures=2).get(timeout=TIMEOUT)["attempts"], texts("retry"))
    result = charge.delay(500, order, failures=9)
    say("retries exhausted", repr(result.get(timeout=TIMEOUT, propagate=False)), result.status)
    say("autoretry_for", reserve_delivery.delay(order, failures=1).get(timeout=TIMEOUT).split()[0])
    say("max_retries", poll_partner.delay("bank").get(timeout=TIMEOUT))
    result = close.delay({"order": 0})
    try:
        result.get(timeout=TIMEOUT)
    except Order.DoesNotExist as error:
        say("throws", type(error).__qualname__, str(error), result.failed())
    result = charge.apply_async((200_000, order), link_error=mark_failed.s(order_id=order))
    say("link_error", wait_for(lambda: texts("errback")), Order.objects.get(pk=order).state)
    say("failure", str(result.result), type(result.result).__name__)
    say("soft_time_limit", newsletter.delay(20).get(timeout=TIMEOUT))
    paid, fresh = new_order(), new_order()
    charge.delay(1, paid).get(timeout=TIMEOUT)
    say("cancel", cancel.delay(fresh).get(timeout=TIMEOUT), Order.objects.get(pk=fresh).state)
    cancel.delay(paid)
    later = send_mail.apply_async(("too late", "ada@example.com"), countdown=3600)
    later.revoke()
    daily_report.delay("sales@example.com")
    say("a task that sends", bool(wait_for(lambda: [text for text in texts("mail") if "orders" in text])))


def task_classes():
    import_product.delay("stool", 2_000).get(timeout=TIMEOUT)
    say("base class", delete_product.delay("stool").get(timeout=TIMEOUT))
    result = delete_product.delay("sofa")
    say("base class, failure", repr(result.get(timeout=TIMEOUT, propagate=False)))
    say("handlers", wait_for(lambda: len(found := texts("handler")) == 2 and found))


def web_site():
    client = Client()
    order = new_order(chair=1, table=2)
    sent = client.post(f"/orders/{order}/checkout/?failures=1").json()
    say("view", wait_for(lambda: (page := client.get(f"/jobs/{sent['id']}/").json())["ready"] and page)["ready"])
    say("workflow", wait_for(lambda: Order.objects.get(pk=order).state == "closed"), Order.objects.get(pk=order).total)
    say("link", wait_for(lambda: [text for text in texts("mail") if f"order {order} " in text]))
    expensive = new_order(table=50)
    client.post(f"/orders/{expensive}/checkout/")
    say("a workflow that fails", wait_for(lambda: Order.objects.get(pk=expensive).state == "failed"))


def signals_and_schedule():
    wait_for(lambda: any("995000" in text for text in texts("failure")))  # Celery calls the errback first
    for kind in ("worker", "prerun", "success", "retry", "failure"):
        say(f"signals: {kind}", texts(kind))
    say("beat_schedule", wait_for(lambda: not Product.objects.filter(on_sale=True).exists()))


for part in (simple_calls, canvas, retries_and_failures, task_classes, web_site, signals_and_schedule):
    part()
