"""Directories are swapped so that a kill -9 between any two steps neither loses nor duplicates a row."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from bulltask.lake.files import arrow_schema, compact, partition_schema
from bulltask.lake.storage import STEPS, AtomicSwap, Layout, finish_intents, hold_swaps
from bulltask.lake.tables import EVENTS
from tests.support.lake import LakeBuilder

KILLED_COMPACTION = """
import os, signal, sys
from datetime import date
from bulltask.lake.files import compact
from bulltask.lake.storage import Layout

remaining = int(sys.argv[3])

def on_step(step):
    global remaining
    if step == sys.argv[2]:
        remaining -= 1
        if not remaining:
            os.kill(os.getpid(), signal.SIGKILL)

compact(Layout(sys.argv[1]), "bronze.events", before=date(2026, 11, 23), on_step=on_step)
"""

KILLED_SWAP = """
import os, signal, sys
from pathlib import Path
from bulltask.lake.storage import Layout
from bulltask.lake.storage import AtomicSwap

def on_step(step):
    if step == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

root = Path(sys.argv[1])
with AtomicSwap(Layout(root), on_step) as swaps:
    new = swaps.new_directory()
    new.mkdir()
    (new / "rows").write_text("new")
    swaps.swap(new, root / "gold" / "day", [root / "gold" / "day"])
"""


def run_killed(program: str, *args: str) -> None:
    run = subprocess.run([sys.executable, "-c", program, *args], check=False, timeout=50)
    assert run.returncode == -signal.SIGKILL


def ids(root: Path) -> list[str]:
    """Return the event ids, as any Parquet reader finds them."""
    partitions = ds.partitioning(partition_schema(EVENTS), flavor="hive")
    dataset = ds.dataset(str(Layout(root).table(EVENTS)), arrow_schema(EVENTS), "parquet", partitioning=partitions)
    return sorted(dataset.to_table(["event_id"])["event_id"].to_pylist())


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("occurrence", [1, 2])
def test_a_kill_during_compaction_neither_loses_nor_duplicates_a_row(
    tmp_path: Path, step: str, occurrence: int
) -> None:
    lake = LakeBuilder(tmp_path)
    for batch in range(3):
        for queue in ("mail", "{other}"):
            lake.events([{"event_id": f"1795305600{batch}00-{n}", "queue": queue, "event": "added"} for n in range(5)])
    before = ids(tmp_path)
    assert len(before) == 30
    run_killed(KILLED_COMPACTION, str(tmp_path), step, str(occurrence))
    finish_intents(lake.layout)
    assert ids(tmp_path) == before
    assert not list(lake.layout.internal("intents").glob("*.json"))
    for folder in ("new", "trash"):
        assert not list(lake.layout.internal(folder).glob("*")), folder
    compact(lake.layout, "bronze.events", before=max(lake.layout.days(EVENTS)).replace(year=2030))
    assert ids(tmp_path) == before
    assert len(list(tmp_path.rglob("*.parquet"))) == 2


@pytest.mark.parametrize("step", STEPS)
def test_a_replaced_directory_is_either_old_or_new_after_a_kill(tmp_path: Path, step: str) -> None:
    day = tmp_path / "gold" / "day"
    day.mkdir(parents=True)
    (day / "rows").write_text("old")
    run_killed(KILLED_SWAP, str(tmp_path), step)
    finish_intents(Layout(tmp_path))
    assert (day / "rows").read_text() == ("old" if step == "files-written" else "new")
    assert [path.name for path in day.iterdir()] == ["rows"]


def test_finish_intents_does_nothing_without_intents(tmp_path: Path) -> None:
    assert finish_intents(Layout(tmp_path / "missing")) == 0
    assert not (tmp_path / "missing").exists()


def test_finish_intents_keeps_the_new_files_of_a_running_swap(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    with AtomicSwap(layout) as swaps:
        (new := swaps.new_directory()).mkdir()
        finish_intents(layout)
        assert new.exists()
    assert not new.exists()


def test_a_swap_waits_until_every_reader_has_released_its_lock(tmp_path: Path) -> None:
    layout, day = Layout(tmp_path), tmp_path / "gold" / "day"
    day.mkdir(parents=True)
    waits, done = threading.Event(), threading.Event()

    def replace() -> None:
        with AtomicSwap(layout, lambda step: waits.set() if step == "files-written" else None) as swaps:
            swaps.swap(None, None, [day])
        done.set()

    with hold_swaps(layout), hold_swaps(layout):
        thread = threading.Thread(target=replace)
        thread.start()
        waits.wait(50)
        assert not done.wait(0.3)
        assert day.exists()
    thread.join(50)
    assert done.is_set()
    assert not day.exists()


def test_a_reader_completes_the_swap_of_a_killed_command_first(tmp_path: Path) -> None:
    day = tmp_path / "gold" / "day"
    day.mkdir(parents=True)
    run_killed(KILLED_SWAP, str(tmp_path), "moved-away")
    assert not day.exists()
    with hold_swaps(Layout(tmp_path)):
        assert (day / "rows").read_text() == "new"


@pytest.mark.parametrize("step", ["intent-written", "moved-away"])
def test_the_next_swap_completes_unfinished_swaps_first(tmp_path: Path, step: str) -> None:
    day = tmp_path / "gold" / "day"
    day.mkdir(parents=True)
    (day / "rows").write_text("old")
    run_killed(KILLED_SWAP, str(tmp_path), step)
    with AtomicSwap(Layout(tmp_path)):
        assert (day / "rows").read_text() == "new"
