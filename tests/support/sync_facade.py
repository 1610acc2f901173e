"""Call the async forms of ``Queue``, ``Job`` … from sync tests, so that one test covers both forms."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any

from bulltask.queue import AsyncBulkChange, AsyncJob, AsyncQueue
from bulltask.queue.aio.repeatables import AsyncRepeatables
from bulltask.queue.aio.schedulers import AsyncJobSchedulers

__all__ = ["SyncFacade"]

_WRAPPED = (AsyncBulkChange, AsyncJob, AsyncQueue, AsyncRepeatables, AsyncJobSchedulers)


class SyncFacade:
    """An async object with blocking methods, like its sync form."""

    def __init__(self, target: Any, runner: asyncio.Runner) -> None:
        self.target, self._runner = target, runner

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.target, name)
        if inspect.isasyncgenfunction(attribute):
            return lambda *args, **options: self._iterate(attribute(*args, **options))
        if not inspect.iscoroutinefunction(attribute):
            if inspect.ismethod(attribute):
                return lambda *args, **options: self._wrap(attribute(*args, **options))
            return self._wrap(attribute)

        @functools.wraps(attribute)
        def call(*args: Any, **options: Any) -> Any:
            return self._wrap(self._runner.run(attribute(*args, **options)))

        return call

    def _iterate(self, items: AsyncIterator[Any]) -> Iterator[Any]:
        nothing = object()

        async def next_item() -> Any:
            return await anext(items, nothing)

        while (item := self._runner.run(next_item())) is not nothing:
            yield self._wrap(item)

    def _wrap(self, value: Any) -> Any:
        if isinstance(value, _WRAPPED):
            return SyncFacade(value, self._runner)
        if isinstance(value, list):
            return [self._wrap(item) for item in value]
        return value

    def __repr__(self) -> str:
        return f"SyncFacade({self.target!r})"
