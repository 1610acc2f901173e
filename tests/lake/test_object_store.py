"""A lake in an object store is read, maintained and searched like one in a directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date

import pytest
from click.testing import CliRunner

from bulltask.cli.main import main
from bulltask.lake import History
from bulltask.lake.maintenance import forget, maintain, parse_retention
from bulltask.lake.reader import TableReader
from bulltask.lake.tables import EVENTS, JOBS
from tests.support.lake import LakeBuilder, at
from tests.support.object_store import BUCKET, SECRET, object_store


@pytest.fixture
def options() -> Iterator[Mapping[str, str]]:
    with object_store() as options:
        yield options


@pytest.mark.slow
def test_a_lake_in_an_object_store_is_searched_maintained_and_forgets(
    options: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = LakeBuilder(f"s3a://{BUCKET}/lake", options)
    for day in (20, 21, 21):
        lake.events([{"event_id": "1795305600000-0", "event": "added", "job_id": "a", "dt": f"2026-11-{day}"}])
    for job_id in ("a", "b"):
        lake.jobs([{"job_id": job_id, "state": "completed", "finished_at": at("2026-11-21 10:00")}])
    events, jobs = maintain(lake.lake, keep=parse_retention(["bronze=3"]), today=date(2026, 11, 23))
    assert (events.expired_files, events.files_before, events.files_after, jobs.rows_after) == (1, 2, 1, 2)
    assert [job.id for job in History(lake.lake.root, options).search().jobs] == ["b", "a"]
    done = {result.table: result for result in forget(lake.lake, {("mail", "a")})}
    assert (done["bronze.events"].rows, done["silver.jobs"].rows) == (2, 1)
    assert done["silver.jobs"].old_files == 3
    assert TableReader(lake.lake).rows(EVENTS) == []
    args = ["history", "search", "--lake", lake.lake.root]
    for name, value in options.items():  # as a user sets them
        if "KEY" in name:
            monkeypatch.setenv(name, value)
        else:
            args += ["--storage-option", f"{name}={value}"]
    shown = CliRunner().invoke(main, args)
    assert shown.exit_code == 0, shown.output
    assert "completed" in shown.output
    assert SECRET not in f"{lake.lake!r}{History(lake.lake.root, options)!r}{JOBS!r}"
