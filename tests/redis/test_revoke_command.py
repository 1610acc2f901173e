"""``bulltask revoke``: what it says of each job, and its exit codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bulltask import App
from bulltask.cli.main import main

pytestmark = pytest.mark.redis

Revoke = Callable[..., Result]


@pytest.fixture
def revoke(broker_url: str, monkeypatch: pytest.MonkeyPatch) -> Revoke:
    """Run ``bulltask -b URL revoke …``."""
    for name in ("BULLTASK_APP", "BULLTASK_BROKER_URL"):
        monkeypatch.delenv(name, raising=False)

    def ran(*words: str) -> Result:
        return CliRunner().invoke(main, ["-b", broker_url, "revoke", *words])

    return ran


def test_jobs_of_any_queue_are_found_and_revoked(app: App, revoke: Revoke) -> None:
    ids = [app.queue(name).add("n").id for name in ("mail", "reports", "mail")]
    done = revoke(*ids)
    assert (done.exit_code, done.output) == (
        0,
        "".join(f"{job_id}  revoked: the job has failed and will not run\n" for job_id in ids),
    )
    assert {str(app.queue("mail").get_job_state(job_id)) for job_id in (ids[0], ids[2])} == {"failed"}
    again = revoke("--queue", "mail", ids[0])
    assert (again.exit_code, again.output) == (0, f"{ids[0]}  finished: the job had already ended\n")


def test_a_job_that_runs_goes_on_unless_its_end_is_wished(app: App, revoke: Revoke) -> None:
    queue = app.queue("mail")
    job = queue.add("n")
    queue.get_next_job("t")
    left = revoke("-q", "mail", job.id)
    assert left.exit_code == 3
    assert left.output == f"{job.id}  running: the job continues; use --terminate to end it\n"
    told = revoke("-q", "mail", "--terminate", job.id)
    assert (told.exit_code, told.output) == (0, f"{job.id}  terminating: the job's worker ends it\n")


def test_unknown_ids_do_not_prevent_others_from_being_revoked(app: App, revoke: Revoke) -> None:
    job = app.queue("mail").add("n")
    done = revoke("gone", job.id)
    assert done.exit_code == 4
    assert done.output.splitlines() == [
        "gone  unknown: there is no such job",
        f"{job.id}  revoked: the job has failed and will not run",
    ]
    assert revoke("--queue", "mail", "gone").exit_code == 4


def test_the_next_job_of_a_scheduler_is_refused_and_the_others_are_not(app: App, revoke: Revoke) -> None:
    queue = app.queue("mail")
    queue.schedulers.upsert("hourly", name="tick", every=3600)
    (tick,) = queue.get_jobs(["waiting", "delayed"])
    job = queue.add("n")
    done = revoke(tick.id, "gone", job.id)
    assert done.exit_code == 1
    assert "remove the scheduler instead" in done.output
    assert f"{job.id}  revoked" in done.output


def test_an_id_of_two_queues_needs_the_queue(app: App, revoke: Revoke) -> None:
    for name in ("mail", "reports"):
        app.queue(name).add("n", job_id="same")
    refused = revoke("same")
    assert refused.exit_code == 2
    assert "several queues have a job 'same': mail, reports" in refused.output
    assert app.queue("mail").get_job_state("same") == "waiting"
    assert revoke("same", "--queue", "reports").exit_code == 0
    assert app.queue("mail").get_job_state("same") == "waiting"


def test_a_missing_id_or_server_is_an_error(revoke: Revoke) -> None:
    assert revoke().exit_code == 2
    away = CliRunner().invoke(main, ["revoke", "-b", "redis://127.0.0.1:1/0", "-q", "mail", "x"])
    assert away.exit_code == 1
    assert away.output.startswith("Error: ")


def test_the_apps_own_server_and_spelling_count(
    broker_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BULLTASK_BROKER_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "plainly_spelled.py").write_text(
        f"from bulltask import App\napp = App('x', {broker_url!r}, queue_hash_tag=False)\n"
    )
    sender: Any = App("sender", broker_url, queue_hash_tag=False)
    job = sender.queue("mail").add("n")
    assert CliRunner().invoke(main, ["revoke", "-A", "plainly_spelled", "-q", "mail", job.id]).exit_code == 0
    assert job.get_state() == "failed"
    sender.close()
