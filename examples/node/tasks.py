"""The tasks that producer.js calls."""

from __future__ import annotations

from bulltask import App, PermanentError

app = App("mailer", broker_url="redis://127.0.0.1:6379/0")


@app.task(name="mail.send", queue="mail")
def send(to: str, subject: str) -> dict[str, str]:
    if "@" not in to:
        raise PermanentError(f"{to!r} is not an address")  # fails without a retry
    return {"sent": subject, "to": to, "by": "Python"}
