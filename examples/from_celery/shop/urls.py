"""The project's URLs."""

from __future__ import annotations

from django.urls import path
from orders import views

urlpatterns = [
    path("orders/<int:order_id>/checkout/", views.checkout),
    path("jobs/<str:task_id>/", views.job),
]
