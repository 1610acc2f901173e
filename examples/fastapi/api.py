"""A web server that sends jobs and responds immediately."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import FileResponse, StreamingResponse
from pydantic import BaseModel
from shop import app, build_report

from bulltask import App, JobState, ResultTimeoutError
from bulltask.errors import JobNotFoundError
from bulltask.queue.events import Completed, Failed, Progress


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Close the app's connections when the server stops."""
    yield
    await app.aclose()


def get_app() -> App:
    """Return bulltask's app; a test can replace it with ``api.dependency_overrides``."""
    return app


AppDep = Annotated[App, Depends(get_app)]

api = FastAPI(title="Shop", lifespan=lifespan)
NOT_FOUND = "the report does not exist, or was removed a day after it finished"


class Order(BaseModel):
    """A request's body."""

    year: int


@api.post("/reports", status_code=202)
async def order_report(order: Order, request: Request) -> dict[str, str]:
    """Send the job; ``adelay`` does not block the event loop."""
    job = await build_report.adelay(order.year)
    return {"id": job.id, "status": str(request.url_for("report_status", job_id=job.id))}


@api.get("/reports/{job_id}")
async def report_status(job_id: UUID, bulltask_app: AppDep) -> dict[str, Any]:
    """Return the job's state; the type ``UUID`` rejects ids of other formats."""
    snapshot = await bulltask_app.result(str(job_id)).asnapshot()
    if snapshot.state is JobState.UNKNOWN:
        raise HTTPException(404, NOT_FOUND)
    return {"state": snapshot.state, "attempts_made": snapshot.attempts_made, "error": snapshot.failed_reason or None}


@api.get("/reports/{job_id}/result")
async def report_result(job_id: UUID, bulltask_app: AppDep, wait: Annotated[float, Query(ge=0, le=30)] = 10) -> Any:
    """Return the report; wait for it up to ``wait`` seconds."""
    try:
        return await bulltask_app.result(str(job_id)).aget(timeout=wait)
    except ResultTimeoutError:
        raise HTTPException(503, "not ready yet, try again", {"Retry-After": "1"}) from None
    except JobNotFoundError:
        raise HTTPException(404, NOT_FOUND) from None
    except ValueError as error:  # the task's exception
        raise HTTPException(422, str(error)) from error


@api.get("/reports/{job_id}/progress")
async def report_progress(job_id: UUID, bulltask_app: AppDep) -> StreamingResponse:
    """Send the job's progress, and then ``done`` or ``failed``, as server-sent events."""
    if (await bulltask_app.result(str(job_id)).asnapshot()).state is JobState.UNKNOWN:
        raise HTTPException(404, NOT_FOUND)
    return StreamingResponse(progress(str(job_id), bulltask_app), media_type="text/event-stream")


async def progress(job_id: str, bulltask_app: App) -> AsyncIterator[str]:
    """Yield the current progress, then each change, then the outcome: a client may connect at any time, and again."""
    async with bulltask_app.aevents("reports") as events:  # opened first, so that no event is missed
        snapshot = await bulltask_app.result(job_id, "reports").asnapshot()
        if snapshot.progress is not None:
            yield server_sent(snapshot.progress)
        if snapshot.state is JobState.FAILED:
            yield server_sent(snapshot.failed_reason, "failed")
        elif snapshot.state.finished or snapshot.state is JobState.UNKNOWN:
            yield server_sent(None, "done")
        else:
            async for event in events:
                match event:
                    case Progress(job_id=found, data=percent) if found == job_id:
                        yield server_sent(percent)
                    case Completed(job_id=found) if found == job_id:
                        yield server_sent(None, "done")
                        return
                    case Failed(job_id=found, failed_reason=reason) if found == job_id:
                        yield server_sent(reason, "failed")
                        return


def server_sent(data: object, name: str = "message") -> str:
    """Return a server-sent event; JSON has no line breaks, which would end it."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


@api.get("/", include_in_schema=False)
async def page() -> FileResponse:
    """Return a page that orders a report, and shows its progress."""
    return FileResponse(Path(__file__).with_name("page.html"))
