"""``make demo``: it succeeds, reports failures, and leaves no process or file behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, cast

import pytest

from bulltask.testing.worker import wait_until
from tests.support.programs import ROOT, run_program

pytestmark = pytest.mark.process

DEMO = ROOT / "examples" / "demo"
FEW_JOBS = ("--jobs", "100")
Replacements = Mapping[str, str]
# A demo with these tasks takes half the CPU time: rendering the film takes as long, but sleeps.
FAST_TASKS = {
    'hashlib.pbkdf2_hmac("sha256", film.encode(), b"frames", 600_000)': '__import__("time").sleep(0.3)',
    "30_000": "1",
}
WRONG_RESULT = {'return f"page {page}"': 'return f"page {page or 99}"'}
STALL_WITHOUT_RETRY = {
    "    if self.request.retries == 0:": """\
    import redis
    redis.Redis.from_url(os.environ["BULLTASK_BROKER_URL"]).hincrby("bull:{demo}:" + self.request.id, "stc", 1)
    if self.request.retries == 9:"""
}
CRASH_LIMIT = {'broker_url="embedded://demo"': "max_crashes=1"}


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """The temporary directory of the demo."""
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


@contextmanager
def start_demo(
    scratch: Path, *arguments: str, folder: Path = DEMO, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[subprocess.Popen[str]]:
    """Start the demo with both outputs in one pipe; kill it at the end if it is still running."""
    with subprocess.Popen(
        [sys.executable, str(folder / "run.py"), *arguments],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run(scratch: Path, *arguments: str, **options: Any) -> tuple[int, str]:
    """Run the demo; return its exit code and output."""
    with start_demo(scratch, *arguments, **options) as process:
        output, _ = process.communicate(timeout=50)
        return process.returncode, output


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Read the output up to the line that contains ``text``."""
    lines = []
    for line in cast("IO[str]", process.stdout):
        lines.append(line)
        if text in line:
            return "".join(lines)
    pytest.fail(f"the demo exited without printing {text!r}:\n{''.join(lines)}")


