"""The status of a pipeline, put together from the ledger's head and from what Redis says."""

from __future__ import annotations

import pytest

from bulltask.lake.ledger import BatchRecord, QueueRecord
from bulltask.lake.status import Lag, status_of
from bulltask.lake.stream_retention import StreamRetention

HEAD = BatchRecord(
    "3f0c2a91-00000001", number=2, queues={"mail": QueueRecord(events=3, lost=1)}, ends={"mail": "9-0"},
    lost={"mail": 4, "gone": 7}, steps_ms={"bronze": 1_200, "publish": 300},
)  # fmt: skip


@pytest.mark.parametrize(
    ("limit", "behind", "rate", "left_s"),
    [
        (10_000, 200, 10.0, 980.0),
        (10_000, 10_000, 10.0, 0.0),
        (100, 150, 10.0, 0.0),  # Redis trims when it likes: a stream may be longer than its limit
        (100, 0, None, None),  # nobody knows how soon, where the rate is not known
    ],
)
def test_a_ring_holds_for_as_long_as_it_has_room(
    limit: int, behind: int, rate: float | None, left_s: float | None
) -> None:
    found = status_of("/data/lake", HEAD, {"mail": Lag(StreamRetention("mail", behind, limit, rate), behind, 1.0)})
    assert {one.queue: one.headroom_s for one in found.queues} == {"mail": left_s, "gone": None}


def test_a_status_adds_up_what_was_ever_lost_and_the_steps_of_the_last_batch() -> None:
    found = status_of("/data/lake", HEAD, {})
    assert (found.batches, found.events, found.lost, found.batch_s) == (2, 3, 11, 1.5)
    assert [(one.queue, one.last_id, one.lost) for one in found.queues] == [("gone", None, 7), ("mail", "9-0", 4)]


def test_before_the_first_batch_there_is_nothing_to_add_up() -> None:
    found = status_of("/data/lake", None, {})
    assert (found.batches, found.written_at, found.batch_s, found.lost, found.queues) == (0, None, None, 0, [])
