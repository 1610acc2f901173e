"""``bulltask job`` retries, promotes, removes and revokes jobs, and shows logs and flows; ``bulltask schedule``."""

from __future__ import annotations

import re
import shlex
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis

from bulltask import App
from bulltask.jobs.schedules import Rule
from bulltask.queue import AddOptions, FlowJob, Job, Queue
from bulltask.queue.search import recent_jobs
from tests.redis.conftest import Run
from tests.support.command_output import json_of

pytestmark = pytest.mark.redis


def failed_job(app: App) -> Job:
    app.queue("mail").add("send", attempts=1)
    job = app.queue("mail").get_next_job("token")
    assert job is not None
    job.log("first")
    job.log("second\x1b[2J")
    job.move_to_failed("no")
    return job


def test_single_jobs_are_retried_promoted_and_removed(app: App, bulltask: Run) -> None:
    queue = app.queue("mail")
    failed, delayed = failed_job(app), queue.add("send", delay=3600)
    retried = bulltask("job", "retry", failed.id, "--reset-attempts", "--json")
    assert (retried.exit_code, json_of(retried, "job retry")["jobs"][0]["outcome"]) == (0, "retried")
    job = queue.get_job(failed.id)
    assert job is not None
    assert (job.attempts_made, str(job.get_state())) == (0, "waiting")
    assert bulltask("job", "promote", delayed.id).output == f"{delayed.id}  promoted\n"
    again = bulltask("job", "promote", delayed.id, failed.id, "gone", "--json")
    assert again.exit_code == 1
    assert [row["outcome"] for row in json_of(again, "job promote")["jobs"]] == ["rejected", "rejected", "unknown"]
    gone = bulltask("job", "remove", delayed.id, "gone", "--json", "-Q", "mail")
    assert (gone.exit_code, [row["outcome"] for row in json_of(gone, "job remove")["jobs"]]) == (
        4,
        ["removed", "unknown"],
    )
    revoked = bulltask("job", "revoke", failed.id, "--json")
    assert json_of(revoked, "job revoke")["jobs"] == [
        {"id": failed.id, "queue": "mail", "outcome": "revoked", "error": None}
    ]
    assert json_of(bulltask("revoke", failed.id, "--json"), "revoke")["jobs"][0]["outcome"] == "finished"


@pytest.mark.one_server
@pytest.mark.parametrize("command", [("job", "show"), ("job", "retry"), ("revoke",), ("result",), ("job", "tree")])
@pytest.mark.parametrize("queue", [(), ("--queue", "mail")])
def test_a_job_under_the_other_spelling_of_the_hash_tag_is_found(
    broker_url: str, bulltask: Run, command: tuple[str, ...], queue: tuple[str, ...]
) -> None:
    with Queue("mail", broker_url, queue_hash_tag=False) as untagged:
        job = untagged.add("send")
    result = bulltask(*command, job.id, *queue)
    assert result.exit_code == 4
    assert f"job '{job.id}' is in queue 'mail': use --no-queue-hash-tag" in result.stderr
    assert bulltask(*command, job.id, *queue, "--no-queue-hash-tag").exit_code != 4


def test_logs_are_printed_in_order_and_escaped(app: App, bulltask: Run) -> None:
    job = failed_job(app)
    assert bulltask("job", "logs", job.id).stdout == "first\nsecond\\x1b[2J\n"
    last = bulltask("job", "logs", job.id, "-n", 1)
    assert (last.stdout, last.stderr) == ("second\\x1b[2J\n", "the last 1 of 2 lines\n")
    assert json_of(bulltask("job", "logs", job.id, "--json"), "job logs")["total"] == 2
    assert bulltask("job", "logs", "gone").exit_code == 4


