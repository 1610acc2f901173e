"""``bulltask call``, ``result``, ``events``, ``report`` and ``shell``."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bulltask import App
from tests.redis.conftest import Run
from tests.support.command_output import SCHEMAS, json_of

pytestmark = pytest.mark.redis

SHOP = """
from bulltask import App
app = App("shop", payload_signing_keys="k1:" + "A" * 43, beat_schedule={"nightly": {"task": "add", "schedule": 60}})
@app.task(name="add", queue="sums")
def add(x: int, y: int = 1) -> int: ...
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ``-A`` of an app with the task ``add``."""
    (tmp_path / "shop_of_calls.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "shop_of_calls", raising=False)
    return "shop_of_calls"


def finish_next(app: App, queue: str, error: str | None = None) -> threading.Thread:
    """Finish the next job of a queue in a thread, as a worker would."""

    def work() -> None:
        job: Any = app.queue(queue).get_next_job("token", timeout=20)
        if error is None:
            job.move_to_completed({"sum": job.data})
        else:
            job.discard()
            job.move_to_failed(ValueError(error))

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_call_sends_a_job_with_the_tasks_options(app: App, bulltask: Run, shop: str) -> None:
    sent = bulltask("call", "add", "-A", shop, "--args", "[1]", "--kwargs", '{"y": 2}', "--countdown", "1h", "--json")
    assert sent.exit_code == 0, sent.output
    document = json_of(sent, "call")
    job = app.queue("sums").get_job(document["id"])
    assert job is not None
    assert (document["queue"], job.data, job.delay_ms, job.name) == ("sums", {"x": 1, "y": 2}, 3_600_000, "add")
    plain = bulltask("call", "any", "-Q", "mail", "--args", "[1]", "--eta", "2099-01-01", "--priority", 3)
    job = app.queue("mail").get_job(plain.stdout.strip())
    assert job is not None
    assert (job.data, job.priority, str(job.get_state())) == ([1], 3, "delayed")


def test_a_call_that_waits_prints_the_result_or_the_error(app: App, bulltask: Run) -> None:
    thread = finish_next(app, "mail")
    done = bulltask("call", "n", "-Q", "mail", "--kwargs", '{"x": 1}', "--wait", "--timeout", 20)
    thread.join()
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"sum": {"x": 1}})
    late = bulltask("call", "n", "-Q", "mail", "--wait", "--timeout", "0", "--json")
    assert (late.exit_code, json_of(late, "call")["state"]) == (3, "waiting")
    late_id = json_of(late, "call")["id"]
    assert bulltask("result", late_id).exit_code == 3
    thread = finish_next(app, "mail", "no")
    failed = bulltask("result", late_id, "--wait", "--timeout", 20)
    thread.join()
    assert (failed.exit_code, failed.stderr) == (1, "failed: no\n")
    failed = bulltask("result", late_id, "--traceback")
    assert (failed.exit_code, failed.stdout, failed.stderr.startswith("failed: no\nValueError: no")) == (1, "", True)
    assert "ValueError: no" in json_of(bulltask("result", late_id, "--json"), "result")["traceback"]
    assert bulltask("result", "gone").exit_code == 4


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("add", "--args", "1"), "--args must be a JSON array"),
        (("add", "--args", "[1"), "--args is not JSON"),
        (("add", "--args", '["a", "b", "c"]'), "add() "),
        (("add", "--timeout", "1"), "--timeout needs --wait"),
    ],
)
def test_a_call_with_wrong_arguments_sends_nothing(
    app: App, bulltask: Run, shop: str, args: tuple[str, ...], message: str
) -> None:
    wrong = bulltask("call", *args, "-A", shop)
    assert (wrong.exit_code, message in wrong.stderr) == (2, True), wrong.stderr
    assert app.queue("sums").count() == 0


def test_a_misspelled_task_is_noted(bulltask: Run, shop: str) -> None:
    assert "did you mean 'add'?" in bulltask("call", "ad", "-A", shop).stderr


def test_events_are_followed_and_filtered(app: App, bulltask: Run) -> None:
    job = app.queue("mail").add("send")
    app.queue("other").add("report")
    since = ("events", "--since", "1h")
    lines = bulltask(*since, "--limit", 4).stdout.splitlines()
    assert sorted(line.split("  ")[1:3] for line in lines) == [
        ["mail", "added"], ["mail", "waiting"], ["other", "added"], ["other", "waiting"],
    ]  # fmt: skip
    one = bulltask(*since, "-Q", "mail,other", "--event", "added", "--filter", "REPORT", "--limit", 1, "--json")
    document = json.loads(one.stdout)
    jsonschema.validate(document, json.loads((SCHEMAS / "events.json").read_text()))
    assert (document["queue"], document["name"]) == ("other", "report")
    of_job = bulltask(*since, "--job", job.id, "--event", "waiting", "--limit", 1).stdout
    assert f"mail  waiting  {job.id}" in of_job
    assert bulltask("events", "-Q", "nope").exit_code == 4


def test_the_report_has_no_secrets(app: App, bulltask: Run, shop: str, tmp_path: Path) -> None:
    queue = app.queue("mail")
    queue.add("send", attempts=1)
    job = queue.get_next_job("token")
    assert job is not None
    job.move_to_failed("cannot connect to redis://user:hunter2@host")
    queue.add("send", timestamp=time.time() - 90)
    queue.pause(by="ada")
    queue.schedulers.upsert("nightly", cron="0 3 * * *", data={"password": "hunter2"})
    result = bulltask("report", "-A", shop, "--json")
    assert result.exit_code == 0, result.output
    document = json_of(result, "report")
    assert (document["settings"]["payload_signing_keys"], document["settings"]["beat_schedule"]) == (
        "***",
        "['nightly']",
    )
    assert document["versions"]["bulltask"]
    assert document["redis"]["maxmemory_policy"]
    [row] = document["queues"]
    assert (row["queue"], row["failed"], row["oldest_waiting"] >= 90) == ("mail", 1, True)
    assert "paused" in [reason["code"] for reason in document["reasons"]]
    assert [(row["id"], row["rule"]) for row in document["schedules"]] == [("nightly", "0 3 * * *")]
    assert document["failures"][0]["count"] == 1
    assert document["not_available"] == []
    assert bulltask("report", "-o", tmp_path / "report.txt").exit_code == 0
    text = (tmp_path / "report.txt").read_text()
    assert {"versions", "settings", "redis", "queues", "why jobs wait", "schedules", "failures"} <= set(
        text.splitlines()
    )
    assert "hunter2" not in text + result.output
    assert "AAAA" not in text + result.output


def test_the_shell_has_the_app_its_tasks_and_a_queue(broker_url: str, shop: str) -> None:
    args = [sys.executable, "-m", "bulltask", "-b", broker_url, "shell", "-A", shop, "--python"]
    program = "print(app.name, add.name, queue.count())\n"
    done = subprocess.run(args, input=program, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, "shop add 0" in done.stdout) == (0, True), done.stderr


FACTORY = """
from bulltask import App
made = []
def create():
    app = App("made", include=["tasks_of_calls"])
    made.append(app)
    return app
"""
INCLUDED = """
from bulltask import shared_task
@shared_task(name="add", queue="sums")
def add(x: int, y: int = 1) -> int: ...
"""


def test_a_factory_is_called_once_and_the_options_of_its_tasks_apply(
    bulltask: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "factory_of_calls.py").write_text(FACTORY)
    (tmp_path / "tasks_of_calls.py").write_text(INCLUDED)
    monkeypatch.chdir(tmp_path)
    sent = json_of(bulltask("-A", "factory_of_calls:create()", "call", "add", "-a", "[1]", "--json"), "call")
    assert sent["queue"] == "sums"
    assert len(sys.modules["factory_of_calls"].made) == 1


def test_the_queues_and_schedules_of_an_app_are_listed_before_a_worker_has_started(bulltask: Run, shop: str) -> None:
    document = json_of(bulltask("queues", "-A", shop, "--json"), "queues")
    assert {queue["queue"] for queue in document["queues"]} >= {"default", "sums"}
    del sys.modules[shop]  # each command imports the app, and closes it
    shown = bulltask("schedule", "list", "-A", shop)
    assert shown.exit_code == 0
    assert "1 schedule of the app, which a worker stores when it starts: nightly\n" in shown.stderr
