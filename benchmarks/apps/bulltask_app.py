"""The bulltask app, with default settings; ``BENCH_ASYNC=1`` makes the task a coroutine function."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from benchmarks.apps.body import arun, run
from bulltask import App
from bulltask.result import AsyncResult

app = App("bench", broker_url=os.environ["BENCH_BROKER"])


noop: Any = app.task(name="noop")(arun if os.environ.get("BENCH_ASYNC") == "1" else run)


def send(index: int) -> AsyncResult[int]:
    result: AsyncResult[int] = noop.delay(index)
    return result


def send_many(indexes: Sequence[int]) -> None:
    noop.delay_many([(index,) for index in indexes])


def wait(handle: AsyncResult[int]) -> int:
    return handle.get(timeout=20)
