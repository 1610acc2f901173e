"""A task, and the views that send it and show its result."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from flask import Blueprint, current_app, g, request

from bulltask import App, JobState, shared_task

reports = Blueprint("reports", __name__)


@shared_task
def build_report(year: int) -> str:
    """Build a report, which takes too long for a request. The task uses ``current_app`` and ``g``."""
    g.orders = year * 7  # in a project, the database session of this context
    return f"{g.orders} orders, in {current_app.config['CURRENCY']}"


@reports.post("/reports")
def order_report() -> Any:
    job = build_report.delay(request.get_json()["year"])
    return {"id": job.id}, 202


@reports.get("/reports/<uuid:job_id>")
def show_report(job_id: UUID) -> Any:
    app: App = current_app.extensions["bulltask"]
    snapshot = app.result(str(job_id)).snapshot()
    if snapshot.state is JobState.UNKNOWN:
        return {"error": "there is no such report"}, 404
    return {"state": snapshot.state, "report": snapshot.returnvalue, "error": snapshot.failed_reason or None}
