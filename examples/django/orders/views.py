"""Two views: place an order, and show whether its receipt was sent."""

from __future__ import annotations

from django.http import HttpRequest, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.csrf import csrf_exempt

from bulltask.contrib.django import app
from orders.models import Order
from orders.services import place_order


@csrf_exempt  # so that curl can send an order; do not copy this
def place(request: HttpRequest) -> JsonResponse:
    try:
        order = place_order(request.POST["email"], int(request.POST["total"]))
    except ValueError as error:
        return JsonResponse({"error": str(error)}, status=422)
    return JsonResponse({"order": order.pk}, status=202)


def show(_request: HttpRequest, pk: int) -> JsonResponse:
    order = get_object_or_404(Order, pk=pk)
    receipt = app.AsyncResult(order.receipt_job)
    return JsonResponse({"total": order.total, "receipt": receipt.status})
