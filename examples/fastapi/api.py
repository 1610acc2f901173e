"""A web server that hands work to a worker and answers at once."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from fastapi import FastAPI, HTTPException, Query, Request
from pydantic import BaseModel
from shop import app, build_report

from bulltask import JobState, ResultTimeoutError
from bulltask.errors import JobNotFoundError

api = FastAPI(title="Shop")
NO_REPORT = "there is no such report, or it was deleted a day after it was done"


class Order(BaseModel):
    """What has to be in the body."""

    year: int


@api.post("/reports", status_code=202)
async def order_report(order: Order, request: Request) -> dict[str, str]:
    """Send the job; ``adelay`` does not block the event loop."""
    job = await build_report.adelay(order.year)
    return {"id": job.id, "status": str(request.url_for("report_status", job_id=job.id))}


@api.get("/reports/{job_id}")
async def report_status(job_id: UUID) -> dict[str, Any]:
    """How far it is; the type ``UUID`` keeps ids out that are none of ours."""
    found = await app.result(str(job_id)).asnapshot()
    if found.state is JobState.UNKNOWN:
        raise HTTPException(404, NO_REPORT)
    return {"state": found.state, "tries": found.attempts_made, "error": found.failed_reason or None}


@api.get("/reports/{job_id}/result")
async def report_result(job_id: UUID, wait: Annotated[float, Query(ge=0, le=30)] = 10) -> Any:
    """The report itself; waits for it up to ``wait`` seconds."""
    try:
        return await app.result(str(job_id)).aget(timeout=wait)
    except ResultTimeoutError:
        raise HTTPException(503, "not ready yet, ask again", {"Retry-After": "1"}) from None
    except JobNotFoundError:
        raise HTTPException(404, NO_REPORT) from None
    except ValueError as error:  # what the task raised is raised here again
        raise HTTPException(422, str(error)) from error
