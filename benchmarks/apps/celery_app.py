"""The Celery app, with default settings except JSON; ``BENCH_RESULTS=0`` disables results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from celery import Celery, group

from benchmarks.apps.body import run

BROKER = os.environ["BENCH_BROKER"]
app = Celery("bench", broker=BROKER, backend=f"{BROKER.removesuffix('/0')}/1")
app.conf.update(
    task_serializer="json",
    result_serializer="json",
    accept_content=["json"],
    task_ignore_result=os.environ.get("BENCH_RESULTS") == "0",
    broker_connection_retry_on_startup=True,
)


@app.task(name="noop")  # type: ignore[untyped-decorator]
def noop(index: int) -> int:
    return run(index)


def send(index: int) -> Any:
    return noop.delay(index)


def send_many(indexes: Sequence[int]) -> None:
    # Celery has no bulk send; a group is the closest equivalent.
    group(noop.s(index) for index in indexes).apply_async()


def wait(handle: Any) -> int:
    return int(handle.get(timeout=20))
