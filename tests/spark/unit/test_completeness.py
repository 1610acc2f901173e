"""A batch must have as many events as its start and end offsets imply; no JVM, no Redis."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from bulltask.errors import LakeError
from bulltask.lake.storage import Layout, QueueRecord, batch_ingest_id
from bulltask.spark.batches import check_complete
from bulltask.spark.source.offsets import START, Offsets, QueueOffset, StreamId, encode_offsets

FIVE, NINE = QueueOffset(StreamId(50, 0), 5), QueueOffset(StreamId(90, 0), 9)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


def store_offsets(layout: Layout, number: int, end: Offsets, begin: Offsets | None = None) -> None:
    """Store the offsets of a batch, as Spark does before it reads the batch."""
    directory = layout.checkpoint / "offsets"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / str(number)).write_text(f"v1\n{{}}\n{json.dumps(encode_offsets(end, begin))}")


def check(layout: Layout, number: int, records: Mapping[str, QueueRecord], *, hash_tag: bool = True) -> None:
    check_complete(layout, batch_ingest_id("3f0c2a91", number), records, hash_tag=hash_tag)


@pytest.mark.parametrize("records", [QueueRecord(4), QueueRecord(1, lost=3, gaps=1), QueueRecord(0, lost=4, gaps=2)])
def test_a_batch_is_complete_if_rows_and_losses_match_the_offsets(layout: Layout, records: QueueRecord) -> None:
    store_offsets(layout, 0, {"{mail}": FIVE})
    store_offsets(layout, 1, {"{mail}": NINE, "{new}": START})
    check(layout, 1, {"mail": records})


@pytest.mark.parametrize("records", [{}, {"mail": QueueRecord(3)}, {"mail": QueueRecord(5)}, {"other": QueueRecord(4)}])
def test_a_batch_with_too_few_or_too_many_events_is_rejected(
    layout: Layout, records: Mapping[str, QueueRecord]
) -> None:
    store_offsets(layout, 0, {"{mail}": FIVE})
    store_offsets(layout, 1, {"{mail}": NINE})
    with pytest.raises(LakeError, match="should contain 4 events from queue 'mail'"):
        check(layout, 1, records)


def test_a_first_batch_is_checked_only_if_its_start_offset_was_stored(layout: Layout) -> None:
    store_offsets(layout, 0, {"{mail}": NINE}, {"{mail}": FIVE})
    check(layout, 0, {"mail": QueueRecord(4)})
    with pytest.raises(LakeError, match="BULLTASK_BATCH_INCOMPLETE"):
        check(layout, 0, {})
    store_offsets(layout, 0, {"{mail}": NINE})
    check(layout, 0, {})


@pytest.mark.parametrize(
    "end",
    [QueueOffset(StreamId(90, 0), None), QueueOffset(StreamId(0, 0), 0, generation=1)],
    ids=["uncounted", "recreated"],
)
def test_a_batch_without_counts_has_at_least_one_row_or_gap(layout: Layout, end: QueueOffset) -> None:
    store_offsets(layout, 0, {"{mail}": FIVE})
    store_offsets(layout, 1, {"{mail}": end})
    check(layout, 1, {"mail": QueueRecord(0, gaps=1)})
    with pytest.raises(LakeError, match="from queue 'mail'"):
        check(layout, 1, {})


def test_a_queue_skipped_because_of_a_duplicate_name_is_not_checked(layout: Layout) -> None:
    """Node's ``mail`` was read until ``{mail}`` appeared; the offsets still contain ``mail``."""
    store_offsets(layout, 0, {"mail": FIVE, "{mail}": START})
    store_offsets(layout, 1, {"mail": FIVE, "{mail}": NINE})
    check(layout, 1, {"mail": QueueRecord(9)})
    check(layout, 1, {"mail": QueueRecord(0), "{mail}": QueueRecord(9)}, hash_tag=False)
    with pytest.raises(LakeError, match="should contain 9 events from queue 'mail'"):
        check(layout, 1, {"mail": QueueRecord(8)})
