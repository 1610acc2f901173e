"""Calls the hooks around a send: middleware, and ``before_task_publish`` and ``after_task_publish``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from bulltask.config.config import Config
from bulltask.errors import BulltaskError
from bulltask.hooks.middleware import Middleware, MiddlewareList
from bulltask.hooks.outgoing import OutgoingJob
from bulltask.jobs import codec
from bulltask.jobs.flow import PlannedJob, in_order
from bulltask.jobs.job import NewJob
from bulltask.jobs.names import FAN_OUT
from bulltask.jobs.options import check_size
from bulltask.payloads.payload_codec import PayloadCodec
from bulltask.signals.catalog import PUBLISH_SIGNALS, after_task_publish, before_task_publish
from bulltask.signals.failures import report_failure

__all__ = ["SendHooks"]

_Send = Callable[[Sequence[NewJob]], list[str]]
_AsyncSend = Callable[[Sequence[NewJob]], Awaitable[list[str]]]


class SendHooks:
    """The hooks around an app's sends.

    The job is sent even if a hook raises an ``Exception``. If the headers that the hooks have set cannot be stored, the
    job is sent with the sender's headers.

    Args:
        middleware: The app's middleware.
        config: Returns the app's settings.
    """

    def __init__(self, middleware: MiddlewareList, config: Callable[[], Config]) -> None:
        self._middleware, self._config = middleware, config

    @property
    def has_hooks(self) -> bool:
        """Whether there is any hook."""
        return PUBLISH_SIGNALS.active or bool(self._middleware.sending)

    def send(self, jobs: Sequence[NewJob], send: _Send) -> list[str]:
        """Send ``jobs`` with ``send``, and call the hooks before and after it; return their ids."""
        payloads = PayloadCodec(self._config())
        outgoing = [OutgoingJob.of(job, payloads) for job in jobs]
        for job in outgoing:
            for one in self._middleware.sending:
                _call(one.before_send, job)
        changed = [self._after_signal(job) for job in outgoing]
        raised: BaseException | None = None
        try:
            ids = send(changed)
            _publish(outgoing, ids)
        except BaseException as exc:
            raised = exc
            raise
        finally:
            for one, job in self._after(outgoing):
                _call(one.after_send, job, raised)
        return ids

    async def asend(
        self, jobs: Sequence[NewJob], send: Callable[[Sequence[NewJob]], Awaitable[list[str]]]
    ) -> list[str]:
        """:meth:`send` for asyncio."""
        payloads = PayloadCodec(self._config())
        outgoing = [OutgoingJob.of(job, payloads) for job in jobs]
        for job in outgoing:
            for one in self._middleware.sending:
                await _acall(one.abefore_send, job)
        changed = [self._after_signal(job) for job in outgoing]
        raised: BaseException | None = None
        try:
            ids = await send(changed)
            _publish(outgoing, ids)
        except BaseException as exc:
            raised = exc
            raise
        finally:
            for one, job in self._after(outgoing):
                await _acall(one.aafter_send, job, raised)
        return ids

    def send_canvas(self, roots: Sequence[PlannedJob], send: Callable[[Sequence[PlannedJob]], None]) -> None:
        """Send the jobs of a canvas with ``send``, and call the hooks before and after it for each call of a task."""
        if not self.has_hooks:
            send(roots)
            return
        planned = _calls(roots)

        def send_changed(jobs: Sequence[NewJob]) -> list[str]:
            ids = _change(planned, jobs)
            send(roots)
            return ids

        self.send([one.job for one in planned], send_changed)

    async def asend_canvas(
        self, roots: Sequence[PlannedJob], send: Callable[[Sequence[PlannedJob]], Awaitable[None]]
    ) -> None:
        """:meth:`send_canvas` for asyncio."""
        if not self.has_hooks:
            await send(roots)
            return
        planned = _calls(roots)

        async def send_changed(jobs: Sequence[NewJob]) -> list[str]:
            ids = _change(planned, jobs)
            await send(roots)
            return ids

        await self.asend([one.job for one in planned], send_changed)

    def _after(self, outgoing: Sequence[OutgoingJob]) -> list[tuple[Middleware, OutgoingJob]]:
        return [(one, job) for job in outgoing for one in reversed(self._middleware.sending)]

    def _after_signal(self, outgoing: OutgoingJob) -> NewJob:
        """Send ``before_task_publish``, and return the job with the headers of all hooks."""
        if before_task_publish.receivers(outgoing.task):
            message = _message(outgoing)
            more = {"properties": _properties(outgoing.job), "declare": [], "retry_policy": {}}
            before_task_publish.send(outgoing.task, **message, **more)
            own = {"id": outgoing.id, "task": outgoing.task}
            headers: dict[Any, Any] = message["headers"]
            outgoing.headers = {name: value for name, value in headers.items() if own.get(name) != value}
        return self._with_headers(outgoing)

    def _with_headers(self, outgoing: OutgoingJob) -> NewJob:
        job = outgoing.job
        try:
            what = f"headers of task {job.name}, set by a hook"
            headers = codec.encode(outgoing.headers, what=what).decode() if outgoing.headers else ""
            if headers == job.options.headers:
                return job
            options = replace(job.options, headers=headers)
            if (limit := self._config().max_payload) is not None:
                check_size(job.data, options, limit, what)
        except (BulltaskError, TypeError, ValueError) as exc:
            report_failure(type(self), "headers", exc)
            return job
        return replace(job, options=options)


def _calls(roots: Sequence[PlannedJob]) -> list[PlannedJob]:
    """Return the calls of tasks in a canvas, without the jobs that bulltask adds between them."""
    return [planned for planned in in_order(roots) if planned.job.name != FAN_OUT]


def _change(planned: Sequence[PlannedJob], jobs: Sequence[NewJob]) -> list[str]:
    for one, job in zip(planned, jobs, strict=True):
        one.job = job
    return [job.id for job in jobs]


def _publish(outgoing: Sequence[OutgoingJob], ids: Sequence[str]) -> None:
    """Send ``after_task_publish`` for jobs that Redis has stored under ``ids``."""
    for job, stored_id in zip(outgoing, ids, strict=True):
        job.stored_id = stored_id
        if after_task_publish.receivers(job.task):
            after_task_publish.send(job.task, **_message(job))


def _message(outgoing: OutgoingJob) -> dict[str, Any]:
    headers = {"id": outgoing.id, "task": outgoing.task, **outgoing.headers}
    return {"body": outgoing.body, "exchange": "", "routing_key": outgoing.queue, "headers": headers}


def _properties(job: NewJob) -> dict[str, Any]:
    return {"correlation_id": job.id, "priority": job.options.priority}


def _call(hook: Callable[..., Any], *args: Any) -> None:
    try:
        hook(*args)
    except Exception as exc:  # noqa: BLE001 - see SendHooks
        report_failure(hook, hook.__name__, exc)


async def _acall(hook: Callable[..., Awaitable[Any]], *args: Any) -> None:
    try:
        await hook(*args)
    except Exception as exc:  # noqa: BLE001 - see SendHooks
        report_failure(hook, getattr(hook, "__name__", ""), exc)
