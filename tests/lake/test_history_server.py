"""The history over HTTP, for programs that are not written in Python."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import httpx
import pytest
from click.testing import CliRunner

from bulltask.cli.main import main
from bulltask.errors import ConfigError
from bulltask.lake import History
from bulltask.lake.serving import HistoryServer
from tests.support.lake import LakeBuilder, at

END = at("2026-11-20 10:00")


@pytest.fixture
def lake(tmp_path: Path) -> LakeBuilder:
    made = LakeBuilder(tmp_path)
    rows = [
        {"job_id": f"j{n}", "name": "send", "state": "failed", "finished_at": at("2026-11-20", n)} for n in range(3)
    ]
    made.jobs([*rows, {**rows[0], "job_id": "é&=", "queue": "{odd}"}])
    return made.attempts([{"job_id": "j1", "outcome": "failed", "ended_at": END, "wait_ms": 20, "run_ms": 50}])


@pytest.fixture
def web(lake: LakeBuilder) -> Iterator[httpx.Client]:
    with HistoryServer(History(lake.layout.root), 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with httpx.Client(base_url=server.url, timeout=30) as client:
            yield client
        server.shutdown()
        thread.join()


def test_every_question_is_answered_as_the_history_does(web: httpx.Client) -> None:
    page = web.get("/search", params={"state": "failed", "limit": "2", "until": "2026-11-20T00:00:00.002Z"}).json()
    assert [job["id"] for job in page["jobs"]] == ["j1", "é&="]
    rest = web.get("/search", params={"state": "failed", "limit": 2, "cursor": page["cursor"]}).json()
    assert ([job["id"] for job in rest["jobs"]], rest["cursor"]) == (["j0"], None)
    job = web.get("/job", params={"id": "j1"}).json()
    assert (job["incarnations"][0]["finished_at"], job["attempts"][0]["run"]) == (
        "2026-11-20T00:00:00.001000+00:00",
        0.05,
    )
    assert web.get("/counts", params={"queue": "mail"}).json() == [
        {"queue": "mail", "name": "send", "state": "failed", "jobs": 3}
    ]
    rate = web.get("/rate", params={"outcome": "failed", "every": "day", "since": "2026-11-20"})
    assert rate.json() == [{"at": "2026-11-20T00:00:00+00:00", "attempts": 1}]
    latency = web.get("/latency", params={"metric": "wait", "percentiles": "0,50.0,99.9", "every": ""})
    assert latency.json() == [{"at": None, "attempts": 1, "percentiles": {"0": 0.02, "50": 0.02, "99.9": 0.02}}]


@pytest.mark.parametrize(("asked", "found"), [("mail", 3), ("{mail}", 3), ("{odd}", 1), ("odd", 0)])
def test_queues_may_be_spelled_as_bullmq_has_them(web: httpx.Client, asked: str, found: int) -> None:
    assert sum(one["jobs"] for one in web.get("/counts", params={"queue": asked}).json()) == found


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/search?state=fialed", 400, "did you mean 'failed'?"),
        ("/search?colour=red", 400, "cannot be searched by 'colour'"),
        ("/search?limit=x", 400, "invalid literal"),
        ("/search?since=yesterday", 400, "invalid time 'yesterday'"),
        ("/search?x", 400, "bad query field"),
        ("/job", 400, "the parameter id is missing"),
        ("/job?id=nobody", 404, "no such job"),
        ("/latency?percentiles=a", 400, "could not convert"),
        ("/rate?every=week", 400, "not 'week'"),
        ("/", 404, "no such job or path"),
        ("/../../etc/passwd", 404, "no such job or path"),
    ],
)
def test_invalid_requests_and_unknown_paths_are_errors(web: httpx.Client, path: str, status: int, said: str) -> None:
    answer = web.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json; charset=utf-8")
    assert said in answer.json()["error"]


def test_an_unreadable_lake_is_an_error(web: httpx.Client, lake: LakeBuilder) -> None:
    for file in lake.layout.root.glob("silver/jobs/*/*/*/*.parquet"):
        file.write_bytes(b"nonsense")
    assert web.get("/search").status_code == 503


def test_other_pages_of_a_browser_cannot_ask_under_names_of_their_own(web: httpx.Client) -> None:
    assert web.get("/search", headers={"Host": "evil.example:3001"}).status_code == 403
    assert web.get("/search", headers={"Host": "localhost:3001"}).status_code == 200
    assert "access-control-allow-origin" not in web.get("/search").headers
    assert web.post("/search").status_code == 501


def test_a_port_in_use_is_an_error(lake: LakeBuilder) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"port \d+ of 127.0.0.1 is not available: Address already in use"):
            HistoryServer(History(lake.layout.root), taken.getsockname()[1])


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_asked_to_end(lake: LakeBuilder, end: signal.Signals) -> None:
    words = [sys.executable, "-m", "bulltask", "job", "serve", "--port", "0"]
    environment = os.environ | {"BULLTASK_LAKE": str(lake.layout.root)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        line = cast("IO[str]", process.stdout).readline()
        assert line.endswith(f" serves {lake.layout.root}\n")
        url = line.split()[1]
        assert url.startswith("http://127.0.0.1:")
        assert len(json.loads(httpx.get(f"{url}search", timeout=30).text)["jobs"]) == 4
        process.send_signal(end)
        assert process.wait(20) == 0


def test_the_command_without_a_lake_is_an_error(tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["job", "serve", "--lake", str(tmp_path)])
    assert shown.exit_code == 1
    assert "there is no lake in" in shown.output


def test_a_command_that_cannot_serve_leaves_the_signals_of_its_process_alone(lake: LakeBuilder) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        shown = CliRunner().invoke(main, ["job", "serve", "--lake", str(lake.layout.root), "--port", port])
    assert "is not available" in shown.output
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
