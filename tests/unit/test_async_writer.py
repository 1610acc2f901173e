"""How many outcomes of async jobs are written at the same time, without a server."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from bulltask.worker.async_loop import AsyncOutcomeWriter
from bulltask.worker.outcomes import CompletedOutcome


async def most_writes_at_once(duration_ms: float) -> int:
    """Write the outcomes of 20 jobs that end at the same time; return how many writes were waiting for a reply."""
    writing: set[object] = set()
    most = 0

    async def run(call: object) -> None:
        nonlocal most
        writing.add(call)
        most = max(most, len(writing))
        await asyncio.sleep(0)
        writing.remove(call)

    finisher: Any = SimpleNamespace(
        have_hooks=lambda _: False,
        call=lambda *_, **__: (object(), False),
        after_finish=lambda *_: None,
        emit=lambda *_: None,
        counts=None,
    )
    client: Any = SimpleNamespace(run=run)
    backoff: Any = SimpleNamespace(reset=lambda: None)
    acquired: Any = SimpleNamespace(slot=SimpleNamespace(enter=lambda *_: None))
    writer = AsyncOutcomeWriter(finisher, lambda: client, backoff)
    await asyncio.gather(*(writer.write(acquired, CompletedOutcome(b"1", 1), duration_ms) for _ in range(20)))
    return most


@pytest.mark.parametrize(("duration_ms", "most"), [(0.1, 20), (50.0, 4)])
def test_jobs_that_take_longer_and_end_together_are_written_in_small_groups(duration_ms: float, most: int) -> None:
    assert asyncio.run(most_writes_at_once(duration_ms)) == most
