"""The first version of the tables."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    operations: ClassVar = [
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("email", models.EmailField(max_length=254)),
                ("total", models.IntegerField()),
                ("receipt_job", models.CharField(blank=True, max_length=64)),
                ("receipt_sent_at", models.DateTimeField(null=True)),
            ],
        ),
    ]
