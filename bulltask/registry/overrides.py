"""Sends through an ``apply_async`` or ``send_task`` that a subclass, or a test's patch, has replaced.

As in Celery, all sends pass through these methods: ``delay`` calls ``apply_async``, which calls ``app.send_task``. If
nothing has replaced them, the detour is left out.

The jobs of a canvas are stored in one transaction, and a coroutine must not block. In these cases, the replaced method
is called first, for each call. When it calls the original method, that method records the call instead of sending it.
The recorded calls are then sent together. If it does not call the original method, as a mock, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, cast

import uuid_utils

from bulltask.errors import ConfigError
from bulltask.jobs.job import NewJob
from bulltask.registry.call_options import CallOptions
from bulltask.registry.callee import Callee
from bulltask.registry.canvas import Canvas
from bulltask.registry.signature import Signature, is_call
from bulltask.registry.single_jobs import handle
from bulltask.result import AsyncResult

__all__ = [
    "check_overrides_passed",
    "is_overridden",
    "pass_overrides",
    "record_call",
    "recorded",
    "send_call",
    "send_recorded",
]


class _Recorder:
    """Records a call of a task that reaches the original method.

    Attributes:
        call: The recorded call, ``None`` before.
    """

    def __init__(self, task: Callee) -> None:
        self._task = task
        self.call: Signature[Any, Any] | None = None

    def takes(self, name: str) -> bool:
        """Return whether this is the call to record; other calls that the replaced method makes are sent."""
        return self.call is None and name == self._task.name

    def take(self, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> AsyncResult[Any]:
        """Record the call, and return the handle of the job that will be sent."""
        sender = self._task.sender
        call = self.call = Signature(self._task, args, kwargs, options)
        call.has_passed_overrides = True
        job_id = call.options.job_id or str(uuid_utils.uuid7())
        call.planned_id = job_id
        own = getattr(self._task, "options", None)
        queue = call.options.queue or (own and own.queue) or sender.config.default_queue
        return AsyncResult(job_id, queue, sender.results, None, self._task.result_decoder)


_recorder: ContextVar[_Recorder | None] = ContextVar("bulltask_recorder", default=None)


def record_call(task: Callee, send: Callable[[], Any]) -> tuple[Signature[Any, Any] | None, Any]:
    """Call ``send``, which sends a call of ``task``, and return that call instead of sending it, and what it returned.

    The call is ``None`` if the original method was not called.
    """
    recorder = _Recorder(task)
    token = _recorder.set(recorder)
    try:
        returned = send()
    finally:
        _recorder.reset(token)
    return recorder.call, returned


def send_call(
    task: Callee, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> AsyncResult[Any]:
    """Send a call that has passed all replaced methods, or record it."""
    if (recorder := _recorder.get()) is not None and recorder.takes(task.name):
        return recorder.take(args, kwargs, options)
    if "link" in options or "link_error" in options:
        call: Signature[Any, Any] = Signature(task, args, kwargs, options)
        call.has_passed_overrides = True
        return cast(AsyncResult[Any], task.sender.send_canvas(call))
    sender = task.sender
    job = task.build(task.bind_json(args, kwargs, options.get("serializer")), CallOptions.of(options))
    return handle(task, sender, job, sender.send([job])[0])


async def send_recorded(call: Signature[Any, Any] | None, returned: Any) -> AsyncResult[Any]:
    """Send a recorded call for asyncio; without one, return what the replaced method has returned."""
    if call is None:
        return cast(AsyncResult[Any], returned)
    return cast(AsyncResult[Any], await call.task.sender.asend_canvas(call))


def recorded(call: Signature[Any, Any] | NewJob) -> tuple[Signature[Any, Any] | NewJob | None, Any]:
    """Return a single call, or what it becomes in a replaced method; see :func:`record_call`."""
    if is_call(call) and call.task.is_overridden and not call.has_passed_overrides:
        return record_call(call.task, call.send_by_public_method)
    return call, None


def is_overridden(canvas: Canvas[Any, Any]) -> bool:
    """Return whether a call of a canvas, or one of its callbacks, must pass a replaced method."""
    return any(call.task.is_overridden for call in _every_call(canvas) if not call.has_passed_overrides)


def pass_overrides(canvas: Canvas[Any, Any]) -> bool:
    """Pass the calls of a canvas through the replaced methods, which may change them.

    Returns:
        Whether all calls have reached the original method; if not, nothing may be sent.
    """
    complete = True
    for call in _every_call(canvas):
        if call.has_passed_overrides or not call.task.is_overridden:
            continue
        recorded, _ = record_call(call.task, call.send_by_public_method)
        if recorded is None:
            complete = False
        else:
            call.become(recorded)
    return complete


def check_overrides_passed(canvas: Canvas[Any, Any]) -> Canvas[Any, Any]:
    """Return a copy of a canvas whose calls have passed the replaced methods.

    Raises:
        ConfigError: A replaced method has not called the original one.
    """
    if not is_overridden(canvas):
        return canvas
    copy: Canvas[Any, Any] = canvas.clone()
    if not pass_overrides(copy):
        raise ConfigError(
            f"{canvas!r:.200} cannot be sent: an overridden apply_async() or send_task() did not call super()"
        )
    return copy


def _every_call(canvas: Canvas[Any, Any]) -> Iterator[Signature[Any, Any]]:
    """Iterate over the calls of a canvas and its callbacks. A call is yielded before its callbacks."""
    if is_call(canvas):
        yield canvas
    for part in canvas.parts():
        yield from _every_call(part)
