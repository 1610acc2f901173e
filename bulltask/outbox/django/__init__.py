"""An outbox for Django's ORM, and a Django app for its table (add this package to ``INSTALLED_APPS``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar, overload

from bulltask.app import App
from bulltask.jobs.clock import Duration
from bulltask.jobs.errors import ConfigError, MissingExtraError
from bulltask.outbox.outbox import (
    ERRORS_SHOWN,
    TABLE,
    VERSION,
    Backlog,
    NewRow,
    OutboxBase,
    Row,
    TransferOutcome,
    check_task,
)
from bulltask.registry.canvas import Canvas, Group, GroupChain
from bulltask.registry.results import AsyncResult, GroupResult
from bulltask.registry.task import AnyTask

__all__ = ["Outbox"]

P = ParamSpec("P")
R = TypeVar("R")

if find_spec("django") is None:
    raise MissingExtraError(f"{__name__} needs Django: pip install 'bulltask[django]'")


class Outbox(OutboxBase):
    """An outbox in a database of a Django project.

    ::

        outbox = Outbox(app)

        with transaction.atomic():
            order.save()
            outbox.delay(send_invoice, order.pk)

    Args:
        app: The app. Its workers send the rows.
        using: The alias of the database.
        poll_interval: Seconds or ``timedelta`` between two reads of the table while it is empty.
        idempotency_ttl: Seconds or ``timedelta`` for which Redis remembers the ids of sent jobs (default: a day). If a
            relay is killed before it has deleted a row, the row is sent again. During this time, that adds no job
            twice.

    Raises:
        ConfigError: A duration is invalid.
    """

    def __init__(
        self, app: App, using: str = "default", *, poll_interval: Duration = 0.2, idempotency_ttl: Duration = 86_400
    ) -> None:
        self._rows = _Rows(using)
        super().__init__(app, self._rows, poll_interval=poll_interval, idempotency_ttl=idempotency_ttl)

    def delay(self, task: AnyTask[P, R], /, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """Write a call of a task to the outbox, in the current transaction.

        Outside a transaction, the row is committed immediately.

        Returns:
            The result handle. The job does not exist until the transaction has committed and a relay has sent the job;
            until then, ``get()`` waits.

        Raises:
            TypeError: The arguments do not match the function. Nothing was written.
            EncodeError, PayloadTooLargeError: The arguments cannot be stored. Nothing was written.
            ConfigError: ``bulltask.outbox.django`` is not in ``INSTALLED_APPS``.
        """
        check_task(task)
        return self.send(task.s(*args, **kwargs))

    @overload
    def send(self, call: Group[Any, R] | GroupChain[Any, R]) -> GroupResult[R]: ...  # type: ignore[overload-overlap]
    @overload
    def send(self, call: Canvas[Any, R]) -> AsyncResult[R]: ...

    def send(self, call: Canvas[Any, Any]) -> Any:
        """Write a signature, chain, group or chord to the outbox, in the current transaction.

        ::

            outbox.send(send_invoice.s(order.pk).set(countdown=60))

        ``countdown`` and ``expires`` count from this call. Return value and errors are those of :meth:`delay`.
        """
        return self._write(call, self._rows.insert)

    def relay(self) -> int:
        """Send all committed rows now, for tests and scripts; return their number.

        In a ``TestCase``, this also sends the rows of the test's transaction.

        Raises:
            BrokerError: Redis cannot store them.
        """
        return self._relay_all()


class _Rows:
    """Access to the rows through Django's ORM: implements :class:`bulltask.outbox.outbox.Store`.

    Django is imported when the rows are used, because an outbox may be created before Django is set up.
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
        errors: dict[str, str] = {}
        if found["failed"]:
            first = self._objects().filter(~waiting).order_by("id").values_list("id", "error")[:ERRORS_SHOWN]
            errors = {str(row_id): error for row_id, error in first}
        return Backlog(found["waiting"], max(0, now_ms - oldest_ms) / 1000, found["failed"], errors, TABLE)

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
