"""The examples, run with the commands of their READMEs."""

from __future__ import annotations

import asyncio
import fcntl
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast
from uuid import uuid4

import httpx
import pytest
import redis

from bulltask import App
from bulltask.testing import InlineWorker, use_server
from bulltask.testing.worker import wait_until
from tests.support.programs import ROOT

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]  # the first test in examples/node installs its client

EXAMPLES = ROOT / "examples"
PROGRAMS = {"bulltask": [sys.executable, "-m", "bulltask"], "python": [sys.executable]}
JOB_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")


def blocks(folder: str, kind: str = "") -> list[str]:
    """Return the fenced blocks of one language in a folder's README."""
    text = (EXAMPLES / folder / "README.md").read_text()
    return [
        body for found, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) if found == kind
    ]


def command(folder: str, text: str) -> list[str]:
    """Return a command of a folder's README with the interpreter of this environment."""
    lines = [line for block in blocks(folder, "sh") for line in block.splitlines()]
    assert text in lines, f"examples/{folder}/README.md does not say {text!r}"
    program, *arguments = text.split()
    return [*PROGRAMS.get(program, [program]), *arguments]


@contextmanager
def running(folder: str, text: str, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a command of a README during the ``with`` block; it must exit cleanly on ``SIGTERM``."""
    with subprocess.Popen(
        command(folder, text),
        cwd=EXAMPLES / folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield process
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def printed(folder: str, text: str, environment: dict[str, str]) -> str:
    """Return the output of a command of a README, with UUIDs shortened as in the READMEs."""
    done = subprocess.run(
        command(folder, text),
        cwd=EXAMPLES / folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return JOB_ID.sub("0192…", done.stdout)


@pytest.fixture
def at_home(tmp_path: Path) -> dict[str, str]:
    """An environment with the data of ``embedded://`` in the test's directory."""
    return {"XDG_DATA_HOME": str(tmp_path)}


@pytest.fixture
def servers(broker_url: str) -> dict[str, str]:
    """An environment that configures both languages for the tests' server."""
    return {"BULLTASK_BROKER_URL": broker_url, "REDIS_URL": broker_url}


def install(folder: str) -> None:
    """Install an example's packages once; parallel callers wait."""
    if shutil.which("npm") is None:
        if os.environ.get("CI"):
            pytest.fail("npm is missing, and in CI every test has to run: install Node.js 18 or newer with npm")
        pytest.skip(f"no npm: install Node.js 18 or newer to test examples/{folder}")
    held = os.open(EXAMPLES / folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        installed = EXAMPLES / folder / "node_modules" / ".package-lock.json"
        wanted = EXAMPLES / folder / "package-lock.json"
        if not installed.exists() or installed.stat().st_mtime < wanted.stat().st_mtime:
            npm = [*command(folder, "npm ci"), "--silent", "--no-audit", "--no-fund"]
            subprocess.run(npm, cwd=EXAMPLES / folder, check=True, timeout=150)
            installed.touch()
    finally:
        os.close(held)


@pytest.fixture(scope="session")
def node_client() -> None:
    """Install the client of examples/node."""
    install("node")


@pytest.fixture(scope="session")
def board_client() -> None:
    """Install bull-board for examples/bull-board."""
    install("bull-board")


@contextmanager
def open_board(environment: dict[str, str], **request: Any) -> Iterator[httpx.Client]:
    """Run the board of examples/bull-board on a free port; yield an HTTP client."""
    with running("bull-board", "node board.js", environment | {"PORT": "0"}) as process:
        line = cast("IO[str]", process.stdout).readline()
        assert re.sub(r":\d+/", ":3000/", line) == blocks("bull-board")[1]
        with httpx.Client(base_url=line.split()[1], timeout=30, **request) as client:
            yield client


@pytest.fixture
async def web(servers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the FastAPI example, which runs in this process."""
    for name, value in servers.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(EXAMPLES / "fastapi"))
    api: Any = importlib.import_module("api").api
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://shop") as client:
        yield client
    del sys.modules["api"], sys.modules["shop"]


def test_the_quickstart_prints_the_documented_output_even_if_the_worker_is_late(
    at_home: dict[str, str],
) -> None:
    with subprocess.Popen(
        command("quickstart", "python send.py"),
        cwd=EXAMPLES / "quickstart",
        env=os.environ | at_home | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as sender:
        output = cast("IO[str]", sender.stdout)
        first = output.readline()
        assert first.startswith("sent job")
        with running("quickstart", "bulltask worker -A tasks", at_home):
            assert sender.wait(60) == 0
        assert JOB_ID.sub("0192…", first + output.read()) == blocks("quickstart")[0]


async def test_the_fastapi_handlers_send_a_job_and_return_its_state_result_or_error(
    web: httpx.AsyncClient, servers: dict[str, str]
) -> None:
    sent = await web.post("/reports", json={"year": 2025})
    assert sent.status_code == 202
    status = sent.json()["status"]
    assert (await web.get(status)).json() == {"state": "waiting", "attempts_made": 0, "error": None}
    assert (await web.get(f"{status}/result?wait=0")).status_code == 503
    with running("fastapi", "bulltask worker -A shop", servers):
        assert (await web.get(f"{status}/result?wait=30")).json() == {"year": 2025, "orders": 14175}
        failing = await web.post("/reports", json={"year": 1999})
        result = await web.get(f"{failing.json()['status']}/result?wait=30")
        assert (result.status_code, result.json()["detail"]) == (422, "there are no accounts for 1999")
    assert (await web.get(status)).json() == {"state": "completed", "attempts_made": 1, "error": None}


async def test_the_fastapi_example_streams_the_progress_and_the_outcome_of_a_job(
    web: httpx.AsyncClient, servers: dict[str, str]
) -> None:
    good, bad = [(await web.post("/reports", json={"year": year})).json()["status"] for year in (2025, 1999)]
    ends = {
        good: "event: message\ndata: 100\n\nevent: done\ndata: null\n\n",
        bad: 'event: failed\ndata: "there are no accounts for 1999"\n\n',
    }
    with running("fastapi", "bulltask worker -A shop", servers):
        streams = await asyncio.gather(*(web.get(f"{status}/progress") for status in ends))
    steps = "".join(f"event: message\ndata: {percent}\n\n" for percent in (25, 50, 75))
    assert [stream.text for stream in streams] == [steps + ends[good], ends[bad]]
    # A client that connects later, or again, has the last progress and the outcome, and need not connect once more.
    assert {status: (await web.get(f"{status}/progress")).text for status in ends} == ends
    assert (await web.get(f"/reports/{uuid4()}/progress")).status_code == 404


async def test_a_progress_stream_that_is_cancelled_closes_its_connection(
    web: httpx.AsyncClient, redis_client: redis.Redis
) -> None:
    # As when the client disconnects, or uvicorn's --timeout-graceful-shutdown ends open streams.
    api: Any = importlib.import_module("api")
    sent = (await web.post("/reports", json={"year": 2025})).json()["id"]

    def readers() -> int:
        return sum("xread" in client["cmd"] for client in cast("list[Any]", redis_client.client_list()))

    async def read() -> None:
        async for _ in api.progress(sent, api.app):
            pass

    stream = asyncio.create_task(read())
    await asyncio.to_thread(wait_until, lambda: readers() == 1)
    stream.cancel()
    await asyncio.wait([stream])
    assert stream.cancelled()
    await asyncio.to_thread(wait_until, lambda: readers() == 0)
    await api.app.aclose()


async def test_the_fastapi_example_closes_its_connections_when_the_server_stops(
    web: httpx.AsyncClient, redis_client: redis.Redis
) -> None:
    def connections() -> int:
        return len(cast("list[Any]", redis_client.client_list()))

    api: Any = importlib.import_module("api").api
    before = connections()
    async with api.router.lifespan_context(api):
        assert (await web.post("/reports", json={"year": 2025})).status_code == 202
        assert connections() > before
    wait_until(lambda: connections() == before, 60, "the connections to close")


async def test_the_fastapi_handlers_do_not_show_jobs_of_other_tasks(web: httpx.AsyncClient) -> None:
    assert (await web.get(f"/reports/{uuid4()}")).status_code == 404
    assert (await web.get(f"/reports/{uuid4()}/result")).status_code == 404
    assert (await web.get("/reports/meta")).status_code == 422


@pytest.fixture
def flask_shop(servers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The Flask example, which runs in this process."""
    for name, value in servers.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(EXAMPLES / "flask"))
    flask_app = importlib.import_module("shop").create_app()
    yield flask_app
    flask_app.extensions["bulltask"].close()
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[name]


def test_the_tasks_of_the_flask_example_run_in_its_application_context(
    flask_shop: Any, servers: dict[str, str]
) -> None:
    client = flask_shop.test_client()
    sent = client.post("/reports", json={"year": 2025})
    assert sent.status_code == 202
    page = f"/reports/{sent.json['id']}"
    assert client.get(page).json["state"] == "waiting"
    with running("flask", "bulltask worker -A worker", servers), flask_shop.app_context():
        flask_shop.extensions["bulltask"].result(sent.json["id"]).get(timeout=60)
    assert client.get(page).json == {"state": "completed", "report": "14175 orders, in EUR", "error": None}
    assert client.get(f"/reports/{uuid4()}").status_code == 404


def test_each_task_of_the_flask_example_has_its_own_context_which_is_torn_down(
    flask_shop: Any, broker_url: str
) -> None:
    reports: Any = importlib.import_module("shop.reports")
    flask: Any = importlib.import_module("flask")
    torn_down: list[object] = []
    flask_shop.teardown_appcontext(torn_down.append)
    app = flask_shop.extensions["bulltask"]
    with use_server(app, broker_url), InlineWorker(app):
        assert reports.build_report.delay(2025).get(timeout=60) == "14175 orders, in EUR"
        failing = reports.build_report.delay(None)
        with pytest.raises(TypeError, match="NoneType"):
            failing.get(timeout=60)
        assert not flask.has_app_context()
    assert [type(error).__name__ for error in torn_down] == ["NoneType", "TypeError"]


@pytest.mark.interop
@pytest.mark.one_server
@pytest.mark.usefixtures("node_client")
def test_the_node_producer_gets_results_and_errors_from_the_python_worker(servers: dict[str, str]) -> None:
    with running("node", "bulltask worker -A tasks", servers):
        assert printed("node", "node producer.js", servers) == blocks("node")[0]


@pytest.mark.interop
@pytest.mark.one_server
@pytest.mark.usefixtures("node_client")
def test_the_python_producer_gets_results_and_errors_from_the_node_worker(servers: dict[str, str]) -> None:
    with running("node", "node worker.js", servers) as worker:
        assert "waiting for jobs" in cast("IO[str]", worker.stdout).readline()
        assert printed("node", "python send.py", servers) == blocks("node")[1]


@pytest.mark.interop
@pytest.mark.one_server
@pytest.mark.usefixtures("board_client")
def test_the_example_board_shows_every_queue_and_its_buttons_work(servers: dict[str, str]) -> None:
    with running("bull-board", "bulltask worker -A tasks", servers):
        assert printed("bull-board", "python send.py", servers) == blocks("bull-board")[0]
        with open_board(servers) as board:
            assert "<title>Bull Dashboard</title>" in board.get("/").text
            shown = board.get("/api/queues").json()["queues"]
            completed = {queue["name"]: queue["counts"]["completed"] for queue in shown}
            assert completed == {"{default}": 0, "{mail}": 1, "{pages}": 3, "{reports}": 1}
            assert all(queue["hasWorkers"] for queue in shown)
            assert board.put("/api/queues/%7Bmail%7D/promote").status_code == 200
            assert board.put("/api/queues/pause", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
            wait_until(lambda: counts(board)["completed"] == 2, 60, "the delayed job's end")
            assert (counts(board)["failed"], counts(board)["delayed"]) == (1, 0)


def counts(board: httpx.Client) -> dict[str, int]:
    """Return the board's job counts of the example's mail queue."""
    found = [queue for queue in board.get("/api/queues").json()["queues"] if queue["name"] == "{mail}"]
    return dict(found[0]["counts"])


@pytest.mark.interop
@pytest.mark.one_server
@pytest.mark.usefixtures("board_client")
def test_the_example_board_requires_its_password_and_can_be_read_only(servers: dict[str, str]) -> None:
    with App("looked at", servers["BULLTASK_BROKER_URL"]).queue("mail") as queue:
        queue.add("mail.send", {"to": "ada@example.com"})
        guarded = servers | {"BOARD_PASSWORD": "open sesame", "READ_ONLY": "1"}
        with open_board(guarded, auth=("admin", "open sesame")) as board:
            assert board.get("/", auth=("admin", "guess")).status_code == 401
            assert board.get("/api/queues", auth=None, headers={"Authorization": "x"}).status_code == 401
            assert counts(board)["waiting"] == 1
            assert board.put("/api/queues/%7Bmail%7D/empty").status_code == 405
        assert queue.count() == 1


@pytest.mark.interop
@pytest.mark.usefixtures("board_client")
def test_the_example_board_without_a_password_listens_on_loopback_only() -> None:
    done = subprocess.run(
        command("bull-board", "node board.js"),
        cwd=EXAMPLES / "bull-board",
        env=os.environ | {"HOST": "0.0.0.0", "PORT": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "Set BOARD_PASSWORD" in done.stderr


@pytest.mark.parametrize("folder", ["node", "bull-board"])
def test_the_node_examples_pin_the_supported_bullmq_and_name_no_registry(folder: str) -> None:
    lock = (EXAMPLES / folder / "package-lock.json").read_text()
    assert '"resolved"' not in lock
    assert '"bullmq": "5.62.0"' in (EXAMPLES / folder / "package.json").read_text()
    assert '"bullmq": "5.62.0"' in lock


def test_the_django_example_sends_at_the_commit_and_its_command_runs_the_tasks(
    servers: dict[str, str], tmp_path: Path
) -> None:
    environment = servers | {"SHOP_DATABASE": str(tmp_path / "shop.sqlite3")}
    printed("django", "python manage.py migrate", environment)
    with running("django", "python manage.py bulltask worker", environment):
        assert printed("django", "python manage.py order", environment) == blocks("django")[0]
        printed("django", "python manage.py test", environment)  # its jobs do not reach the worker
        with App("looked at", servers["BULLTASK_BROKER_URL"]).queue("default") as queue:
            counts = queue.get_job_counts("completed", "failed", "waiting", "active")
            assert counts["completed"] == sum(counts.values()) == 1, "the order that was rolled back has no job"
            (scheduler,) = queue.schedulers.list()
            assert scheduler.name == "orders.tasks.count_orders"
