"""The bulltask app, with default settings."""

from __future__ import annotations

import os
from collections.abc import Sequence

from benchmarks.apps.counter import count
from bulltask import App
from bulltask.result import AsyncResult

app = App("bench", broker_url=os.environ["BENCH_BROKER"])


@app.task(name="noop")
def noop(index: int) -> int:
    count(index)
    return index


def send(index: int) -> AsyncResult[int]:
    return noop.delay(index)


def send_many(indexes: Sequence[int]) -> None:
    noop.delay_many([(index,) for index in indexes])


def wait(handle: AsyncResult[int]) -> int:
    return handle.get(timeout=20)
