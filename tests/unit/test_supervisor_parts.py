"""Parts of the supervisor that decide something without a process: how children start, and when it gives up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bulltask.events import Bus
from bulltask.worker.states import ProcessState
from bulltask.worker.supervisor import launch
from bulltask.worker.supervisor.child_pool import _MAX_BOOT_FAILURES, ChildBootError, ChildPool
from bulltask.worker.supervisor.launch import choose_launcher
from bulltask.worker.supervisor.recovery import _ordinal


def fork(index: int) -> int:
    return 1_000 + index


def spawn(index: int) -> int:
    return 2_000 + index


@pytest.mark.parametrize(
    ("method", "spawner", "threads", "pid", "warned"),
    [
        ("fork", spawn, 9, 1_003, 0),
        ("spawn", spawn, 1, 2_003, 0),
        ("spawn", None, 1, 1_003, 1),
        ("auto", spawn, 1, 1_003, 0),
        ("auto", spawn, 2, 2_003, 1),
        ("auto", None, 2, 1_003, 1),
    ],
)
def test_how_a_child_starts(
    monkeypatch: pytest.MonkeyPatch, method: str, spawner: Any, threads: int, pid: int, warned: int
) -> None:
    monkeypatch.setattr(launch, "thread_count", lambda: threads)
    texts: list[str] = []
    forker: Any = fork
    start = choose_launcher(method, forker, spawner, texts.append)
    assert [start(3), start(3)] == [pid, pid]
    assert len(texts) == warned


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1, "1st"),
        (2, "2nd"),
        (3, "3rd"),
        (4, "4th"),
        (11, "11th"),
        (13, "13th"),
        (20, "20th"),
        (21, "21st"),
        (33, "33rd"),
    ],
)
def test_the_crashes_of_a_job_are_counted_in_words(number: int, text: str) -> None:
    assert _ordinal(number) == text


def test_only_children_that_die_in_a_row_before_their_first_job_end_the_worker() -> None:
    nothing: Any = None
    slots: Any = SimpleNamespace(children=[nothing])
    pool = ChildPool(slots, nothing, nothing, Bus(), 1)
    child: Any = SimpleNamespace(stop_requested=False)
    died: Any = SimpleNamespace(run_state=ProcessState.INIT)
    for _ in range(2):
        for _ in range(_MAX_BOOT_FAILURES - 1):
            pool._count_boot_failures(died, child)
        pool._count_boot_failures(SimpleNamespace(run_state=ProcessState.RUN), child)  # type: ignore[arg-type]
    for _ in range(_MAX_BOOT_FAILURES - 1):
        pool._count_boot_failures(died, child)
    with pytest.raises(ChildBootError, match=f"^{_MAX_BOOT_FAILURES} children"):
        pool._count_boot_failures(died, child)
