"""Creates the outbox's table."""

from __future__ import annotations

from django.db import migrations, models

__all__ = ["Migration"]


class Migration(migrations.Migration):  # type: ignore[misc]
    """Creates the outbox's table."""

    initial = True
    dependencies: list[tuple[str, str]] = []  # noqa: RUF012 - as Django writes it
    operations = [  # noqa: RUF012
        migrations.CreateModel(
            name="OutboxRow",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("version", models.IntegerField()),
                ("created_ms", models.BigIntegerField()),
                ("payload", models.TextField()),
                ("error", models.TextField(null=True)),
            ],
            options={"db_table": "bulltask_outbox"},
        ),
    ]
