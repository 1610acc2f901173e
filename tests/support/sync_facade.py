"""Drive the async twins of ``Queue``, ``Job`` … with sync tests, so that one test covers both."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any

from bulltask.queue import AsyncJob, AsyncQueue
from bulltask.queue.aio.repeatables import AsyncRepeatables
from bulltask.queue.aio.schedulers import AsyncJobSchedulers

__all__ = ["SyncFacade"]

_DRIVEN = (AsyncJob, AsyncQueue, AsyncRepeatables, AsyncJobSchedulers)


class SyncFacade:
    """An async object whose coroutines are awaited here: it looks like its sync twin."""

    def __init__(self, target: Any, runner: asyncio.Runner) -> None:
        self.target, self._runner = target, runner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.target, name)
        if inspect.isasyncgenfunction(found):
            return lambda *args, **options: self._walk(found(*args, **options))
        if not inspect.iscoroutinefunction(found):
            return self._wrapped(found)

        @functools.wraps(found)
        def call(*args: Any, **options: Any) -> Any:
            return self._wrapped(self._runner.run(found(*args, **options)))

        return call

    def _walk(self, items: AsyncIterator[Any]) -> Iterator[Any]:
        nothing = object()

        async def following() -> Any:
            return await anext(items, nothing)

        while (item := self._runner.run(following())) is not nothing:
            yield self._wrapped(item)

    def _wrapped(self, value: Any) -> Any:
        if isinstance(value, _DRIVEN):
            return SyncFacade(value, self._runner)
        if isinstance(value, list):
            return [self._wrapped(item) for item in value]
        return value

    def __repr__(self) -> str:
        return f"driven {self.target!r}"
