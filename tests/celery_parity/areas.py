"""All areas, in the order of the docs."""

from __future__ import annotations

from tests.celery_parity import area_canvas, area_results, area_retries, area_revoke, area_tasks

__all__ = ["AREAS"]

AREAS = (area_tasks.AREA, area_retries.AREA, area_canvas.AREA, area_results.AREA, area_revoke.AREA)
