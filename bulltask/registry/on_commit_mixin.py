"""``OnCommitMixin``: sends calls of a task after a Django transaction has committed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Generic, ParamSpec, TypeVar, Unpack, cast

from bulltask.errors import MissingExtraError
from bulltask.jobs.job import JobRef, NewJob
from bulltask.ports import Sender
from bulltask.registry.call_options import CallOptions
from bulltask.registry.option_types import SingleCallKeywords
from bulltask.registry.overrides import record_call
from bulltask.result import AsyncResult

__all__ = ["OnCommitMixin"]

CP = ParamSpec("CP")
CR = TypeVar("CR")


class OnCommitMixin(ABC, Generic[CP, CR]):
    """A base class of tasks: sends calls after a Django transaction has committed."""

    @property
    @abstractmethod
    def sender(self) -> Sender:
        """The app that sends the calls."""

    @property
    @abstractmethod
    def result_decoder(self) -> Callable[[Any], CR] | None:
        """Converts a JSON result to the type of the return value."""

    @property
    @abstractmethod
    def is_overridden(self) -> bool:
        """Whether a replaced method sends the calls."""

    @abstractmethod
    def bind_json(self, args: Sequence[Any], kwargs: Mapping[str, Any], serializer: str | None = None) -> Any:
        """Return a call's arguments in their JSON form, unless they will be pickled."""

    @abstractmethod
    def build(self, data: Any, call: CallOptions) -> NewJob:
        """Return the job for bound arguments."""

    def delay_on_commit(self, *args: CP.args, **kwargs: CP.kwargs) -> AsyncResult[CR]:
        """Send a call when the current Django transaction commits (Celery's ``delay_on_commit``).

        Outside a transaction, the call is sent immediately. If the transaction is rolled back, nothing is sent. The
        arguments are checked and converted now.

        If the send fails, a ``BrokerError`` is raised where the transaction ends, after the database has committed. To
        have the error logged instead, use :meth:`apply_async_on_commit` with ``robust``.

        Returns:
            The result handle. Its id is final, but the job does not exist before the commit. (Celery returns ``None``.)

        Raises:
            TypeError, EncodeError, PayloadTooLargeError: As for ``delay``.
            MissingExtraError: Django is not installed.
        """
        return self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        using: str | None = None,
        robust: bool = False,
        **options: Unpack[SingleCallKeywords],
    ) -> AsyncResult[CR]:
        """Send a call with options when the current Django transaction commits.

        Args:
            args, kwargs: The arguments.
            using: The alias of the database: the call is sent when the transaction in this database commits. Default:
                ``"default"``.
            robust: If the send fails, the error is logged instead of raised, and the transaction's other callbacks
                run. The call is then lost.
            options: As for ``apply_async``, except ``link`` and ``link_error``. ``countdown`` and ``expires`` count
                from the commit.

        Returns:
            As for :meth:`delay_on_commit`. If the call is a duplicate (``deduplication``), its id changes at the commit
            to that of the existing job.

        Raises:
            TypeError: An option is unknown. Also raises the errors of :meth:`delay_on_commit`.
        """
        if linked := options.keys() & {"link", "link_error"}:
            raise TypeError(
                f"apply_async_on_commit() does not accept {min(linked)}; use "
                "transaction.on_commit(lambda: task.apply_async(…))"
            )
        if self.is_overridden:
            task: Any = self
            call, returned = record_call(task, lambda: task.apply_async(args, kwargs, **options))
            return (
                cast(AsyncResult[CR], returned)
                if call is None
                else self._send_on_commit(call.job(), using, robust=robust)
            )
        job = self.build(self.bind_json(args, kwargs or {}, options.get("serializer")), CallOptions.of(options))
        return self._send_on_commit(job, using, robust=robust)

    def _send_on_commit(self, job: NewJob, using: str | None = None, *, robust: bool = False) -> AsyncResult[CR]:
        sender = self.sender
        result = AsyncResult(job.id, job.queue, sender.results, sender.now_ms(), self.result_decoder)

        def send() -> None:
            (stored_id,) = sender.send([job])
            if stored_id != job.id:
                result.ref = JobRef(job.queue, stored_id)

        send.__qualname__ = f"the send of job {job.id} of task {job.name}"  # Django logs this name, if robust
        _transaction().on_commit(send, using=using, robust=robust)
        return result


def _transaction() -> ModuleType:
    try:
        return import_module("django.db.transaction")
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] != "django":
            raise
        raise MissingExtraError(
            "delay_on_commit() needs Django, which is not installed: pip install 'bulltask[django]'"
        ) from exc
