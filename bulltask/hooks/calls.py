"""Calls a hook so that whatever it does affects nothing but the hook itself."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Callable, Coroutine
from typing import Any, Final

from bulltask.errors import Interrupt
from bulltask.process import exit_if_forked
from bulltask.signals.failures import report_failure
from bulltask.signals.signal import Signal

__all__ = ["MAY_END_ATTEMPT", "acall_hook", "asend_signal", "call_hook", "send_signal"]

MAY_END_ATTEMPT: Final = (Interrupt, asyncio.CancelledError)
"""Exceptions that end the attempt if a hook before the task raises them, or if a cancel request raises them there."""


def call_hook(hook: Callable[..., Any], on: str, *args: Any, passes: tuple[type[BaseException], ...] = ()) -> None:
    """Call a hook, and log what it raises, including ``SystemExit``. A process that the hook forks exits.

    Args:
        hook: The hook.
        on: What it is called for, for the log line.
        args: The arguments.
        passes: Exception classes that are re-raised instead of logged.
    """
    pid, raised = os.getpid(), None
    try:
        hook(*args)
    except BaseException as exc:  # noqa: BLE001 - see the docstring
        raised = exc
    _handle(pid, hook, on, raised, passes)


async def acall_hook(
    hook: Callable[..., Coroutine[Any, Any, Any]], on: str, *args: Any, passes: tuple[type[BaseException], ...] = ()
) -> None:
    """:func:`call_hook` for coroutine functions."""
    pid, raised = os.getpid(), None
    try:
        await hook(*args)
    except BaseException as exc:  # noqa: BLE001 - see call_hook()
        raised = exc
    _handle(pid, hook, on, raised, passes)


def send_signal(signal: Signal, sender: Any, passes: tuple[type[BaseException], ...] = (), **named: Any) -> None:
    """:func:`call_hook` for every receiver of a signal.

    Args:
        signal: The signal.
        sender: Its sender.
        passes: As for :func:`call_hook`.
        named: The other arguments of the receivers.
    """
    for receiver in signal.receivers(sender):
        if signal.is_async and inspect.iscoroutinefunction(receiver):
            continue  # see asend_signal()
        pid, raised = os.getpid(), None
        try:
            receiver(signal=signal, sender=sender, **named)
        except BaseException as exc:  # noqa: BLE001 - see call_hook()
            raised = exc
        _handle(pid, receiver, signal.name, raised, passes)


async def asend_signal(signal: Signal, sender: Any, **named: Any) -> None:
    """:func:`send_signal` for the receivers that are coroutine functions."""
    for receiver in signal.receivers(sender):
        if inspect.iscoroutinefunction(receiver):
            call = functools.partial(receiver, signal=signal, sender=sender, **named)
            await acall_hook(functools.update_wrapper(call, receiver), signal.name)


def _handle(
    pid: int, hook: object, on: str, raised: BaseException | None, passes: tuple[type[BaseException], ...]
) -> None:
    exit_if_forked(pid, raised)
    if raised is None:
        return
    if isinstance(raised, passes):
        raise raised
    report_failure(hook, on, raised)
