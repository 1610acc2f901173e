"""The project's URLs."""

from __future__ import annotations

from django.urls import path
from orders import views

urlpatterns = [
    path("orders", views.place),
    path("orders/<int:pk>", views.show),
]