def changed_copy(tmp_path: Path, replacements: Replacements) -> Path:
    """Return a copy of the demo with fast tasks and other strings in tasks.py replaced."""
    folder = tmp_path / "demo"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / "tasks.py").read_text()
    for old, new in {**FAST_TASKS, **replacements}.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "tasks.py").write_text(text)
    return folder


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def output(session_id: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of a demo that has succeeded, on an ASCII terminal, in an environment with bulltask settings."""
    scratch = tmp_path_factory.mktemp("scratch")
    settings = {"BULLTASK_BROKER_URL": "redis://127.0.0.1:1/0", "BULLTASK_PREFIX": "x", "BULLTASK_RESULT_EXPIRES": "0"}
    code, output = run(scratch, environment={**settings, "PYTHONIOENCODING": "ascii"})
    assert code == 0, output
    assert list(scratch.iterdir()) == []
    return output


def test_the_demo_shows_every_kind_of_job_and_succeeds(output: str) -> None:
    table = dict(re.findall(r"^\|(\S.*?) *\| +([\d,]+) ", output, re.MULTILINE))
    assert table == {
        "sync tasks": "24",
        "async tasks": "100",
        "transient error": "1",
        "permanent error": "1",
        "killed child": "1",
        "no-op jobs": "5,000",
        "stalled jobs": "0",
    }
    assert re.search(r"recovered after \d+ ms \(lock: 30 s\)", output)
    assert [line for line in output.splitlines() if len(line) > 80] == []


def test_the_next_steps_that_the_demo_prints_work(tmp_path: Path, output: str) -> None:
    worker, send, read = re.findall(r"^  # .*\n  (.+)$", output, re.MULTILINE)
    home = {**os.environ, "XDG_DATA_HOME": str(tmp_path)}
    with subprocess.Popen(worker.split(), cwd=ROOT, env=home, stderr=subprocess.DEVNULL) as process:
        try:
            sent = subprocess.run(
                send.split(), cwd=ROOT, env=home, capture_output=True, text=True, timeout=40, check=True
            )
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert "2 + 3 = 5" in sent.stdout
    assert (ROOT / read.split()[-1]).is_file()


@pytest.mark.parametrize(
    ("replacements", "reasons"),
    [
        (
            {**WRONG_RESULT, **STALL_WITHOUT_RETRY},
            [
                'its result is "page 99" instead of "page 0"',
                "attempts made: 1 instead of 2",
                "stalls: 1 instead of 0",
            ],
        ),
        (CRASH_LIMIT, ["the child process running this job died (SIGKILL)"]),
    ],
    ids=["a wrong result, no retry and a stall", "a crash without recovery"],
)
def test_the_demo_fails_if_a_job_has_an_unexpected_outcome(
    tmp_path: Path, scratch: Path, replacements: Replacements, reasons: list[str]
) -> None:
    code, output = run(scratch, *FEW_JOBS, folder=changed_copy(tmp_path, replacements))
    assert code == 1, output
    assert [reason for reason in reasons if reason not in output] == [], output
    assert "Every job" not in output


def test_the_demo_fails_immediately_if_its_worker_does_not_start(tmp_path: Path, scratch: Path) -> None:
    early_end = 'import hashlib, sys\n"worker" in sys.argv and sys.exit("no luck")'
    folder = changed_copy(tmp_path, {"import hashlib": early_end})
    code, output = run(scratch, folder=folder)
    assert code == 1
    assert "the worker exited with code 1" in output
    assert "no luck" in output
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "   server  "),
        (signal.SIGINT, ">>> await asyncio.gather(*jobs)"),
        (signal.SIGTERM, "progress"),
        (signal.SIGHUP, ">>> jobs[-1].get()"),
    ],
)
def test_an_interrupted_demo_stops_its_worker_and_server_and_leaves_no_file(
    tmp_path: Path, scratch: Path, number: signal.Signals, moment: str
) -> None:
    with start_demo(scratch, folder=changed_copy(tmp_path, {})) as process:
        seen = read_until(process, moment)
        process.send_signal(number)
        output, _ = process.communicate(timeout=20)
    port = int(re.findall(r"on port (\d+)", seen)[0])
    assert process.returncode == 128 + number, output
    assert "Traceback" not in output
    assert not listens(port)
    assert list(scratch.iterdir()) == []


def test_a_signal_that_arrives_in_a_finalizer_stops_the_demo() -> None:
    # Not signal.pause(): if the repeated signal arrived just before it, Python would run the handler only after it.
    program = """
import os, processes, signal, socket

class Thing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

processes.install_signal_handlers()
received, wakeup = socket.socketpair()
wakeup.setblocking(False)
signal.set_wakeup_fd(wakeup.fileno())
thing = Thing()
try:
    del thing
    while True:
        received.recv(1)
except processes.Interrupted as interrupted:
    print(interrupted.number)
"""
    with run_program(program, PYTHONPATH=f"{ROOT}{os.pathsep}{DEMO}") as running:
        assert running.read_rest() == "15\n"


def test_the_worker_and_server_of_a_killed_demo_exit(tmp_path: Path, scratch: Path) -> None:
    with start_demo(scratch, *FEW_JOBS, folder=changed_copy(tmp_path, {})) as process:
        port = int(re.findall(r"on port (\d+)", read_until(process, "progress"))[0])
        process.kill()
        process.wait(60)
    wait_until(lambda: not listens(port), 60, "the end of the server")  # conftest checks that the worker exits


def test_make_demo_runs_the_demo() -> None:
    # make exports its variables: with `make test ARGS=…`, the demo would get those arguments.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "ARGS"))}
    plan = subprocess.run(["make", "-n", "demo"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert plan.stdout.splitlines()[-1].split() == [".venv/bin/python", "examples/demo/run.py"]
