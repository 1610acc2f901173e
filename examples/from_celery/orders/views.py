"""The website's views."""

from __future__ import annotations

from celery.result import AsyncResult
from django.http import JsonResponse

from orders.tasks import checkout as start_checkout


def checkout(request, order_id):
    result = start_checkout.delay(order_id, failures=int(request.GET.get("failures", 0)))
    return JsonResponse({"id": result.id}, status=202)


def job(request, task_id):
    result = AsyncResult(task_id)
    if result.failed():
        return JsonResponse({"ready": True, "error": str(result.result)})
    return JsonResponse({"ready": result.ready(), "value": result.result if result.successful() else None})
