"""The app of ``benchmarks/dashboard.py``: tasks like those of a shop, some of whose jobs fail."""

from __future__ import annotations

import os

from bulltask import App, crontab

app = App("bench", broker_url=os.environ["BENCH_BROKER"])

_ERRORS = (TimeoutError, ConnectionError, ValueError, LookupError, PermissionError)


@app.task(name="mail.send", queue="mail", max_retries=0)
def send(number: int, to: str, subject: str = "Your order") -> str:
    """Send a letter."""
    if number % 2:
        raise _ERRORS[number // 2 % len(_ERRORS)](f"cannot send letter {number} to {to}")
    return f"sent {subject!r} to {to}"


@app.task(name="mail.report", queue="mail")
def report() -> None:
    """Write the report of the day."""


@app.task(name="shop.noop", queue="load")
def noop(number: int) -> int:
    """Do nothing."""
    return number


app.conf.beat_schedule = {"report": {"task": "mail.report", "schedule": crontab(hour="3", minute="30")}}
