"""The tasks of a small shop; the worker and the web server both import them."""

from __future__ import annotations

import asyncio

from bulltask import App

app = App("shop", broker_url="embedded://shop", task_default_queue="reports")


@app.task
async def build_report(year: int) -> dict[str, int]:
    """Build the report, which takes too long for a request."""
    if year < 2000:
        raise ValueError(f"there are no accounts for {year}")
    await asyncio.sleep(1)
    return {"year": year, "orders": year * 7}
