"""The ledger of a lake's batches: which batches are committed, and which records are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bulltask.errors import DecodeError
from bulltask.lake import storage
from bulltask.lake.storage import BatchRecord, Layout, Ledger, QueueRecord, batch_ingest_id

QUERY, NEXT_QUERY = "3f0c2a91-1111-4222-8333-444444444444", "77aa0000-1111-4222-8333-444444444444"


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """Return a ledger that trims its records to ten when it has more than 15."""
    monkeypatch.setattr(storage, "_MAX_RECORDS", 10)
    monkeypatch.setattr(storage, "_CLEANUP_SLACK", 5)
    return Ledger(Layout(tmp_path))


def finish(ledger: Ledger, query: str, batches: range) -> None:
    for number in batches:
        head = ledger.head() or BatchRecord("", number=0)
        ingest_id = batch_ingest_id(query, number)
        queries = {**head.queries, query[:8]: number}
        ledger.commit(BatchRecord(ingest_id, previous=head.ingest_id or None, number=head.number + 1, queries=queries))


def records_in(root: Path) -> int:
    return len(list(Layout(root).internal("batches").iterdir()))


def test_a_batch_stays_committed_after_its_record_is_removed(ledger: Ledger, tmp_path: Path) -> None:
    finish(ledger, QUERY, range(15))
    assert records_in(tmp_path) == 15
    finish(ledger, QUERY, range(15, 16))
    assert records_in(tmp_path) == 10
    assert [record.number for record in ledger.records()] == [*range(16, 6, -1)]
    finish(ledger, NEXT_QUERY, range(30))
    assert records_in(tmp_path) <= 15
    assert ledger.get(batch_ingest_id(QUERY, 3)) is None
    assert all(ledger.has(batch_ingest_id(QUERY, number)) for number in range(16))
    assert not ledger.has(batch_ingest_id(QUERY, 16))
    assert ledger.has(batch_ingest_id(NEXT_QUERY, 29))
    assert not ledger.has(batch_ingest_id(NEXT_QUERY, 30))


def test_a_batch_that_was_killed_before_the_head_was_written_is_not_committed(ledger: Ledger, tmp_path: Path) -> None:
    finish(ledger, QUERY, range(1))
    before = Layout(tmp_path).internal("head.json").read_text()
    finish(ledger, QUERY, range(1, 2))
    Layout(tmp_path).internal("head.json").write_text(before)
    assert ledger.get(batch_ingest_id(QUERY, 1)) is not None
    assert not ledger.has(batch_ingest_id(QUERY, 1))
    Layout(tmp_path).internal("head.json").unlink()
    assert not ledger.has(batch_ingest_id(QUERY, 0))


def test_a_ledger_in_the_old_format_finds_batches_by_their_records(ledger: Ledger, tmp_path: Path) -> None:
    finish(ledger, QUERY, range(3))
    for path in [*Layout(tmp_path).internal("batches").iterdir(), Layout(tmp_path).internal("head.json")]:
        stored = json.loads(path.read_text())
        del stored["queries"]
        path.write_text(json.dumps(stored))
    assert ledger.has(batch_ingest_id(QUERY, 1))
    assert not ledger.has(batch_ingest_id(QUERY, 3))
    assert [record.number for record in ledger.records()] == [3, 2, 1]


def test_a_record_is_read_back_with_the_records_of_its_queues(ledger: Ledger) -> None:
    queues = {"mail": QueueRecord(300, "1-0", "9-0", lost=5, gaps=1)}
    record = BatchRecord(
        batch_ingest_id(QUERY, 0), queues=queues, last_ids={"mail": "9-0"}, lost={"mail": 5}, open_job_events=2
    )
    ledger.commit(record)
    assert ledger.head() == ledger.get(record.ingest_id) == record


def test_a_batch_is_being_published_until_the_head_is_written(ledger: Ledger, tmp_path: Path) -> None:
    assert ledger.publishing() is None
    ingest_id = batch_ingest_id(QUERY, 0)
    ledger.begin_publishing(ingest_id)
    assert ledger.publishing() == ingest_id
    head = Layout(tmp_path).internal("head.json")
    head.mkdir()  # makes writing the head fail, as a power failure would
    with pytest.raises(IsADirectoryError):
        ledger.commit(BatchRecord(ingest_id))
    head.rmdir()
    assert ledger.publishing() == ingest_id, "its files must not count yet"
    finish(ledger, QUERY, range(1))
    assert ledger.publishing() is None


@pytest.mark.parametrize("version", [None, 2])
def test_a_record_of_another_version_is_rejected(ledger: Ledger, tmp_path: Path, version: int | None) -> None:
    finish(ledger, QUERY, range(1))
    head = Layout(tmp_path).internal("head.json")
    head.write_text(json.dumps({**json.loads(head.read_text()), "version": version}))
    with pytest.raises(DecodeError, match=f"version {version}"):
        ledger.head()
