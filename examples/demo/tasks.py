"""The demo's tasks, written like an application's tasks."""

from __future__ import annotations

import asyncio
import hashlib
import os

from bulltask import App, Context, PermanentError

app = App("demo", broker_url="embedded://demo", task_default_queue="demo")


@app.task
def resize(photo: int) -> dict[str, int]:
    """A sync task: a child runs one at a time."""
    hashlib.pbkdf2_hmac("sha256", b"some", b"work", 30_000)
    return {"photo": photo, "child": os.getpid()}


@app.task
async def fetch(page: int) -> str:
    """An async task: a child runs up to 100 concurrently."""
    await asyncio.sleep(0.5)  # simulates a slow web server
    return f"page {page}"


@app.task(bind=True)
def charge(self: Context, card: str) -> str:
    """With ``bind=True``, the first argument is the job's context, which has, for example, the number of retries."""
    if card == "stolen":
        raise PermanentError("the bank rejects this card")
    if self.request.retries == 0:
        raise ConnectionError("the bank closed the connection")  # transient errors are retried by default
    return f"charged in attempt {self.request.retries + 1}"


@app.task(bind=True)
def render(self: Context, film: str) -> str:
    """A long-running task that reports its progress; the demo kills its child."""
    for step in range(1, 5):
        hashlib.pbkdf2_hmac("sha256", film.encode(), b"frames", 600_000)
        self.update_progress({"step": step, "of": 4, "child": os.getpid()})
    return f"{film}: 4 scenes"


@app.task(queue="bulk")
def noop() -> int:
    """A no-op task that returns the pid of its child."""
    return os.getpid()
