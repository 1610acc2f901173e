"""How a thread waits for a result while Redis is unavailable, without a server."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from bulltask.errors import BrokerUnavailableError
from bulltask.jobs.job import JobRef
from bulltask.jobs.stored_job import Finished
from bulltask.transport import results
from bulltask.transport.keys import QueueKeys
from bulltask.transport.results import Results


def test_a_waiter_pauses_between_its_reads_during_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, finished = BrokerUnavailableError("gone"), Finished(True, "1")
    replies: list[Any] = [("0-0", None), gone, gone, ("0-0", finished)]
    pauses: list[float] = []

    def reply(_calls: object) -> Any:
        if isinstance(next_reply := replies.pop(0), BaseException):
            raise next_reply
        return next_reply

    def lose_connection(_call: object) -> Any:
        raise gone

    client = SimpleNamespace(run_many=reply, run=lose_connection)
    waiters: Any = SimpleNamespace(client=lambda: nullcontext(client))
    monkeypatch.setattr(results, "threading", SimpleNamespace(Event=lambda: SimpleNamespace(wait=pauses.append)))
    nothing: Any = None
    reader = Results(nothing, waiters, nothing, nothing, lambda queue: QueueKeys("bull", queue, queue), nothing)
    assert reader.wait(JobRef("mail", "7"), None, None) == finished
    assert pauses == [0.2] * 3
