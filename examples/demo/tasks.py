"""The tasks of the demo, written as those of your own application would be."""

from __future__ import annotations

import asyncio
import hashlib
import os

from bulltask import App, Context, PermanentError

app = App("demo", broker_url="embedded://demo", task_default_queue="demo")


@app.task
def resize(photo: int) -> dict[str, int]:
    """A plain function; a child runs one at a time, so two children run two."""
    hashlib.pbkdf2_hmac("sha256", b"some", b"work", 30_000)
    return {"photo": photo, "child": os.getpid()}


@app.task
async def fetch(page: int) -> str:
    """An ``async def``; a child runs up to 100 of them side by side."""
    await asyncio.sleep(0.5)  # stands for a web server that takes its time
    return f"page {page}"


@app.task(bind=True)
def charge(self: Context, card: str) -> str:
    """With ``bind=True`` the first argument knows the job: which try this is, for example."""
    if card == "stolen":
        raise PermanentError("the bank refuses this card")
    if self.request.retries == 0:
        raise ConnectionError("the bank hung up")  # transient errors are retried; nothing has to be said
    return f"charged at try {self.request.retries + 1}"


@app.task(bind=True)
def render(self: Context, film: str) -> str:
    """Works for a while and says how far it is; the demo kills the child that runs it."""
    for scene in range(1, 5):
        hashlib.pbkdf2_hmac("sha256", film.encode(), b"frames", 600_000)
        self.update_progress({"scene": scene, "of": 4, "child": os.getpid()})
    return f"{film}: 4 scenes"


@app.task(queue="bulk")
def noop() -> int:
    """As little as a task can do; it only says which child it was."""
    return os.getpid()
