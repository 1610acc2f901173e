"""The records of batches: the metadata of the commits that complete them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bulltask.errors import DecodeError
from bulltask.lake.ledger import BatchRecord, QueueRecord, last_record, records, records_after
from bulltask.lake.storage import Lake
from bulltask.lake.tables import OPEN_EVENTS
from tests.support.lake import LakeBuilder

RECORD = BatchRecord(
    number=1, queues={"mail": QueueRecord(events=3, first="1-0", last="9-0")}, last_ids={"mail": "9-0"},
    lost={"mail": 5}, open_job_events=2, steps_ms={"bronze": 7}, query="3f0c2a91", queries={"3f0c2a91": 17},
)  # fmt: skip


def test_a_record_is_read_back_as_it_was_written(lake: LakeBuilder) -> None:
    assert last_record(lake.lake) is None
    lake.open_events([], 1, RECORD)
    assert last_record(Lake(lake.root)) == RECORD


def test_records_are_read_newest_first_past_commits_without_one(lake: LakeBuilder) -> None:
    for number in range(1, 31):
        lake.open_events([], number, replace(RECORD, number=number))
        if number % 10 == 0:
            assert lake.lake.commit(OPEN_EVENTS, [])
    assert [record.number for record in records(Lake(lake.root))] == list(range(30, 0, -1))
    assert [record.number for record in records_after(lake.lake, 27)] == [28, 29, 30]


def test_a_record_of_another_version_is_an_error(lake: LakeBuilder) -> None:
    assert lake.lake.commit(OPEN_EVENTS, [], metadata={"version": 1, "ingest_id": "3f0c2a91-00000000"})
    with pytest.raises(DecodeError, match="has version 1, but this bulltask reads version 2"):
        last_record(lake.lake)
