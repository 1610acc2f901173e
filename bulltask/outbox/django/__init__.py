"""An outbox for Django's ORM, and a Django app for its table (add this package to ``INSTALLED_APPS``)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar, overload

from bulltask.app import App
from bulltask.jobs.clock import Duration
from bulltask.jobs.errors import MissingExtraError
from bulltask.outbox.django.rows import Rows
from bulltask.outbox.outbox import OutboxBase, check_task
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
        self._rows = Rows(using)
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
