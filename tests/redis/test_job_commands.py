"""``bulltask job show`` shows a job from Redis and from the lake."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bulltask import App
from bulltask.cli.main import main
from tests.redis.conftest import Run
from tests.support.command_output import json_of
from tests.support.lake import LakeBuilder, at

pytestmark = pytest.mark.redis

END = at("2026-11-20 10:00", 250)
MS = int(END.timestamp() * 1000)


def add_failed_job(app: App) -> str:
    """Add a job that fails in its second attempt, with a log; return its id."""
    queue = app.queue("mail")
    job = queue.add("send", {"to": "ada"}, attempts=2, backoff=None)
    for number in (1, 2):
        acquired = queue.get_next_job("token", worker="w-1")
        assert acquired is not None
        acquired.log(f"attempt {number}\n\x1b[31mred")
        acquired.update_progress({"part": number})
        acquired.move_to_failed(ConnectionError(f"refused by \x1b[2J host {number}"))
    return job.id


def add_finished_job(lake: LakeBuilder, job_id: str, state: str = "failed", **more: Any) -> None:
    """Write a finished job with two attempts to the lake."""
    job = {"job_id": job_id, "incarnation": f"{MS}-0", "name": "send"}
    start = END - timedelta(seconds=3)
    lake.jobs(
        [{**job, "state": state, "finished_at": END, "created_at": start, "wait_ms": 500, "run_ms": 2500, **more}]
    )
    lake.attempts(
        [
            {**job, "outcome": "requeued", "started_at": start, "ended_at": END, "wait_ms": 500, "run_ms": 1000},
            {**job, "attempt": 2, "outcome": state, "started_at": END, "ended_at": END, "failed_reason": "no\nway"},
        ]
    )
    lake.events(
        [
            {"event_id": f"{MS - 3000}-0", "event": "added", "job_id": job_id, "name": "send"},
            {"event_id": f"{MS}-0", "event": state, "job_id": job_id, "prev": "active", "failed_reason": "no\x1b[2J"},
        ]
    )


def test_show_prints_data_attempts_tracebacks_and_logs_from_redis(app: App, run: Run) -> None:
    job_id = add_failed_job(app)
    shown = run("show", job_id)
    assert shown.exit_code == 0, shown.output
    first, second, *lines = shown.output.splitlines()
    assert first == f"send {job_id}, queue mail"
    assert re.fullmatch(r"failed, [\d.]+ s ago \(from Redis\)", second)
    facts = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in lines if re.match(r"\w+\s{2,}", line))
    assert facts["added"].endswith(f" by {app.name}@{socket.gethostname()}")
    assert facts["attempts"] == "2 of 2 made, 2 started"
    assert facts["data"] == '{"to": "ada"}'
    assert json.loads(facts["options"])["attempts"] == 2
    assert facts["progress"] == '{"part": 2}'
    assert facts["started"].endswith(" by w-1")
    assert "refused by" in facts["reason"]
    assert [line for line in lines if line.startswith("Traceback ")] == ["Traceback 1 of 2", "Traceback 2 of 2"]
    assert lines[-5:] == ["Logs", "  attempt 1", "  \\x1b[31mred", "  attempt 2", "  \\x1b[31mred"]
    assert "\x1b" not in shown.output


def test_show_json_prints_a_job_from_redis(app: App, run: Run) -> None:
    job_id = add_failed_job(app)
    shown = json_of(run("show", job_id, "--json", "--queue", "mail"), "job show")
    assert (shown["id"], shown["queue"], shown["history"]) == (job_id, "mail", None)
    stored = shown["redis"]
    assert (stored["state"], stored["data"], stored["attempts_made"], stored["worker"]) == (
        "failed",
        {"to": "ada"},
        2,
        "w-1",
    )
    assert (len(stored["stacktrace"]), stored["logs"], stored["log_lines"]) == (
        2, ["attempt 1\n\x1b[31mred", "attempt 2\n\x1b[31mred"], 2,
    )  # fmt: skip
    assert abs(datetime.now(UTC) - datetime.fromisoformat(stored["finished_at"])) < timedelta(minutes=5)


def test_show_prints_a_job_that_only_the_lake_has(lake: LakeBuilder, run: Run) -> None:
    add_finished_job(lake, "gone-1", failed_reason="no\nway")
    lake.snapshots(
        [{"id": "gone-1", "data": '{"to": "ada"}', "stacktrace": '["Traceback\\nline"]', "snapshot_at": END}]
    )
    shown = run("show", "gone-1", "--lake", lake.root)
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert lines[0] == "send gone-1, queue mail"
    assert re.fullmatch(r"failed, .* \(from the lake\)", lines[1])
    assert "finished   2026-11-20 10:00:00.250" in lines
    assert "total      waited 0.500 s, ran 2.500 s, took -" in lines
    assert lines[lines.index("reason     no") + 1] == "           way"
    assert 'data       {"to": "ada"}' in lines
    attempts = lines[lines.index("Attempts") + 2 : lines.index("Events") - 1]
    assert [line.split() for line in attempts] == [
        ["1", "2026-11-20", "09:59:57.250", "0.500", "s", "1.000", "s", "requeued", "-"],
        ["2", "2026-11-20", "10:00:00.250", "-", "-", "failed", "-", "no", "way"],
    ]
    events = lines[lines.index("Events") + 1 :]
    assert events[:2] == [
        "  2026-11-20 09:59:57.250  added",
        "  2026-11-20 10:00:00.250  failed (was active): no\\x1b[2J",
    ]
    assert lines[-3:] == ["Traceback 1 of 1", "  Traceback", "  line"]


def test_show_adds_attempts_and_events_from_the_lake(app: App, lake: LakeBuilder, run: Run) -> None:
    job_id = add_failed_job(app)
    add_finished_job(lake, job_id)
    add_finished_job(lake, "another")
    shown = run("show", job_id, "--lake", lake.root)
    assert "(from Redis and the lake)" in shown.output
    assert 'data       {"to": "ada"}' in shown.output
    assert shown.output.count("requeued") == 1
    job = json_of(run("show", job_id, "--lake", lake.root, "--json"), "job show")
    assert [attempt["outcome"] for attempt in job["history"]["attempts"]] == ["requeued", "failed"]
    assert job["history"]["incarnations"][0]["finished_at"] == "2026-11-20T10:00:00.250000+00:00"
    assert job["history"]["attempts"][0]["wait_time"] == 0.5


def test_show_prints_a_job_of_a_queue_that_is_not_in_the_lake(app: App, lake: LakeBuilder, run: Run) -> None:
    add_finished_job(lake, "1")
    job = app.queue("new").add("send", {})
    shown = run("show", job.id, "--lake", lake.root)
    assert shown.exit_code == 0, shown.output
    assert "waiting," in shown.output
    assert "(from Redis)" in shown.output


def test_show_prints_the_last_event_of_an_unfinished_job(lake: LakeBuilder, run: Run) -> None:
    lake.events([{"event_id": f"{MS}-0", "event": "added", "job_id": "1", "name": "send"}])
    shown = run("show", "1", "--lake", lake.root)
    assert shown.output.startswith("send 1, queue mail\nnot finished; its last event is 'added', ")


def test_show_lists_earlier_jobs_with_the_same_id(lake: LakeBuilder, run: Run) -> None:
    add_finished_job(lake, "1")
    lake.jobs(
        [
            {
                "job_id": "1",
                "incarnation": "1-0",
                "state": "removed",
                "as_of": at("2026-11-01"),
                "created_at": at("2026-11-01"),
            }
        ]
    )
    shown = run("show", "1", "--lake", lake.root)
    assert "Earlier jobs with this id\n  2026-11-01 00:00:00.000  removed\n" in shown.output


def test_show_exits_with_1_for_an_unknown_job_and_names_the_searched_places(lake: LakeBuilder, run: Run) -> None:
    add_finished_job(lake, "1")
    alone = run("show", "missing")
    assert (alone.exit_code, alone.stdout) == (4, "")
    assert "job 'missing' not found in Redis (all queues)" in alone.output
    assert "job show ID --lake DIR" in alone.output
    both = run("show", "missing", "--queue", "mail", "--lake", lake.root)
    assert (both.exit_code, both.stdout) == (4, "")
    assert f"not found in Redis (queue mail) or the lake {lake.root}" in both.output


def test_show_suggests_a_name_for_a_misspelled_queue(lake: LakeBuilder, run: Run) -> None:
    add_finished_job(lake, "1")
    shown = run("show", "1", "--queue", "mial", "--lake", lake.root)
    assert shown.exit_code == 1
    assert "no data for queue 'mial'; did you mean 'mail'?" in shown.output


@pytest.mark.parametrize("hash_tag", [True, pytest.param(False, marks=pytest.mark.one_server)])
def test_show_needs_the_queue_if_several_queues_have_the_id(
    broker_url: str, run: Run, redis_client: Any, hash_tag: bool
) -> None:
    with_tag = [] if hash_tag else ["--no-queue-hash-tag"]
    app = App("sender", broker_url, queue_hash_tag=hash_tag)
    for name in ("mail", "reports"):
        app.queue(name).add("send", {"queue": name}, job_id="same")
    app.close()
    shown = run("show", "same", *with_tag)
    assert shown.exit_code == 2
    assert "several queues have a job 'same': mail, reports; choose one with --queue" in shown.output
    assert '{"queue": "reports"}' in run("show", "same", "--queue", "reports", *with_tag).output


@pytest.mark.one_server
def test_a_queue_without_the_hash_tag_that_has_the_id_too_is_named(broker_url: str, run: Run) -> None:
    for hash_tag, name in ((True, "mail"), (True, "reports"), (False, "plain")):
        with closing(App("sender", broker_url, queue_hash_tag=hash_tag)) as app:
            app.queue(name).add("send", job_id="same")
    listed = "several queues have a job 'same': mail, reports, plain (--no-queue-hash-tag); choose one with --queue"
    assert listed in run("show", "same").output
    assert listed in CliRunner().invoke(main, ["why", "same", "-b", broker_url]).output


@pytest.mark.one_server
def test_show_ignores_queues_without_the_hash_tag_by_default(broker_url: str, run: Run) -> None:
    for hash_tag in (True, False):
        app = App("sender", broker_url, queue_hash_tag=hash_tag)
        app.queue("mail").add("send", {"braces": hash_tag}, job_id="same")
        app.close()
    assert '{"braces": true}' in run("show", "same").output


@pytest.mark.slow
def test_show_uses_the_broker_url_and_the_prefix_of_the_app(
    app: App, broker_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop_of_job_tests.py").write_text(
        f"from bulltask import App\napp = App('shop', {broker_url!r}, prefix='shop')\n"
    )
    shop = App("shop", broker_url, prefix="shop")
    job = shop.queue("mail").add("send", {"to": "ada"})
    shop.close()
    monkeypatch.chdir(tmp_path)
    args = [sys.executable, "-m", "bulltask", "job", "show", job.id, "-A", "shop_of_job_tests"]
    completed = subprocess.run(args, capture_output=True, text=True, timeout=50, check=False)
    assert completed.returncode == 0, completed.stderr
    assert 'data       {"to": "ada"}' in completed.stdout
    assert CliRunner().invoke(main, ["job", "show", job.id, "-b", broker_url, "--prefix", "shop"]).exit_code == 0
    assert CliRunner().invoke(main, ["job", "show", job.id, "-b", broker_url]).exit_code == 4


def test_show_reads_only_the_lake_if_redis_is_unavailable(lake: LakeBuilder) -> None:
    add_finished_job(lake, "1")
    with socket.socket() as unused_port:
        unused_port.bind(("127.0.0.1", 0))  # nothing listens there
        url = f"redis://127.0.0.1:{unused_port.getsockname()[1]}/0"
        shown = CliRunner().invoke(main, ["-b", url, "job", "show", "1", "--lake", str(lake.root)])
        alone = CliRunner().invoke(main, ["-b", url, "job", "show", "1"])
    assert shown.exit_code == 0, shown.output
    assert "Redis is not available; showing the lake only" in shown.stderr
    assert shown.stdout.startswith("send 1, queue mail\nfailed")
    assert (alone.exit_code, alone.stdout) == (1, "")
    assert alone.stderr.startswith("Error: ")
    assert "not found" not in alone.stderr


def test_show_with_no_redis_does_not_connect(lake: LakeBuilder) -> None:
    add_finished_job(lake, "1")
    url = "redis://127.0.0.1:1/0"
    args = ["-b", url, "job", "show", "1", "--no-redis"]
    shown = CliRunner().invoke(main, [*args, "--lake", str(lake.root)])
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert CliRunner().invoke(main, args).exit_code == 2


def test_the_lakes_directory_may_be_set_in_the_environment(
    lake: LakeBuilder, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_finished_job(lake, "1")
    monkeypatch.setenv("BULLTASK_LAKE", str(lake.root))
    assert "(from the lake)" in run("show", "1").output


@pytest.mark.slow
def test_help_does_not_import_pyarrow() -> None:
    program = "import sys; from bulltask.cli import history, job; print('pyarrow' in sys.modules)"
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    assert completed.stdout.strip() == "False"
