"""A shop's five tasks. The order number determines a job's outcome, so the demo can check every table."""

from __future__ import annotations

import asyncio
import hashlib

from bulltask import App, Context, PermanentError

app = App("history", broker_url="embedded://history", task_default_queue="shop")


@app.task(bind=True, name="mail.send", queue="mail")
async def send_mail(self: Context, order: int) -> str:
    """One in 25 needs a second attempt."""
    if order % 25 == 0 and self.request.retries == 0:
        raise ConnectionError(f"mail server {order % 3} hung up")
    await asyncio.sleep(0.01)
    return f"mail {order} sent"


@app.task(name="card.charge")
async def charge_card(order: int) -> int:
    """One card in 40 is declined."""
    if order % 40 == 7:
        raise PermanentError(f"the bank declined card {order:08x} of order {order}")
    await asyncio.sleep(0.002)
    return order


@app.task(name="photo.resize")
def resize_photo(order: int) -> str:
    """Use CPU time."""
    return hashlib.pbkdf2_hmac("sha256", b"photo", str(order).encode(), 300).hex()


@app.task(name="invoice.print")
def print_invoice(order: int) -> int:
    """One address in 100 is wrong."""
    if order % 100 == 3:
        raise ValueError(f"order {order} has no postcode")
    return order


@app.task(name="stock.count")
def count_stock(order: int) -> None:
    """Do nothing."""


# The demo uses these mappings to send jobs and to check the tables.
QUEUES = {
    "mail.send": "mail",
    "card.charge": "shop",
    "photo.resize": "shop",
    "invoice.print": "shop",
    "stock.count": "shop",
}
FAILS = {"card.charge": lambda order: order % 40 == 7, "invoice.print": lambda order: order % 100 == 3}
RETRIES = {"mail.send": lambda order: order % 25 == 0}
