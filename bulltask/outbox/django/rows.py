"""Access to an outbox's rows through Django's ORM.

Django is imported when the rows are used, because an outbox may be created before Django is set up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bulltask.jobs.errors import ConfigError
from bulltask.outbox.outbox import TABLE, VERSION, Backlog, NewRow, Row, TransferOutcome

__all__ = ["Rows"]


class Rows:
    """Implements :class:`bulltask.outbox.outbox.Store`.

    Args:
        using: The alias of the database.
    """

    def __init__(self, using: str) -> None:
        self._using = using

    def insert(self, row: NewRow) -> None:
        """Insert a row in the current transaction."""
        self._objects().create(version=row.version, created_ms=row.created_ms, payload=row.payload)

    def send_waiting(self, limit: int, send: Callable[[Sequence[Row]], TransferOutcome]) -> TransferOutcome:
        """Read rows, send them, and delete them."""
        from django.db import transaction  # noqa: PLC0415

        waiting = self._objects().filter(error=None, version__lte=VERSION).order_by("id")
        if self._connection().vendor == "postgresql":
            with transaction.atomic(using=self._using):
                return self._finish(send(_read(waiting.select_for_update(skip_locked=True), limit)))
        sent = send(_read(waiting, limit))
        with transaction.atomic(using=self._using):
            return self._finish(sent)

    def backlog(self, now_ms: int) -> Backlog:
        """Count the rows."""
        from django.db.models import Count, Min, Q  # noqa: PLC0415

        waiting = Q(error=None)
        found = self._objects().aggregate(
            waiting=Count("id", filter=waiting),
            failed=Count("id", filter=~waiting),
            oldest_ms=Min("created_ms", filter=waiting),
        )
        oldest_ms = now_ms if found["oldest_ms"] is None else found["oldest_ms"]
        return Backlog(found["waiting"], max(0, now_ms - oldest_ms) / 1000, found["failed"])

    def after_fork(self) -> None:
        """Drop the inherited connection without closing it for the parent."""
        self._connection().connection = None

    def close(self) -> None:
        """Close this thread's connection."""
        self._connection().close()

    def _connection(self) -> Any:
        from django.db import connections  # noqa: PLC0415

        return connections[self._using]

    def _objects(self) -> Any:
        from django.apps import apps  # noqa: PLC0415

        try:
            return apps.get_model(TABLE, "OutboxRow").objects.using(self._using)
        except LookupError as exc:
            raise ConfigError("add 'bulltask.outbox.django' to INSTALLED_APPS, and run `manage.py migrate`") from exc

    def _finish(self, sent: TransferOutcome) -> TransferOutcome:
        if sent.done:
            self._objects().filter(id__in=sent.done).delete()
        for row_id, error in sent.failed.items():
            self._objects().filter(id=row_id).update(error=error)
        return sent


def _read(query: Any, limit: int) -> list[Row]:
    return [Row(row_id, payload) for row_id, payload in query.values_list("id", "payload")[:limit]]
