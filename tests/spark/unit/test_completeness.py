"""A batch beside the two offsets between which it lies; no JVM, no Redis."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from bulltask.errors import LakeError
from bulltask.lake.layout import Layout, ingest_id
from bulltask.lake.ledger import QueueRecord
from bulltask.spark.source.offsets import START, Offsets, QueueOffset, StreamId, encode_offsets
from bulltask.spark.tables.completeness import check_complete

FIVE, NINE = QueueOffset(StreamId(50, 0), 5), QueueOffset(StreamId(90, 0), 9)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


def planned(layout: Layout, number: int, end: Offsets, begin: Offsets | None = None) -> None:
    """What Spark stores before it reads a batch."""
    place = layout.checkpoint / "offsets"
    place.mkdir(parents=True, exist_ok=True)
    (place / str(number)).write_text(f"v1\n{{}}\n{json.dumps(encode_offsets(end, begin))}")


def check(layout: Layout, number: int, found: Mapping[str, QueueRecord], *, hash_tag: bool = True) -> None:
    check_complete(layout, ingest_id("3f0c2a91", number), found, hash_tag=hash_tag)


@pytest.mark.parametrize("found", [QueueRecord(4), QueueRecord(1, lost=3, gaps=1), QueueRecord(0, lost=4, gaps=2)])
def test_rows_and_losses_together_are_what_the_offsets_say(layout: Layout, found: QueueRecord) -> None:
    planned(layout, 0, {"{mail}": FIVE})
    planned(layout, 1, {"{mail}": NINE, "{new}": START})
    check(layout, 1, {"mail": found})


@pytest.mark.parametrize("found", [{}, {"mail": QueueRecord(3)}, {"mail": QueueRecord(5)}, {"other": QueueRecord(4)}])
def test_a_batch_that_has_less_or_more_is_refused(layout: Layout, found: Mapping[str, QueueRecord]) -> None:
    planned(layout, 0, {"{mail}": FIVE})
    planned(layout, 1, {"{mail}": NINE})
    with pytest.raises(LakeError, match="must have 4 events of queue 'mail'"):
        check(layout, 1, found)


def test_a_first_batch_records_where_it_began_and_one_of_an_older_version_is_not_checked(layout: Layout) -> None:
    planned(layout, 0, {"{mail}": NINE}, {"{mail}": FIVE})
    check(layout, 0, {"mail": QueueRecord(4)})
    with pytest.raises(LakeError, match="BULLTASK_BATCH_INCOMPLETE"):
        check(layout, 0, {})
    planned(layout, 0, {"{mail}": NINE})
    check(layout, 0, {})


@pytest.mark.parametrize(
    "end",
    [QueueOffset(StreamId(90, 0), None), QueueOffset(StreamId(0, 0), 0, generation=1)],
    ids=["uncounted", "another life"],
)
def test_without_counts_there_must_be_at_least_one_row(layout: Layout, end: QueueOffset) -> None:
    planned(layout, 0, {"{mail}": FIVE})
    planned(layout, 1, {"{mail}": end})
    check(layout, 1, {"mail": QueueRecord(0, gaps=1)})
    with pytest.raises(LakeError, match="of queue 'mail'"):
        check(layout, 1, {})


def test_a_queue_that_was_skipped_for_another_of_its_name_does_not_count(layout: Layout) -> None:
    """Node's ``mail`` was read, and then ``{mail}`` came up: the offset keeps the place of the first."""
    planned(layout, 0, {"mail": FIVE, "{mail}": START})
    planned(layout, 1, {"mail": FIVE, "{mail}": NINE})
    check(layout, 1, {"mail": QueueRecord(9)})
    check(layout, 1, {"mail": QueueRecord(0), "{mail}": QueueRecord(9)}, hash_tag=False)
    with pytest.raises(LakeError, match="must have 9 events of queue 'mail'"):
        check(layout, 1, {"mail": QueueRecord(8)})