def test_the_tree_of_a_flow_has_the_state_of_each_job(app: App, bulltask: Run) -> None:
    children = [FlowJob("part", queue="mail", options={"attempts": 1}), FlowJob("other", queue="reports{mail}")]
    root = app.flows().add(FlowJob("all", queue="mail", children=children)).job
    part = app.queue("mail").get_next_job("token")
    assert part is not None
    part.move_to_failed("no paper")
    shown = bulltask("job", "tree", root.id).stdout.splitlines()
    assert shown[0] == f"all {root.id}, queue mail: waiting-children"
    assert sorted(line[3:].partition(" ")[0] + line.partition(":")[2] for line in shown[1:]) == [
        "other waiting",
        "part failed: no paper",
    ]
    document = json_of(bulltask("job", "tree", root.id, "--json"), "job tree")
    assert {(child["task"], child["state"]) for child in document["children"]} == {
        ("part", "failed"),
        ("other", "waiting"),
    }
    cut = json_of(bulltask("job", "tree", root.id, "--json", "--depth", 1), "job tree")
    assert (cut["children"], cut["children_left_out"]) == ([], 2)
    assert bulltask("job", "tree", "gone").exit_code == 4
    assert document["parent"] is None


def test_parents_and_child_jobs_are_named_with_the_command_that_shows_them(
    app: App, bulltask: Run, broker_url: str
) -> None:
    root = app.flows().add(FlowJob("all", queue="mail", children=[FlowJob("part", queue="mail")])).job
    [part] = app.queue("mail").get_waiting()
    shown = bulltask("job", "show", part.id).stdout
    show_tree = f"bulltask -b {broker_url} job tree {root.id}"
    assert f"parent     job {root.id} of queue mail ({show_tree})\n" in shown
    assert "children" not in shown
    assert f"children   1 unprocessed ({show_tree})\n" in bulltask("job", "show", root.id).stdout
    assert bulltask(*shlex.split(show_tree)[3:]).exit_code == 0
    document = json_of(bulltask("job", "show", part.id, "--json"), "job show")["redis"]
    assert document["parent"] == {"queue": "mail", "id": root.id}
    for command in ("show", "tree", "logs"):
        assert bulltask("job", command, str(part.parent_key)).exit_code == 0, "the parent's key is accepted as its id"
    tree = bulltask("job", "tree", part.id)
    assert tree.stderr == f"child of job {root.id}, queue mail: {show_tree}\n"
    assert json_of(bulltask("job", "tree", part.id, "--json"), "job tree")["parent"]["id"] == root.id


def test_revoke_says_that_the_parent_of_a_child_job_waits_forever(app: App, bulltask: Run, broker_url: str) -> None:
    children = [FlowJob("part", "mail"), FlowJob("part", "mail", options={"ignore_dependency_on_failure": True})]
    root = app.flows().add(FlowJob("all", queue="mail", children=children)).job
    jobs = app.queue("mail").get_waiting()
    shown = bulltask("revoke", *(job.id for job in jobs)).stdout
    why = f"its parent job waits for it forever: bulltask -b {broker_url} why {root.id} --queue mail\n"
    assert shown.count(why) == 1


def test_a_job_that_runs_is_not_said_not_to_run_and_the_next_command_is_shown(app: App, bulltask: Run) -> None:
    queue = app.queue("mail")
    waiting, running = queue.add("send"), queue.get_next_job("token")
    assert running is not None
    shown = bulltask("job", "show", waiting.id).stdout
    assert "\nWhy it has not finished\n" in shown
    assert "does not run" not in shown
    queue.pause()
    assert re.search(r"\n    \$ bulltask .*queue resume mail", bulltask("job", "show", queue.add("send").id).stdout)


def test_schedules_are_added_listed_run_and_removed(app: App, bulltask: Run) -> None:
    added = bulltask("schedule", "add", "mail", "nightly", "--cron", "0 3 * * *", "--task", "send", "--json")
    assert added.exit_code == 0, added.output
    schedule = json_of(added, "schedule add")
    assert (schedule["cron"], schedule["task"], schedule["next_at"][10:16]) == ("0 3 * * *", "send", "T03:00")
    data = ["--data", '{"to": "ada"}']
    assert "every 5.0 min, next " in bulltask("schedule", "add", "mail", "soon", "--every", "5m", *data).output
    listed = json_of(bulltask("schedule", "list", "--json"), "schedule list")["schedules"]
    assert [(row["queue"], row["id"], row["every"]) for row in listed] == [
        ("mail", "soon", 300),
        ("mail", "nightly", None),
    ]
    table = bulltask("schedule", "list", "-Q", "mail")
    assert [line.split()[1] for line in table.stdout.splitlines()] == ["id", "soon", "nightly"]
    assert table.stderr == "2 schedules in 1 queue\n"
    job_id = json_of(bulltask("schedule", "run", "mail", "soon", "--json"), "schedule run")["id"]
    job = app.queue("mail").get_job(job_id)
    assert job is not None
    assert (job.name, job.data) == ("soon", {"to": "ada"})
    removed = bulltask("schedule", "remove", "mail", "soon", "gone", "--json")
    assert (removed.exit_code, json_of(removed, "schedule remove")["schedules"]) == (
        4,
        [{"id": "soon", "removed": True}, {"id": "gone", "removed": False}],
    )


