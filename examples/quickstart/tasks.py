"""A sync task and an async task."""

from __future__ import annotations

import asyncio

from bulltask import App

# embedded:// is a server that the first process starts and that stops with the last process.
app = App("quickstart", broker_url="embedded://quickstart")


@app.task
def add(x: int, y: int) -> int:
    return x + y


@app.task
async def greet(name: str) -> str:
    await asyncio.sleep(0.1)
    return f"Hello {name}"
