"""Tests of ``bulltask revoke``: its output for each job, and its exit codes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bulltask import App
from bulltask.cli.main import main
from tests.redis.conftest import Run

pytestmark = pytest.mark.redis


@pytest.fixture
def revoke(bulltask: Run) -> Run:
    """Run ``bulltask -b URL revoke …``."""
    return partial(bulltask, "revoke")


def test_jobs_of_any_queue_are_found_and_revoked(app: App, revoke: Run) -> None:
    ids = [app.queue(name).add("n").id for name in ("mail", "reports", "mail")]
    done = revoke(*ids)
    assert (done.exit_code, done.output) == (
        0,
        "".join(f"{job_id}  revoked: the job has failed and will not run\n" for job_id in ids),
    )
    assert {str(app.queue("mail").get_job_state(job_id)) for job_id in (ids[0], ids[2])} == {"failed"}
    again = revoke("--queue", "mail", ids[0])
    assert (again.exit_code, again.output) == (0, f"{ids[0]}  finished: the job had already finished\n")


def test_a_running_job_continues_unless_terminate_is_set(app: App, revoke: Run) -> None:
    queue = app.queue("mail")
    job = queue.add("n")
    queue.get_next_job("t")
    running = revoke("-Q", "mail", job.id)
    assert running.exit_code == 3
    assert running.output == f"{job.id}  running: the job continues; use --terminate to cancel it\n"
    terminated = revoke("-Q", "mail", "--terminate", job.id)
    assert (terminated.exit_code, terminated.output) == (0, f"{job.id}  terminating: the job's worker will cancel it\n")


def test_unknown_ids_do_not_prevent_others_from_being_revoked(app: App, revoke: Run) -> None:
    job = app.queue("mail").add("n")
    done = revoke("gone", job.id)
    assert done.exit_code == 4
    assert done.output.splitlines() == [
        "gone  unknown: the job does not exist",
        f"{job.id}  revoked: the job has failed and will not run",
    ]
    assert revoke("--queue", "mail", "gone").exit_code == 4


def test_the_next_job_of_a_scheduler_is_rejected_and_other_jobs_are_revoked(app: App, revoke: Run) -> None:
    queue = app.queue("mail")
    queue.schedulers.upsert("hourly", name="tick", every=3600)
    (tick,) = queue.get_jobs(["waiting", "delayed"])
    job = queue.add("n")
    done = revoke(tick.id, "gone", job.id)
    assert done.exit_code == 1
    assert "remove the scheduler instead" in done.output
    assert f"{job.id}  revoked" in done.output


def test_revoke_needs_the_queue_if_several_queues_have_the_id(app: App, revoke: Run) -> None:
    for name in ("mail", "reports"):
        app.queue(name).add("n", job_id="same")
    ambiguous = revoke("same")
    assert ambiguous.exit_code == 2
    assert "several queues have a job 'same': mail, reports" in ambiguous.output
    assert app.queue("mail").get_job_state("same") == "waiting"
    assert revoke("same", "--queue", "reports").exit_code == 0
    assert app.queue("mail").get_job_state("same") == "waiting"


def test_a_missing_id_or_server_is_an_error(revoke: Run) -> None:
    assert revoke().exit_code == 2
    unreachable = CliRunner().invoke(main, ["revoke", "-b", "redis://127.0.0.1:1/0", "-Q", "mail", "x"])
    assert unreachable.exit_code == 1
    assert unreachable.output.startswith("Error: ")


@pytest.mark.one_server
def test_revoke_uses_the_broker_url_and_the_hash_tag_setting_of_the_app(
    broker_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BULLTASK_BROKER_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "shop_without_hash_tag.py").write_text(
        f"from bulltask import App\napp = App('x', {broker_url!r}, queue_hash_tag=False)\n"
    )
    sender: Any = App("sender", broker_url, queue_hash_tag=False)
    job = sender.queue("mail").add("n")
    assert CliRunner().invoke(main, ["revoke", "-A", "shop_without_hash_tag", "-Q", "mail", job.id]).exit_code == 0
    assert job.get_state() == "failed"
    sender.close()