def test_a_schedule_is_paused_shown_and_resumed(app: App, bulltask: Run) -> None:
    queue = app.queue("mail")
    queue.schedulers.upsert("later", every=3600, start=datetime.now(UTC) + timedelta(hours=2))
    queue.schedulers.upsert("nightly", cron="0 3 * * *")
    paused = bulltask("schedule", "pause", "mail", "nightly", "gone", "--by", "ann\x1b[2J", "--json")
    row, gone = json_of(paused, "schedule pause")["schedules"]
    assert (paused.exit_code, row["paused"], row["paused_by"], row["next_at"]) == (4, True, "ann\x1b[2J", None)
    assert gone == {**dict.fromkeys(row), "id": "gone", "found": False}
    since = r"paused since \d{4}-\d\d-\d\d [\d:.]+ by "
    assert re.fullmatch(rf"nightly  {since}ann\S+\n", bulltask("schedule", "pause", "mail", "nightly").output)
    listed = json_of(bulltask("schedule", "list", "--json"), "schedule list")["schedules"]
    assert [(row["id"], row["paused"], row["next_at"] is None) for row in listed] == [
        ("later", False, False),
        ("nightly", True, True),
    ]
    table = bulltask("schedule", "list")
    assert re.search(rf" nightly .* - +- +{since}ann\S+ +1$", table.stdout, re.MULTILINE), table.stdout
    assert table.stderr == "2 schedules in 1 queue\n"
    assert re.search(rf"^next +{since}ann", bulltask("schedule", "show", "mail", "nightly").stdout, re.MULTILINE)
    assert json_of(bulltask("schedule", "show", "mail", "nightly", "--json"), "schedule show")["paused_at"]
    updated = bulltask("schedule", "add", "mail", "nightly", "--cron", "0 4 * * *")
    assert re.fullmatch(rf"nightly  added: 0 4 \* \* \* \(UTC\), {since}ann\S+\n", updated.output)
    assert "  paused" in bulltask("report").stdout
    assert "nightly" not in bulltask("why", "-Q", "mail").output
    assert bulltask("schedule", "run", "mail", "nightly").exit_code == 0
    resumed = bulltask("schedule", "resume", "mail", "nightly", "gone")
    assert re.match(r"nightly  resumed, next \S+ 04:00:00\.000\ngone  unknown: the sch", resumed.output)
    assert bulltask("schedule", "resume", "mail", "nightly").output.startswith("nightly  was not paused, next ")
    again = bulltask("schedule", "resume", "mail", "nightly", "--json")
    assert (again.exit_code, json_of(again, "schedule resume")["schedules"][0]["paused"]) == (0, False)
    bulltask("schedule", "pause", "mail", "nightly", "later")
    assert bulltask("schedule", "remove", "mail", "nightly", "later").output.count("  removed") == 2
    assert bulltask("schedule", "list").stderr == "0 schedules in 1 queue\n"


def test_a_schedule_is_shown_with_its_last_jobs(app: App, bulltask: Run) -> None:
    queue = app.queue("mail")
    queue.schedulers.upsert("often", every=60)
    job = queue.get_next_job("token")
    assert job is not None
    job.move_to_completed(None)
    shown = json_of(bulltask("schedule", "show", "mail", "often", "--json"), "schedule show")
    assert [(last["id"], last["state"]) for last in shown["last_jobs"]] == [(job.id, "completed")]
    text = bulltask("schedule", "show", "mail", "often").stdout
    assert "rule       every 60.0 s\n" in text
    assert "  completed\n" in text


