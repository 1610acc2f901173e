"""The tasks of a small shop; the worker and the web server both import them."""

from __future__ import annotations

import asyncio

from bulltask import App, Context

app = App("shop", broker_url="embedded://fastapi-shop", task_default_queue="reports")


@app.task(bind=True)
async def build_report(self: Context, year: int) -> dict[str, int]:
    """Build the report, which takes too long for a request."""
    if year < 2000:
        raise ValueError(f"there are no accounts for {year}")
    for percent in (25, 50, 75, 100):
        await asyncio.sleep(0.25)
        await self.aupdate_progress(percent)
    return {"year": year, "orders": year * 7}
