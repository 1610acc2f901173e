"""The lifespan of an app: what its tasks share while a child runs, on the event loop of its async tasks."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from bulltask.errors import ConfigError
from bulltask.signals.failures import report_failure

__all__ = ["Lifespan", "LifespanFunction"]

LifespanFunction = Callable[[], AsyncIterator[Any] | AbstractAsyncContextManager[Any]]
"""An async generator function, or a function that returns an async context manager, without arguments."""


class Lifespan:
    """The context manager that an app has registered with ``@app.lifespan``, if any.

    Attributes:
        state: What it has yielded in this process.
    """

    def __init__(self) -> None:
        self._function: LifespanFunction | None = None
        self.state: Any = None
        self._leave = asyncio.Event()
        self._left = asyncio.Event()

    @property
    def is_defined(self) -> bool:
        """Whether the app has a lifespan."""
        return self._function is not None

    def define(self, function: LifespanFunction) -> None:
        """Register the function.

        Raises:
            ConfigError: There is one already, or this is not a function without arguments.
        """
        name = getattr(function, "__qualname__", repr(function))
        if self._function is not None:
            other = getattr(self._function, "__qualname__", repr(self._function))
            raise ConfigError(
                f"the app already has the lifespan {other}, so {name} cannot be another one: enter both context "
                "managers in one, with contextlib.AsyncExitStack"
            )
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise ConfigError(f"the lifespan {name} must yield once: `async def {name}(): … yield …`")
        try:
            inspect.signature(function).bind()
        except TypeError as exc:
            raise ConfigError(f"the lifespan {name} is called without arguments: {exc}") from None
        self._function = function

    async def live(self, failed: Callable[[BaseException], None], entered: Callable[[], Awaitable[None]]) -> None:
        """Enter the context manager, and leave it after :meth:`leave`, in the same asyncio task.

        Args:
            failed: Called with what it raises when it is entered.
            entered: Called when it has been entered.
        """
        function, has_entered = self._function, False
        assert function is not None
        manager: Any = asynccontextmanager(function) if inspect.isasyncgenfunction(function) else function
        self._leave = asyncio.Event()
        self._left = asyncio.Event()
        try:
            async with manager() as self.state:
                has_entered = True
                await entered()
                await self._leave.wait()
        except BaseException as exc:  # noqa: BLE001 - a lifespan must not end the child
            if has_entered:
                report_failure(function, "lifespan", exc)
            else:
                failed(exc)
        finally:
            self._left.set()

    async def leave(self) -> None:
        """Leave the context manager; call this on the same event loop."""
        self._leave.set()
        await self._left.wait()
