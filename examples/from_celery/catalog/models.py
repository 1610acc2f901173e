"""Products."""

from __future__ import annotations

from django.db import models


class Product(models.Model):
    name = models.CharField(max_length=100, unique=True)
    price = models.IntegerField(help_text="cents")
    stock = models.IntegerField(default=0)
    on_sale = models.BooleanField(default=False)
