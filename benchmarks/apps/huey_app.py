"""The Huey app, with default settings; results are stored."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from huey import RedisHuey

from benchmarks.apps.body import run

logging.getLogger("huey").setLevel(logging.WARNING)
# Without notify_result, the producer of the latency measurement would poll.
huey = RedisHuey("bench", host="127.0.0.1", port=urlsplit(os.environ["BENCH_BROKER"]).port, notify_result=True)


@huey.task(name="noop")
def noop(index: int) -> int:
    return run(index)


def send(index: int) -> Any:
    return noop(index)


def send_many(indexes: Sequence[int]) -> None:
    for index in indexes:  # Huey has no bulk send
        noop(index)


def wait(handle: Any) -> int:
    return int(handle.get(blocking=True, timeout=20))
