from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import date, timedelta

from bulltask import App, Context, PermanentError, crontab

app = App("shop", broker_url="redis://redis.internal:6379/0")  # tests never use this server
app.conf.beat_schedule = {
    "report": {"task": "shop.tasks.report", "schedule": crontab(hour=6, minute=0)},
    "expire-carts": {"task": "shop.tasks.expire_carts", "schedule": timedelta(minutes=10)},
}

STOCK: dict[str, int] = {}
SENT: list[tuple[str, str]] = []
PAYMENTS: list[int] = []
REPORTS: list[str] = []


class Bank:
    """The bank's API, which tests replace."""

    def charge(self, cents: int) -> str:
        raise ConnectionError(f"cannot charge {cents} cents in a test")


bank = Bank()


@dataclass
class Line:
    product: str
    quantity: int
    cents: int


@app.task
def order(customer: str, lines: list[Line]) -> int:
    """Reserve the products, then let other tasks charge and email the customer."""
    for line in lines:
        if STOCK.get(line.product, 0) < line.quantity:
            raise PermanentError(f"{line.product} is sold out")
        STOCK[line.product] -= line.quantity
    cents = sum(line.quantity * line.cents for line in lines)
    charge.delay(customer, cents)
    ask_for_review.apply_async((customer,), countdown=timedelta(days=7))
    return cents


@app.task(bind=True, max_retries=4, retry_jitter=False)
def charge(self: Context, customer: str, cents: int) -> str:
    """Retry if the bank is not available: ConnectionError is a transient error."""
    self.log(f"attempt {self.request.retries + 1}")
    receipt = bank.charge(cents)
    PAYMENTS.append(cents)
    mail.apply_async((customer, f"receipt {receipt}"), queue="mail", priority=1)
    return receipt


@app.task(queue="mail")
def mail(to: str, text: str) -> None:
    if "@" not in to:
        raise PermanentError(f"{to!r} is not an address")
    SENT.append((to, text))


@app.task
def ask_for_review(customer: str) -> None:
    mail.delay(customer, "How was it?")


@app.task(bind=True)
def import_prices(self: Context, rows: list[str]) -> int:
    for done, row in enumerate(rows, 1):
        product, quantity = row.split(";")
        STOCK[product] = int(quantity)
        self.update_progress({"done": done, "of": len(rows)})
    return len(rows)


@app.task
async def resize(url: str, *widths: int) -> list[str]:
    await asyncio.sleep(0)
    return [f"{url}?w={width}" for width in widths]


@app.task
def report() -> None:
    REPORTS.append("report")


@app.task
def expire_carts() -> None:
    REPORTS.append("carts")


@app.task
def invoice_number(day: date, number: int) -> str:
    return f"{day:%Y%m%d}-{number:04}"


def checkout(customer: str, lines: list[Line]) -> str:
    """What a web handler would call."""
    if not lines:
        raise ValueError("the cart is empty")
    return order.apply_async((customer, lines), expires=timedelta(hours=1)).id
