"""Tasks with logs, progress and child jobs, to be displayed in bull-board."""

from __future__ import annotations

from bulltask import App, Context, PermanentError

app = App("shop", broker_url="redis://127.0.0.1:6379/0")


@app.task(bind=True, name="mail.send", queue="mail")
def send(self: Context, to: str) -> str:
    if "@" not in to:
        raise PermanentError(f"{to!r} is not an address")
    self.log(f"writing to {to}")
    self.update_progress(100)
    return f"sent to {to}"


@app.task(name="page.count", queue="pages")
def count(page: str) -> int:
    return len(page)


@app.task(bind=True, name="pages.total", queue="reports")
def total(self: Context) -> int:
    return sum(self.get_children_values().values())
