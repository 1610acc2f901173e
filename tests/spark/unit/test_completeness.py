"""A batch must have as many events as its start and end offsets imply; no JVM, no Redis."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from bulltask.errors import LakeError
from bulltask.lake.ledger import QueueRecord
from bulltask.spark.batches import check_complete
from bulltask.spark.source.offsets import START, Offsets, QueueOffset, StreamId, encode_offsets

FIVE, NINE = QueueOffset(StreamId(50, 0), 5), QueueOffset(StreamId(90, 0), 9)


def store_offsets(checkpoint: Path, number: int, end: Offsets, begin: Offsets | None = None) -> None:
    """Store the offsets of a batch, as Spark does before it reads the batch."""
    directory = checkpoint / "offsets"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / str(number)).write_text(f"v1\n{{}}\n{json.dumps(encode_offsets(end, begin))}")


def check(checkpoint: Path, number: int, records: Mapping[str, QueueRecord], *, hash_tag: bool = True) -> None:
    check_complete("/lake", checkpoint, number, records, hash_tag=hash_tag)


@pytest.mark.parametrize("records", [QueueRecord(4), QueueRecord(1, lost=3, gaps=1), QueueRecord(0, lost=4, gaps=2)])
def test_a_batch_is_complete_if_rows_and_losses_match_the_offsets(tmp_path: Path, records: QueueRecord) -> None:
    store_offsets(tmp_path, 0, {"{mail}": FIVE})
    store_offsets(tmp_path, 1, {"{mail}": NINE, "{new}": START})
    check(tmp_path, 1, {"mail": records})


@pytest.mark.parametrize("records", [{}, {"mail": QueueRecord(3)}, {"mail": QueueRecord(5)}, {"other": QueueRecord(4)}])
def test_a_batch_with_too_few_or_too_many_events_is_rejected(
    tmp_path: Path, records: Mapping[str, QueueRecord]
) -> None:
    store_offsets(tmp_path, 0, {"{mail}": FIVE})
    store_offsets(tmp_path, 1, {"{mail}": NINE})
    with pytest.raises(LakeError, match="should contain 4 events from queue 'mail'"):
        check(tmp_path, 1, records)


def test_a_first_batch_is_checked_only_if_its_start_offset_was_stored(tmp_path: Path) -> None:
    store_offsets(tmp_path, 0, {"{mail}": NINE}, {"{mail}": FIVE})
    check(tmp_path, 0, {"mail": QueueRecord(4)})
    with pytest.raises(LakeError, match="BULLTASK_BATCH_INCOMPLETE"):
        check(tmp_path, 0, {})
    store_offsets(tmp_path, 0, {"{mail}": NINE})
    check(tmp_path, 0, {})


@pytest.mark.parametrize(
    "end",
    [QueueOffset(StreamId(90, 0), None), QueueOffset(StreamId(0, 0), 0, generation=1)],
    ids=["uncounted", "recreated"],
)
def test_a_batch_without_counts_has_at_least_one_row_or_gap(tmp_path: Path, end: QueueOffset) -> None:
    store_offsets(tmp_path, 0, {"{mail}": FIVE})
    store_offsets(tmp_path, 1, {"{mail}": end})
    check(tmp_path, 1, {"mail": QueueRecord(0, gaps=1)})
    with pytest.raises(LakeError, match="from queue 'mail'"):
        check(tmp_path, 1, {})


def test_a_queue_skipped_because_of_a_duplicate_name_is_not_checked(tmp_path: Path) -> None:
    """Node's ``mail`` was read until ``{mail}`` appeared; the offsets still contain ``mail``."""
    store_offsets(tmp_path, 0, {"mail": FIVE, "{mail}": START})
    store_offsets(tmp_path, 1, {"mail": FIVE, "{mail}": NINE})
    check(tmp_path, 1, {"mail": QueueRecord(9)})
    check(tmp_path, 1, {"mail": QueueRecord(0), "{mail}": QueueRecord(9)}, hash_tag=False)
    with pytest.raises(LakeError, match="should contain 9 events from queue 'mail'"):
        check(tmp_path, 1, {"mail": QueueRecord(8)})
