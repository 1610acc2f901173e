"""A pipeline's status, from the ledger's head and the streams in Redis."""

from __future__ import annotations

import pytest

from bulltask.lake.ledger import BatchRecord, QueueRecord
from bulltask.lake.status import Lag, status_of
from bulltask.transport.streams import StreamRetention

HEAD = BatchRecord(
    number=2, queues={"mail": QueueRecord(events=3, lost=1)}, last_ids={"mail": "9-0"},
    lost={"mail": 4, "deleted": 7}, steps_ms={"bronze": 1_200, "publish": 300},
)  # fmt: skip


@pytest.mark.parametrize(
    ("limit", "behind", "rate", "left_s"),
    [
        (10_000, 200, 10.0, 980.0),
        (10_000, 10_000, 10.0, 0.0),
        (100, 150, 10.0, 0.0),  # Redis trims approximately: a stream may be longer than its limit
        (100, 0, None, None),  # unknown without a rate
    ],
)
def test_a_queues_headroom_depends_on_its_lag_limit_and_rate(
    limit: int, behind: int, rate: float | None, left_s: float | None
) -> None:
    status = status_of("/data/lake", HEAD, {"mail": Lag(StreamRetention("mail", behind, limit, rate), behind, 1.0)})
    assert {queue.queue: queue.headroom_s for queue in status.queues} == {"mail": left_s, "deleted": None}


def test_the_status_adds_up_lost_events_and_the_steps_of_the_last_batch() -> None:
    status = status_of("/data/lake", HEAD, {})
    assert (status.batches, status.events, status.lost, status.batch_s) == (2, 3, 11, 1.5)
    queues = [(queue.queue, queue.last_id, queue.lost) for queue in status.queues]
    assert queues == [("deleted", None, 7), ("mail", "9-0", 4)]


def test_the_status_before_the_first_batch_is_empty() -> None:
    status = status_of("/data/lake", None, {})
    assert (status.batches, status.written_at, status.batch_s, status.lost, status.queues) == (0, None, None, 0, [])
