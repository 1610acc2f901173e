"""bull-board shows charts over months from a lake, with the history provider of examples/bull-board."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bulltask.lake import History
from bulltask.lake.serving import HistoryServer
from tests.interop.board import Board, BoardError
from tests.support.lake import LakeBuilder, at

pytestmark = pytest.mark.interop

DAY_MS = 86_400_000
FIRST = at("2024-11-18 10:30")
FIRST_DAY = int(at("2024-11-18").timestamp() * 1000)
FROM, TO = FIRST_DAY + 11 * 3_600_000, FIRST_DAY + 4 * DAY_MS - 1


def attempt(number: int, **more: Any) -> dict[str, Any]:
    return {"job_id": str(number), "outcome": "completed", "ended_at": FIRST, "run_ms": 100, "wait_ms": 10, **more}


@pytest.fixture
def lake(tmp_path: Path) -> LakeBuilder:
    """Attempts of two queues on the first and the third of four days."""
    third = FIRST + timedelta(days=2)
    return LakeBuilder(tmp_path / "lake").attempts(
        [
            attempt(1),
            attempt(2, ended_at=FIRST + timedelta(hours=2)),
            attempt(3, ended_at=third, run_ms=9_000, wait_ms=None),
            attempt(4, ended_at=third, outcome="failed", run_ms=300),
            attempt(5, ended_at=third, outcome="requeued", run_ms=50),
            attempt(6, ended_at=third, queue="reports"),
            attempt(7, ended_at=FIRST + timedelta(days=9)),
        ]
    )


@pytest.fixture
def charts(lake: LakeBuilder, node_client: None, broker_url: str) -> Iterator[Board]:
    with HistoryServer(History(lake.root), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        with Board(broker_url, [{"name": "{mail}"}, {"name": "{reports}"}], server.url) as board:
            yield board
        server.shutdown()
        thread.join()


def read_metrics(board: Board, what: str, **more: object) -> Any:
    return board.read(f"metrics/{what}", **{"from": FROM, "to": TO, **more})


def days(*values: int) -> list[dict[str, int]]:
    return [{"ts": FIRST_DAY + day * DAY_MS, "value": value} for day, value in enumerate(values)]


def test_days_are_complete_and_days_without_a_job_are_zero(charts: Board) -> None:
    shown = read_metrics(charts, "history", granularity="day", queue="{mail}")
    assert shown["completed"] == days(2, 0, 1, 0)
    assert shown["failed"] == days(0, 0, 1, 0)[2:]
    assert read_metrics(charts, "history", granularity="day")["completed"] == days(2, 0, 2, 0)


def test_hours_without_a_job_are_omitted(charts: Board) -> None:
    shown = read_metrics(charts, "history", granularity="hour", queue="{reports}", metric="completed")
    assert shown == {"completed": [{"ts": FIRST_DAY + 2 * DAY_MS + 10 * 3_600_000, "value": 1}]}


def test_charts_without_data_in_the_lake_are_empty(charts: Board) -> None:
    assert read_metrics(charts, "history", granularity="day", metric="queueage") == {"queueage": []}
    assert read_metrics(charts, "history", granularity="day", queue="{none}") == {"completed": [], "failed": []}
    far = {"from": 8_000_000_000_000_000, "to": 8_600_000_000_000_000}
    assert charts.read("metrics/history", granularity="day", **far) == {"completed": [], "failed": []}


def test_percentiles_are_in_milliseconds_with_the_number_of_attempts(charts: Board) -> None:
    query = {"metric": "runtime", "granularity": "day", "queue": "{mail}", "percentiles": "0,50,99.9"}
    first, second = read_metrics(charts, "latency", **query)
    assert (first["ts"], first["count"]) == (FIRST_DAY, 2)
    assert (second["ts"], second["count"]) == (FIRST_DAY + 2 * DAY_MS, 3)
    for percentile, exact in {"0": 50, "50": 300, "99.9": 9_000}.items():
        assert second["values"][percentile] == pytest.approx(exact, rel=0.01)
    (entire,) = read_metrics(charts, "latency", metric="waittime", granularity="range", queue="{mail}")
    assert (entire["ts"], entire["count"], entire["values"]) == (FROM, 3, {"50": 10, "95": 10, "99": 10})


def test_the_board_offers_history_without_storage_usage_and_purge(charts: Board) -> None:
    page = charts.page("/metrics-history")
    assert '"hasHistoryProvider":true' in page
    assert '"hasLatencyHistory":true' in page
    assert '"hasHistoryUsage":false' in page
    assert '"canPurgeHistory":false' in page


def test_a_reply_is_cached_and_an_error_is_not(charts: Board, lake: LakeBuilder) -> None:
    def completed() -> object:
        # One metric, one request: of two, the board reports the first error while the other is still running.
        return read_metrics(charts, "history", granularity="day", queue="{mail}", metric="completed")["completed"]

    table = lake.root / "silver" / "attempts"
    (file,) = table.glob("dt=2024-11-18/*")
    data = file.read_bytes()
    file.write_bytes(b"nonsense")
    with pytest.raises(BoardError):
        completed()
    file.write_bytes(data)
    assert completed() == days(2, 0, 1, 0)
    shutil.rmtree(table)
    assert completed() == days(2, 0, 1, 0)
