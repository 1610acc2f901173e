"""The history over HTTP, for programs in other languages."""

from __future__ import annotations

import base64
import json
import os
import select
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
from bulltask.observe.http_requests import RequestDeadline
from tests.support.lake import LakeBuilder, at

END = at("2026-11-20 10:00")


@pytest.fixture
def lake(tmp_path: Path) -> LakeBuilder:
    lake = LakeBuilder(tmp_path)
    rows = [
        {"job_id": f"j{n}", "name": "send", "state": "failed", "finished_at": at("2026-11-20", n)} for n in range(3)
    ]
    lake.jobs([*rows, {**rows[0], "job_id": "é&=", "queue": "{odd}"}])
    return lake.attempts([{"job_id": "j1", "outcome": "failed", "ended_at": END, "wait_ms": 20, "run_ms": 50}])


@pytest.fixture
def web(lake: LakeBuilder) -> Iterator[httpx.Client]:
    with HistoryServer(History(lake.root), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        with httpx.Client(base_url=server.url, timeout=30) as client:
            yield client
        server.shutdown()
        thread.join()


def test_every_path_returns_the_same_results_as_the_history(web: httpx.Client) -> None:
    page = web.get("/search", params={"state": "failed", "limit": "2", "until": "2026-11-20T00:00:00.002Z"}).json()
    assert [job["id"] for job in page["jobs"]] == ["j1", "é&="]
    rest = web.get("/search", params={"state": "failed", "limit": 2, "cursor": page["cursor"]}).json()
    assert ([job["id"] for job in rest["jobs"]], rest["cursor"]) == (["j0"], None)
    job = web.get("/job", params={"id": "j1"}).json()
    assert (job["incarnations"][0]["finished_at"], job["attempts"][0]["run_time"]) == (
        "2026-11-20T00:00:00.001000+00:00",
        0.05,
    )
    assert web.get("/job-counts", params={"queue": "mail"}).json() == [
        {"queue": "mail", "name": "send", "state": "failed", "jobs": 3}
    ]
    ended = web.get("/attempt-counts", params={"outcome": "failed", "every": "day", "since": "2026-11-20"})
    assert ended.json() == [{"at": "2026-11-20T00:00:00+00:00", "attempts": 1}]
    latency = web.get("/latency", params={"metric": "wait", "percentiles": "0,50.0,99.9", "every": ""})
    assert latency.json() == [{"at": None, "attempts": 1, "percentiles": {"0": 0.02, "50": 0.02, "99.9": 0.02}}]


@pytest.mark.parametrize(("queue", "jobs"), [("mail", 3), ("{mail}", 3), ("{odd}", 1), ("odd", 0)])
def test_a_queue_may_be_named_with_its_hash_tag(web: httpx.Client, queue: str, jobs: int) -> None:
    assert sum(count["jobs"] for count in web.get("/job-counts", params={"queue": queue}).json()) == jobs


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/search?state=fialed", 400, "did you mean 'failed'?"),
        ("/search?color=red", 400, "cannot be searched by 'color'"),
        ("/search?limit=x", 400, "limit must be an integer from 1 to 1000"),
        ("/search?since=yesterday", 400, "invalid time 'yesterday'"),
        ("/search?x", 400, "bad query field"),
        ("/job", 400, "the parameter id is missing"),
        ("/job?id=unknown", 404, "no such job"),
        ("/latency?percentiles=a", 400, "could not convert"),
        ("/attempt-counts?every=week", 400, "not 'week'"),
        ("/search?since=0001-01-01T00:00:00%2B23:59", 400, "out of range"),
        ("/attempt-counts?since=9999-12-31T23:59:59-23:59", 400, "out of range"),
        ("/search?cursor=" + base64.urlsafe_b64encode(b"[" * 30_000).decode(), 400, "cursor"),
        ("/search?limit=" + "9" * 5_000, 400, "limit"),
        ("/latency?percentiles=nan", 400, "percentiles"),
        ("/", 404, "no such job or path"),
        ("/../../etc/passwd", 404, "no such job or path"),
    ],
)
def test_invalid_requests_return_errors(web: httpx.Client, path: str, status: int, message: str) -> None:
    response = web.get(path)
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json; charset=utf-8")
    assert message in response.json()["error"]


def test_an_unreadable_lake_returns_status_503(web: httpx.Client, lake: LakeBuilder) -> None:
    for file in lake.root.glob("silver/jobs/*/*.parquet"):
        file.write_bytes(b"nonsense")
    assert web.get("/search").status_code == 503


def test_requests_for_other_host_names_are_rejected(web: httpx.Client) -> None:
    # This prevents DNS rebinding: pages in a browser must not read the history.
    assert web.get("/search", headers={"Host": "evil.example:3001"}).status_code == 403
    assert web.get("/search", headers={"Host": "localhost:3001"}).status_code == 200
    assert "access-control-allow-origin" not in web.get("/search").headers
    assert web.post("/search").status_code == 501


def exchange(web: httpx.Client, *parts: bytes) -> bytes:
    """Send parts of a request, each when the server has had time to read the previous one; return the response."""
    with socket.create_connection((web.base_url.host, web.base_url.port or 0), timeout=30) as connection:
        for part in parts:
            try:
                connection.sendall(part)
            except OSError:
                break
            if select.select([connection], [], [], 0.1)[0]:
                break
        return connection.recv(1000)


def test_a_path_that_is_no_url_is_an_error(web: httpx.Client) -> None:
    assert b" 400 " in exchange(web, b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n")


def test_a_request_that_arrives_bit_by_bit_is_given_up(web: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestDeadline, "timeout", 0.5)
    request = b"GET /search HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert b" 200 " in exchange(web, request)
    assert b" 200 " not in exchange(web, *(request[at : at + 4] for at in range(0, len(request), 4)))
    assert web.get("/search").status_code == 200


def test_a_port_in_use_is_an_error(lake: LakeBuilder) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        with pytest.raises(ConfigError, match=r"port \d+ on 127.0.0.1 is not available: Address already in use"):
            HistoryServer(History(lake.root), sock.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_a_signal_stops_its_process(lake: LakeBuilder, end: signal.Signals) -> None:
    args = [sys.executable, "-m", "bulltask", "history", "serve", "--port", "0"]
    environment = os.environ | {"BULLTASK_LAKE": str(lake.root)}
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True, env=environment) as process:
        line = cast("IO[str]", process.stdout).readline()
        assert line.endswith(f" serves {lake.root}\n")
        url = line.split()[1]
        assert url.startswith("http://127.0.0.1:")
        assert len(json.loads(httpx.get(f"{url}search", timeout=30).text)["jobs"]) == 4
        process.send_signal(end)
        assert process.wait(20) == 0


def test_the_command_fails_without_a_lake(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["history", "serve", "--lake", str(tmp_path)])
    assert result.exit_code == 1
    assert "there is no lake in" in result.output


def test_a_command_that_cannot_serve_does_not_change_the_signal_mask(lake: LakeBuilder) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = str(sock.getsockname()[1])
        result = CliRunner().invoke(main, ["history", "serve", "--lake", str(lake.root), "--port", port])
    assert "is not available" in result.output
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