@pytest.mark.one_server
def test_the_last_jobs_of_a_schedule_are_found_without_reading_the_jobs_of_others(
    app: App, redis_client: redis.Redis
) -> None:
    queue = app.queue("mail")
    queue.schedulers.upsert("often", every=60)
    queue.add_bulk([{"name": "send"}] * 20)
    ended = []
    while (job := queue.get_next_job("token")) is not None:
        job.move_to_completed(None)
        ended.append(job)
    assert len(ended) == 21
    redis_client.config_resetstat()
    found = queue.context.run(recent_jobs(queue.context, "often", 5))
    assert [match.id for match in found] == [job.id for job in ended if job.scheduler_id == "often"]
    stats: Any = redis_client.info("commandstats")
    assert stats["cmdstat_hmget"]["calls"] == 1


def test_the_list_of_schedules_says_when_each_ran_last_and_how_it_ended(app: App, bulltask: Run) -> None:
    queue = app.queue("mail")
    queue.schedulers.upsert("never", every=3600, start=datetime.now(UTC) + timedelta(hours=1))
    schedules: list[tuple[str, Rule, AddOptions]] = [
        ("running", {"every": 60}, {}),
        ("failed", {"every": 60}, {"attempts": 1}),
        ("late", {"cron": "0 3 * * *", "immediately": True}, {}),
        ("kept-not", {"every": 60}, {"remove_on_complete": True}),
        ("over", {"every": 60, "limit": 1}, {}),
    ]
    acquired = {}
    for name, rule, options in schedules:
        queue.schedulers.upsert(name, options=options, **rule)
        job = queue.get_next_job("token")
        assert job is not None
        acquired[name] = job
    acquired["failed"].move_to_failed("no")
    for name in ("late", "kept-not", "over"):
        acquired[name].move_to_completed(None)
    listed = json_of(bulltask("schedule", "list", "--json"), "schedule list")["schedules"]
    last = {row["id"]: row["last"] for row in listed}
    assert last.pop("never") is None
    assert {name: (run["state"], run["id"]) for name, run in last.items()} == {
        "running": ("active", acquired["running"].id),
        "failed": ("failed", acquired["failed"].id),
        "late": ("completed", acquired["late"].id),
        "kept-not": ("removed", None),
        "over": ("completed", acquired["over"].id),
    }
    assert all(datetime.fromisoformat(run["at"]) > datetime.now(UTC) - timedelta(minutes=1) for run in last.values())
    rows = {line.split()[1]: line for line in bulltask("schedule", "list").stdout.splitlines()}
    assert re.search(r"every 60\.0 s +\d\.\d{3} s ago +failed +in ", rows["failed"])
    assert re.search(r"every 60\.0 min +- +- +in ", rows["never"])
    shown = bulltask("schedule", "show", "mail", "running")
    assert re.search(r"^last +\S+ \S+  active$", shown.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("show", "mail", "gone"), 4, "queue 'mail' has no schedule 'gone'"),
        (("run", "mail", "gone"), 4, "queue 'mail' has no schedule 'gone'"),
        (("pause", "nope", "x"), 4, "no queue '{nope}'"),
        (("list", "-Q", "nope"), 4, "no queue '{nope}'"),
        (("add", "mail", "x"), 2, "pass either --every or --cron"),
        (("add", "mail", "x", "--cron", "nonsense"), 1, "nonsense"),
        (("add", "mail", "x", "--every", "60", "--data", "{"), 2, "--data is not JSON"),
        (("add", "mail", "x", "--every", "60", "--end", "2020-01-01"), 1, "end of scheduler 'x' is in the past"),
    ],
)
def test_what_cannot_be_done_with_a_schedule_is_said(
    app: App, bulltask: Run, args: tuple[str, ...], code: int, message: str
) -> None:
    app.queue("mail").add("send")
    result = bulltask("schedule", *args)
    assert (result.exit_code, message in " ".join(result.stderr.split())) == (code, True), result.output
