"""The bulltask app, with default settings; ``BENCH_ASYNC=1`` makes the task a coroutine function."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from benchmarks.apps.counter import count
from bulltask import App
from bulltask.result import AsyncResult

app = App("bench", broker_url=os.environ["BENCH_BROKER"])


def count_job(index: int) -> int:
    count(index)
    return index


async def count_job_async(index: int) -> int:
    return count_job(index)


noop: Any = app.task(name="noop")(count_job_async if os.environ.get("BENCH_ASYNC") == "1" else count_job)


def send(index: int) -> AsyncResult[int]:
    result: AsyncResult[int] = noop.delay(index)
    return result


def send_many(indexes: Sequence[int]) -> None:
    noop.delay_many([(index,) for index in indexes])


def wait(handle: AsyncResult[int]) -> int:
    return handle.get(timeout=20)
