"""A web server that sends jobs and responds immediately."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from fastapi import FastAPI, HTTPException, Query, Request
from pydantic import BaseModel
from shop import app, build_report

from bulltask import JobState, ResultTimeoutError
from bulltask.errors import JobNotFoundError

api = FastAPI(title="Shop")
NOT_FOUND = "the report does not exist, or was removed a day after it was finished"


class Order(BaseModel):
    """A request's body."""

    year: int


@api.post("/reports", status_code=202)
async def order_report(order: Order, request: Request) -> dict[str, str]:
    """Send the job; ``adelay`` does not block the event loop."""
    job = await build_report.adelay(order.year)
    return {"id": job.id, "status": str(request.url_for("report_status", job_id=job.id))}


@api.get("/reports/{job_id}")
async def report_status(job_id: UUID) -> dict[str, Any]:
    """Return the job's state; the type ``UUID`` rejects ids of other formats."""
    snapshot = await app.result(str(job_id)).asnapshot()
    if snapshot.state is JobState.UNKNOWN:
        raise HTTPException(404, NOT_FOUND)
    return {"state": snapshot.state, "attempts_made": snapshot.attempts_made, "error": snapshot.failed_reason or None}


@api.get("/reports/{job_id}/result")
async def report_result(job_id: UUID, wait: Annotated[float, Query(ge=0, le=30)] = 10) -> Any:
    """Return the report; wait for it up to ``wait`` seconds."""
    try:
        return await app.result(str(job_id)).aget(timeout=wait)
    except ResultTimeoutError:
        raise HTTPException(503, "not ready yet, try again", {"Retry-After": "1"}) from None
    except JobNotFoundError:
        raise HTTPException(404, NOT_FOUND) from None
    except ValueError as error:  # the task's exception
        raise HTTPException(422, str(error)) from error
