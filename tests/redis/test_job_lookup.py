"""``bulltask job show`` without ``--queue`` finds the job's queue cheaply, without reading all keys."""

from __future__ import annotations

from base64 import b64encode
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from bulltask import App
from bulltask.cli.main import main
from tests.conftest import needs_redis_7
from tests.redis.conftest import Run
from tests.support.lake import LakeBuilder, at

pytestmark = pytest.mark.redis

END = at("2026-11-20 10:00", 250)


def command_calls(client: Any, name: str) -> int:
    """Return how often the server has executed a command."""
    return int(client.info("commandstats").get(f"cmdstat_{name}", {"calls": 0})["calls"])


@pytest.fixture
def many_queues(app: App, redis_client: Any) -> Any:
    """Fifty queues and many other keys; ``q42`` and ``q7`` have one job each."""
    for number in range(50):
        redis_client.hset(f"bull:{{q{number}}}:meta", "version", "bullmq:5.62.0")
    pipe = redis_client.pipeline(transaction=False)
    for number in range(20_000):
        pipe.set(f"bull:{{q1}}:{number}", "")
    pipe.execute()
    app.queue("q42").add("send", {"to": "ada"}, job_id="job-of-42")
    app.queue("q7").add("send", {"to": "bob"}, job_id="job-of-7")
    redis_client.delete("bulltask:queues")  # as if Node.js had sent them
    return redis_client


@pytest.mark.one_server
def test_queues_of_the_lake_and_of_workers_are_searched_before_a_scan(
    many_queues: Any, broker_url: str, lake: LakeBuilder, run: Run
) -> None:
    lake.jobs([{"job_id": "another", "queue": f"q{n}", "state": "completed", "finished_at": END} for n in range(45)])
    scans, lookups = command_calls(many_queues, "scan"), command_calls(many_queues, "exists")
    assert '{"to": "ada"}' in run("show", "job-of-42", "--lake", lake.root).output
    assert command_calls(many_queues, "exists") - lookups <= 55
    with closing(redis.Redis.from_url(broker_url, client_name=f"bull:{b64encode(b'{q7}').decode()}:w:one")) as worker:
        worker.ping()
        assert '{"to": "bob"}' in run("show", "job-of-7").output
    assert command_calls(many_queues, "scan") == scans
    assert '{"to": "bob"}' in run("show", "job-of-7").output
    assert command_calls(many_queues, "scan") - scans >= 20  # the scan finds it
    many_queues.zadd("bulltask:queues", {"{q7}": 1})
    scans = command_calls(many_queues, "scan")
    assert '{"to": "bob"}' in run("show", "job-of-7").output
    assert command_calls(many_queues, "scan") == scans, "a registered queue is searched before"


def test_queues_of_the_apps_tasks_are_searched_before_a_scan(
    many_queues: Any, broker_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app_of_job_tests.py").write_text(
        f"from bulltask import App\napp = App('shop', {broker_url!r})\n"
        "@app.task(queue='q42')\ndef send(to: str) -> None: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    scans = command_calls(many_queues, "scan")
    shown = CliRunner().invoke(main, ["job", "show", "job-of-42", "-A", "app_of_job_tests"])
    assert '{"to": "ada"}' in shown.output
    assert command_calls(many_queues, "scan") == scans


def test_the_scan_of_keys_is_limited_and_the_limit_is_reported(
    many_queues: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bulltask.queue.overview.MAX_PAGES", 2)
    scans = command_calls(many_queues, "scan")
    shown = run("show", "missing")
    assert command_calls(many_queues, "scan") - scans == 2
    assert shown.exit_code == 4
    assert "more than the 2,000 keys that were scanned" in shown.output
    assert "choose one with --queue" in shown.output
    assert '{"to": "ada"}' in run("show", "job-of-42", "--queue", "q42").output


@pytest.mark.one_server
def test_connections_with_other_names_are_ignored(app: App, broker_url: str, run: Run) -> None:
    job = app.queue("mail").add("send", {})
    for name in ("bull:not-base64", "bull:", "bull:/w==", "other:bWFpbA=="):
        with closing(redis.Redis.from_url(broker_url, client_name=name)) as other:
            other.ping()
            assert run("show", job.id).exit_code == 0


@pytest.mark.one_server
@needs_redis_7
def test_a_user_without_permission_for_client_list_finds_jobs(app: App, broker_url: str, redis_client: Any) -> None:
    job = app.queue("mail").add("send", {})
    redis_client.execute_command("ACL SETUSER", "narrow", "on", ">secret", "~*", "&*", "+@all", "-client|list")
    try:
        url = broker_url.replace("redis://", "redis://narrow:secret@")
        shown = CliRunner().invoke(main, ["-b", url, "job", "show", job.id])
        assert shown.exit_code == 0, shown.output
    finally:
        redis_client.acl_deluser("narrow")
