"""``bulltask job show`` without ``--queue``: the queue is found where that costs least, and not by reading all keys."""

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
from tests.redis.conftest import Run
from tests.support.lake import LakeBuilder, at

pytestmark = pytest.mark.redis

END = at("2026-11-20 10:00", 250)


def lines_of(client: Any, name: str) -> int:
    """How often a command was given."""
    return int(client.info("commandstats").get(f"cmdstat_{name}", {"calls": 0})["calls"])


@pytest.fixture
def crowd(app: App, redis_client: Any) -> Any:
    """Fifty queues, and many keys beside them; of ``q42`` and ``q7`` there is a job."""
    for number in range(50):
        redis_client.hset(f"bull:{{q{number}}}:meta", "version", "bullmq:5.62.0")
    pipe = redis_client.pipeline(transaction=False)
    for number in range(20_000):
        pipe.set(f"bull:{{q1}}:{number}", "")
    pipe.execute()
    app.queue("q42").add("send", {"to": "ada"}, job_id="job-of-42")
    app.queue("q7").add("send", {"to": "bob"}, job_id="job-of-7")
    return redis_client


def test_the_queues_of_the_lake_and_of_workers_are_asked_before_any_key_is_looked_through(
    crowd: Any, broker_url: str, lake: LakeBuilder, run: Run
) -> None:
    lake.jobs([{"job_id": "another", "queue": f"q{n}", "state": "completed", "finished_at": END} for n in range(45)])
    scans, looks = lines_of(crowd, "scan"), lines_of(crowd, "exists")
    assert '{"to": "ada"}' in run("show", "job-of-42", "--lake", lake.layout.root).output
    assert lines_of(crowd, "exists") - looks <= 50
    with closing(redis.Redis.from_url(broker_url, client_name=f"bull:{b64encode(b'{q7}').decode()}:w:one")) as worker:
        worker.ping()
        assert '{"to": "bob"}' in run("show", "job-of-7").output
    assert lines_of(crowd, "scan") == scans
    assert '{"to": "bob"}' in run("show", "job-of-7").output
    assert lines_of(crowd, "scan") - scans >= 20  # it is found all the same


def test_the_queues_of_the_app_s_tasks_are_asked_before_any_key_is_looked_through(
    crowd: Any, broker_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app_of_job_tests.py").write_text(
        f"from bulltask import App\napp = App('shop', {broker_url!r})\n"
        "@app.task(queue='q42')\ndef send(to: str) -> None: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    scans = lines_of(crowd, "scan")
    shown = CliRunner().invoke(main, ["job", "show", "job-of-42", "-A", "app_of_job_tests"])
    assert '{"to": "ada"}' in shown.output
    assert lines_of(crowd, "scan") == scans


def test_keys_are_scanned_up_to_a_bound_and_that_is_reported(
    crowd: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bulltask.cli.job_lookup.PAGES", 2)
    scans = lines_of(crowd, "scan")
    shown = run("show", "nobody")
    assert lines_of(crowd, "scan") - scans == 2
    assert shown.exit_code == 1
    assert "more than the 2,000 keys that were scanned" in shown.output
    assert "choose one with --queue" in shown.output
    assert '{"to": "ada"}' in run("show", "job-of-42", "--queue", "q42").output


def test_connections_that_are_called_otherwise_are_no_queues(app: App, broker_url: str, run: Run) -> None:
    job = app.queue("mail").add("send", {})
    for name in ("bull:not-base64", "bull:", "bull:/w==", "other:bWFpbA=="):
        with closing(redis.Redis.from_url(broker_url, client_name=name)) as other:
            other.ping()
            assert run("show", job.id).exit_code == 0


def test_a_user_who_may_not_see_connections_finds_jobs_all_the_same(
    app: App, broker_url: str, redis_client: Any
) -> None:
    job = app.queue("mail").add("send", {})
    redis_client.execute_command("ACL SETUSER", "narrow", "on", ">secret", "~*", "&*", "+@all", "-client|list")
    try:
        url = broker_url.replace("redis://", "redis://narrow:secret@")
        shown = CliRunner().invoke(main, ["-b", url, "job", "show", job.id])
        assert shown.exit_code == 0, shown.output
    finally:
        redis_client.acl_deluser("narrow")
