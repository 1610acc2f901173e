"""``bulltask jobs`` lists and changes jobs by a filter, and ``bulltask failures`` groups failed jobs."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import pytest
from click.testing import Result
from redis import Redis

from bulltask import App
from bulltask.errors import ConfigError
from bulltask.queue import AddOptions, FlowJob, FlowProducer, search
from bulltask.queue.context import QueueContext
from tests.redis.conftest import Run
from tests.support.command_output import json_of

pytestmark = pytest.mark.redis


def add_failed(app: App, errors: Mapping[str, str | Exception], queue: str = "mail") -> list[str]:
    """Add a job for each task and error, which fails at once; return their ids."""
    ids = []
    for task, error in errors.items():
        job = app.queue(queue).add(task.partition("#")[0], {"to": f"{task}@example.org"}, attempts=1)
        acquired = app.queue(queue).get_next_job("token")
        assert acquired is not None
        acquired.move_to_failed(ConnectionError(error) if isinstance(error, str) else error)
        ids.append(job.id)
    return ids


FAILED = {"send#1": "host 17 refused", "send#2": "host 18 refused", "report": "no paper"}


def ids_of(result: Result) -> list[str]:
    return [job["id"] for job in json_of(result, "jobs")["jobs"]]


@pytest.mark.every_topology
def test_jobs_are_found_by_state_task_error_and_text(app: App, bulltask: Run) -> None:
    first, second, third = add_failed(app, FAILED)
    waiting = app.queue("mail").add("send", {"to": "ada"}).id
    assert set(ids_of(bulltask("jobs", "mail", "--json"))) == {first, second, third, waiting}
    assert ids_of(bulltask("jobs", "mail", "--json", "--state", "failed")) == [third, second, first]
    assert ids_of(bulltask("jobs", "mail", "--json", "--task", "report")) == [third]
    assert ids_of(bulltask("jobs", "mail", "--json", "--error", "HOST 18")) == [second]
    assert ids_of(bulltask("jobs", "mail", "--json", "--search", "send#1@EXAMPLE")) == [first]
    assert ids_of(bulltask("jobs", "mail", "--json", "--search", third)) == [third]
    assert ids_of(bulltask("jobs", "mail", "--json", "--state", "waiting", "--state", "delayed")) == [waiting]
    assert ids_of(bulltask("jobs", "mail", "--json", "--older-than", "1h")) == []
    assert set(ids_of(bulltask("jobs", "mail", "--json", "--newer-than", "1h"))) == {first, second, third, waiting}


def test_the_list_says_how_many_jobs_were_read(app: App, bulltask: Run) -> None:
    add_failed(app, FAILED)
    shown = bulltask("jobs", "mail", "--state", "failed", "--limit", 2)
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert [line.split()[1] for line in (lines[0], *lines[1::2])] == ["task", "report", "send"]
    assert lines[2::2] == ["  no paper", "  host 18 refused"], "the error is below each job"
    assert max(map(len, lines)) <= 80
    assert "2 jobs; scanned 3 of 3 in these states; there may be more" in shown.stderr
    document = json_of(bulltask("jobs", "mail", "--json", "--scan", 1, "--task", "x"), "jobs")
    assert (document["total"], document["complete"]) == (3, True)


def test_the_attempts_of_a_job_that_was_retried_are_those_of_its_options_and_one_more(app: App, bulltask: Run) -> None:
    (job_id,) = add_failed(app, {"send": "no"})
    assert " 1/1\n" in bulltask("jobs", "mail").stdout
    bulltask("job", "retry", job_id)
    again = app.queue("mail").get_next_job("token")
    assert again is not None
    again.move_to_failed("no")
    assert " 1/1 +1\n" in bulltask("jobs", "mail").stdout
    shown = bulltask("job", "show", job_id).stdout
    assert "2 made, 2 started; 1 more than the 1 of its options: it was retried, or its task sets max_retries" in shown
    assert "after 2 attempts (its options allow 1)" in " ".join(bulltask("why", job_id).stdout.split())


def test_names_from_redis_do_not_reach_the_terminal_unescaped(app: App, bulltask: Run, redis_client: Redis) -> None:
    (job_id,) = add_failed(app, {"name": "an \x1b[31merror"})
    redis_client.hset(app.queue("mail").context.keys.job(job_id), "name", "\x1b[2Jname")
    for command in (("jobs", "mail"), ("failures", "-Q", "mail"), ("jobs", "mail", "--json"), ("failures", "--json")):
        shown = bulltask(*command)
        assert (shown.exit_code, "\x1b" in shown.output) == (0, False)


@pytest.mark.one_server
@pytest.mark.parametrize("args", [("jobs", "mial"), ("failures", "-Q", "mial")])
def test_a_queue_that_does_not_exist_is_not_an_empty_queue(app: App, bulltask: Run, args: tuple[str, ...]) -> None:
    add_failed(app, FAILED)
    missing = bulltask(*args)
    assert (missing.exit_code, "no queue '{mial}'" in missing.stderr) == (4, True)
    other = bulltask(*("mail" if arg == "mial" else arg for arg in args), "--no-queue-hash-tag")
    assert other.exit_code == 4
    assert "'{mail}' exists: use --queue-hash-tag" in other.stderr


def test_the_jobs_of_a_queue_without_meta_are_found(app: App, bulltask: Run, redis_client: Redis) -> None:
    ids = add_failed(app, FAILED)
    redis_client.delete(app.queue("mail").context.keys.meta)
    assert set(ids_of(bulltask("jobs", "mail", "--json"))) == set(ids)


def test_a_dry_run_counts_and_changes_nothing(app: App, bulltask: Run) -> None:
    add_failed(app, FAILED)
    dry = bulltask("jobs", "mail", "--state", "failed", "--task", "send", "--retry", "--dry-run")
    assert (dry.exit_code, dry.output) == (0, "2 jobs would be retried; scanned 3 jobs. Nothing was changed.\n")
    assert app.queue("mail").get_failed_count() == 3
    refused = bulltask("jobs", "mail", "--retry")
    assert (refused.exit_code, "pass --yes" in refused.stderr) == (2, True)


@pytest.mark.every_topology
def test_only_the_jobs_that_match_the_filter_are_retried(app: App, bulltask: Run) -> None:
    add_failed(app, FAILED)
    done = bulltask("jobs", "mail", "--error", "refused", "--retry", "--yes", "--json")
    assert done.exit_code == 0
    document = json_of(done, "jobs")
    assert (document["matched"], document["done"], document["failed"]) == (2, 2, 0)
    queue = app.queue("mail")
    assert ([job.name for job in queue.get_failed()], queue.get_waiting_count()) == (["report"], 2)


def test_with_a_limit_the_jobs_that_the_list_shows_are_changed(app: App, bulltask: Run) -> None:
    queue = app.queue("mail")
    add_failed(app, FAILED)
    waiting = [queue.add("send").id for _ in range(3)]
    for state, action in (("failed", "--retry"), ("waiting", "--remove")):
        shown = ids_of(bulltask("jobs", "mail", "--state", state, "--limit", 2, "--json"))
        assert bulltask("jobs", "mail", "--state", state, "--limit", 2, action, "--yes").exit_code == 0
        assert not {job.id for job in queue.get_jobs(state)} & set(shown)
    assert queue.get_job(waiting[0]) is None


def test_revoked_jobs_stay_failed_unless_the_filter_names_their_error(app: App, bulltask: Run) -> None:
    queue = app.queue("mail")
    queue.revoke(queue.add("send").id)
    assert "0 of 0 jobs retried" in bulltask("jobs", "mail", "--retry", "--yes").output
    assert "1 of 1 job retried" in bulltask("jobs", "mail", "--retry", "--error", "revoked", "--yes").output


def test_delayed_jobs_are_promoted_and_waiting_ones_revoked_or_removed(app: App, bulltask: Run) -> None:
    queue = app.queue("mail")
    for delay in (0, 3600):
        queue.add_bulk([{"name": "send", "options": {"delay": delay}}] * 3)
    assert "1 of 1 job promoted" in bulltask("jobs", "mail", "--promote", "--limit", 1, "--yes").output
    assert queue.get_job_counts("waiting", "delayed") == {"waiting": 4, "paused": 0, "delayed": 2}
    removed = bulltask("jobs", "mail", "--state", "waiting", "--limit", 1, "--remove", "--yes")
    assert "1 of 1 job removed" in removed.output
    assert "5 of 5 jobs revoked" in bulltask("jobs", "mail", "--revoke", "--yes").output
    assert queue.get_job_counts("waiting", "delayed", "failed") == {
        "waiting": 0,
        "paused": 0,
        "delayed": 0,
        "failed": 5,
    }
    unsafe = bulltask("jobs", "mail", "--remove", "--yes")
    assert (unsafe.exit_code, "--remove needs a state" in unsafe.stderr) == (2, True)


def test_jobs_that_cannot_be_changed_are_named_and_the_others_are_changed(app: App, bulltask: Run) -> None:
    queue = app.queue("mail")
    running = queue.add("send")
    queue.get_next_job("token")
    queue.add("send")
    done = bulltask("jobs", "mail", "--revoke", "--yes")
    assert done.exit_code == 3
    assert "1 of 2 jobs revoked" in done.stdout
    assert running.id in done.stderr
    assert "use --terminate" in done.stderr
    assert bulltask("jobs", "mail", "--state", "active", "--revoke", "--terminate", "--yes").exit_code == 0


def interrupt_third_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a bulk change, which changes one job in each round trip, once."""
    changed, run_together = 0, QueueContext.run_together

    def interrupted(context: QueueContext, operations: Any) -> list[Any]:
        nonlocal changed
        changed += 1
        if changed == 3:
            raise KeyboardInterrupt
        return run_together(context, operations)

    monkeypatch.setattr(search, "_CHANGED_PER_ROUND_TRIP", 1)
    monkeypatch.setattr(QueueContext, "run_together", interrupted)


def test_an_interrupted_change_continues_when_the_command_is_repeated(
    app: App, bulltask: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.queue("mail").add_bulk([{"name": "send", "options": {"delay": 3600}}] * 5)
    interrupt_third_round_trip(monkeypatch)
    first = bulltask("jobs", "mail", "--promote", "--yes")
    assert (first.exit_code, "2 of 5 jobs promoted" in first.stdout) == (1, True)
    assert "Run the same command again to continue" in first.stderr
    assert "3 of 3 jobs promoted" in bulltask("jobs", "mail", "--promote", "--yes").stdout


def test_a_retried_child_job_is_awaited_by_its_parent_again(app: App, broker_url: str, bulltask: Run) -> None:
    queue = app.queue("mail")
    with FlowProducer(broker_url) as producer:
        flow = producer.add(FlowJob("parent", queue="mail", children=[FlowJob("child", queue="mail")]))
        parent_id = flow.job.id
    child = queue.get_next_job("token")
    assert child is not None
    child.discard()
    child.move_to_failed("no")
    assert "1 of 1 job retried" in bulltask("jobs", "mail", "--retry", "--yes").output
    parent = queue.get_job(parent_id)
    assert parent is not None
    assert parent.get_dependencies().unprocessed == (child.key,)


def test_on_a_terminal_the_command_asks_first_and_shows_its_progress(app: App, broker_url: str) -> None:
    add_failed(app, FAILED)

    def run(answer: bytes) -> tuple[int, str]:
        controller, terminal = pty.openpty()
        args = [sys.executable, "-m", "bulltask", "-b", broker_url, "jobs", "mail", "--retry"]
        with subprocess.Popen(args, stdin=terminal, stdout=terminal, stderr=terminal) as process:
            os.close(terminal)
            output = b""
            while chunk := _read(controller):
                output += chunk
                if output.endswith(b"[y/N]: "):
                    os.write(controller, answer)
        os.close(controller)
        return process.returncode, output.decode()

    code, output = run(b"n\n")
    assert (code, "Retry 3 jobs of queue mail?" in output, "Aborted" in output) == (1, True, True)
    assert app.queue("mail").get_failed_count() == 3
    code, output = run(b"y\n")
    assert (code, "3 of 3 jobs retried" in output) == (0, True)
    assert re.search(r"retried.*3/3", output)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the process has ended
        return b""


def test_failures_are_grouped_by_queue_task_and_error(app: App, bulltask: Run) -> None:
    ids = add_failed(app, FAILED)
    add_failed(app, {"send": "host 3 refused"}, "other")
    document: Any = json_of(bulltask("failures", "--json"), "failures")
    groups = {(group["queue"], group["task"], group["error"]): group for group in document["failures"]}
    assert {key: group["count"] for key, group in groups.items()} == {
        ("mail", "send", "host # refused"): 2,
        ("mail", "report", "no paper"): 1,
        ("other", "send", "host # refused"): 1,
    }
    assert groups["mail", "send", "host # refused"]["example"] == {"id": ids[1], "error": "host 18 refused"}
    table = bulltask("failures", "-Q", "mail", "--task", "send").stdout.splitlines()
    assert re.fullmatch(rf" +2 +mail +send .* s +{ids[1]}", table[1])
    assert table[2].endswith(" host # refused")
    assert max(map(len, table)) <= 80
    assert json_of(bulltask("failures", "-Q", "mail", "--since", "1h", "--json"), "failures")["jobs"] == 3


def test_failures_are_grouped_by_the_class_of_their_error(app: App, bulltask: Run) -> None:
    add_failed(app, {"a#1": KeyError("customer 1"), "a#2": ValueError("'x'"), "a#3": KeyError("customer 1")})
    add_failed(app, {"b#1": KeyError("customer 1"), "b#2": KeyError("customer 2")})
    document: Any = json_of(bulltask("failures", "--json"), "failures")
    assert {(group["task"], group["type"], group["error"], group["count"]) for group in document["failures"]} == {
        ("a", "KeyError", "#", 2),
        ("a", "ValueError", "#", 1),
        ("b", "KeyError", "#", 2),
    }
    lines = bulltask("failures").stdout
    assert " KeyError: 'customer 1'\n" in lines, "the text that all have"
    assert " KeyError: #\n" in lines
    report = bulltask("report").stdout
    assert re.search(r"2 +mail +a .* KeyError: 'customer 1'\n", report)


def test_revoked_jobs_are_one_group_whether_they_were_running_or_not(app: App, bulltask: Run) -> None:
    add_failed(app, {"a": RuntimeError("revoked")})
    app.queue("mail").revoke(app.queue("mail").add("a").id)
    document: Any = json_of(bulltask("failures", "--newer-than", "1h", "--json"), "failures")
    assert [(group["error"], group["type"], group["count"]) for group in document["failures"]] == [("revoked", None, 2)]


def test_secrets_in_errors_are_hidden(app: App, bulltask: Run) -> None:
    add_failed(app, {"a": "https://bob:s3cr3t@host/ failed", "b": 'cannot log in with password=hunter2, token: "ab1"'})
    for command in (("failures",), ("jobs", "mail"), ("report",)):
        for arguments in (command, (*command, "--json")):
            shown = bulltask(*arguments).stdout
            assert not re.search("s.cr.t|hunter|ab[1#]", shown), shown
            assert "bob:***@host/ failed" in shown
            assert "password=***, token: " in shown


def test_secrets_of_any_form_are_hidden_wherever_errors_of_many_jobs_are_shown(app: App, bulltask: Run) -> None:
    secrets = {
        "a": f"denied: {'AKIA'}IOSFODNN7EXAMPLE wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "b": f"clone with ghp_{'Zq9' * 12} failed",
        "c": "Cookie: session=Zq9abc; other=Zq9def",
        "d": "mysql --password Zq9-flag and mysql -pZq9-short failed",
        "e": f"bad -----BEGIN PRIVATE {'KEY'}-----\nZq9Zq9\n-----END PRIVATE {'KEY'}-----",
    }
    add_failed(app, secrets)
    app.queue("mail").add("f", attempts=2, backoff=60)
    retried = app.queue("mail").get_next_job("token")
    assert retried is not None
    retried.move_to_failed(ConnectionError("GET /?token=Zq9-retry"))
    for command in (("failures",), ("jobs", "mail"), ("report",), ("why", retried.id)):
        for arguments in (command, (*command, "--json")):
            shown = bulltask(*arguments)
            assert shown.exit_code == 0, shown.output
            assert "***" in shown.stdout
            assert not re.search("Zq9|IOSFOD|wJalr", shown.stdout), shown.stdout


def test_the_jobs_that_wait_longest_are_found_in_all_queues(app: App, bulltask: Run) -> None:
    app.queue("mail").add("done", delay=3600)
    last = app.queue("mail").add("c", timestamp=3_000)
    first, second = (app.queue("bulk").add(name, priority=2, timestamp=ms) for name, ms in (("a", 1_000), ("b", 2_000)))
    assert ids_of(bulltask("jobs", "--oldest", "--json")) == [first.id, second.id, last.id]
    assert ids_of(bulltask("jobs", "--oldest", "--limit", 1, "--json")) == [first.id]
    assert ids_of(bulltask("jobs", "mail", "--oldest", "--json")) == [last.id]
    shown = bulltask("jobs", "--oldest", "--task", "b")
    assert re.search(rf"^bulk +{second.id} +b +prioritized ", shown.stdout, re.MULTILINE)
    assert "the oldest 1 job of 2 queues; scanned 3 of " in shown.stderr
    for refused in (bulltask("jobs"), bulltask("jobs", "mail", "--oldest", "--retry", "--yes")):
        assert (refused.exit_code, "--oldest" in refused.stderr) == (2, True)


@pytest.mark.every_topology
def test_jobs_that_a_rate_limit_delays_or_that_no_worker_can_run_are_among_the_oldest(
    app: App, bulltask: Run, redis_client: Redis
) -> None:
    queue = app.queue("mail")
    queue.add("later", delay=3600)
    throttled, unknown = (queue.add(name, timestamp=ms, delay=10**10) for name, ms in (("a", 1_000), ("b", 2_000)))
    keys = queue.context.keys
    redis_client.hset(keys.task_rates, "a", "6 host")
    redis_client.zadd(keys.throttled("a"), {throttled.id: 1, "removed": 2})
    redis_client.zadd(keys.incompatible, {unknown.id: 1})
    assert ids_of(bulltask("jobs", "--oldest", "--json")) == [throttled.id, unknown.id]
    shown = bulltask("jobs", "--oldest")
    states = [line.split()[3] for line in shown.stdout.splitlines() if line.startswith("mail")]
    assert states == ["throttled", "incompatible"]
    assert f" why {throttled.id} --queue mail\n" in shown.stderr
    (row,) = json_of(bulltask("queues", "--json"), "queues")["queues"]
    assert (row["delayed"], row["throttled"], row["incompatible"]) == (3, 2, 1)
    assert "2 throttled by the rate limit of a, 1 that no worker can run" in bulltask("queues").stdout


def test_delayed_jobs_are_listed_with_the_time_when_they_are_due(app: App, bulltask: Run) -> None:
    app.queue("mail").add("later", delay=7_200, timestamp=time.time())
    (row,) = json_of(bulltask("jobs", "mail", "--state", "delayed", "--json"), "jobs")["jobs"]
    added, due = (datetime.fromisoformat(row[name]) for name in ("added_at", "due_at"))
    assert due - added == timedelta(seconds=7_200)
    assert re.search(r"\n  due in (2\.0 h|1[12]\d\.\d min)\n", bulltask("jobs", "mail").stdout)


def test_jobs_are_listed_in_the_order_in_which_they_run(app: App, bulltask: Run) -> None:
    queue = app.queue("mail")
    late, soon = queue.add("late", priority=2), queue.add("soon")
    assert ids_of(bulltask("jobs", "mail", "--json")) == [soon.id, late.id]


@pytest.mark.every_topology
def test_a_program_counts_the_jobs_that_match_and_changes_exactly_these(app: App) -> None:
    queue = app.queue("mail")
    add_failed(app, FAILED)
    change = queue.bulk("retry", error="refused")
    seen: list[tuple[int, int]] = []
    assert (change.find(lambda *counts: seen.append(counts)), seen, queue.get_failed_count()) == (2, [(3, 3)], 3)
    add_failed(app, {"send": "host 19 refused"})
    seen.clear()
    assert (change.run(lambda *counts: seen.append(counts)), change.errors, seen) == (2, [], [(2, 2)])
    assert [job.failed_reason for job in queue.get_failed()] == ["host 19 refused", "no paper"]
    assert queue.bulk("remove", states="failed", task="report", newer_than=3600).run() == 1
    assert queue.bulk("revoke", limit=1).run() == 1


@pytest.mark.parametrize("states", ["waiting", "delayed", "failed"])
def test_a_program_pages_through_jobs_in_their_order(app: App, states: str) -> None:
    queue = app.queue("mail")
    if states == "failed":
        expected = list(reversed(add_failed(app, {f"task-{n}": "no paper" for n in range(7)})))
    else:
        options: AddOptions = {"delay": 3600} if states == "delayed" else {}
        expected = [job.id for job in queue.add_bulk([{"name": "send", "options": options}] * 7)]
    found, cursor = list[str](), None
    for length in (3, 3, 1):
        page = queue.search(states=states, limit=3, cursor=cursor)
        found, cursor = [*found, *(job.id for job in page.jobs)], page.cursor
        assert (len(page.jobs), page.total, {job.state for job in page.jobs}) == (length, 7, {states})
    assert (found, cursor) == (expected, None)


def test_a_page_of_found_jobs_begins_where_the_last_one_ended_although_jobs_come_and_go(app: App) -> None:
    queue = app.queue("mail")
    ids = [job.id for job in queue.add_bulk([{"name": "send", "data": {"to": "Ada Byron"}}] * 6)]
    first = queue.search(text="ada byron", limit=2)
    assert queue.remove(ids[0])
    queue.add("send", {"to": "Ada Byron"}, lifo=True)
    assert [job.id for job in queue.search(text="ada byron", limit=2, cursor=first.cursor).jobs] == ids[2:4]


def test_a_search_reads_as_many_jobs_as_it_may_and_goes_on_from_there(app: App) -> None:
    queue = app.queue("mail")
    queue.add_bulk([{"name": "send", "options": {"delay": 3600}}] * 450)
    wanted = queue.add("send", {"to": "Ada Byron"}, delay=3600)
    page = queue.search(text="ada byron", scan=1)
    assert (page.jobs, page.scanned, page.total, page.cursor is None) == ((), 200, 451, False)
    page = queue.search(text="ada byron", cursor=page.cursor)
    assert ([job.id for job in page.jobs], page.cursor) == ([wanted.id], None)


def test_jobs_are_found_by_the_error_of_their_group_and_secrets_in_it_are_hidden(app: App) -> None:
    queue = app.queue("mail")
    add_failed(app, {"send": "host 7 refused", "post": "redis://me:hunter2@h/0 refused", "call": "host 9 refused"})
    group = queue.group_failures(task="send").groups[0]
    found = queue.search(states="failed", error_fingerprint=group.error).jobs
    assert sorted(job.name for job in found) == ["call", "send"]
    [other] = queue.search(states="failed", task="post").jobs
    assert "hunter2" not in other.failed_reason
    assert queue.bulk("retry", task="send", error_fingerprint=group.error).run() == 1


@pytest.mark.parametrize("cursor", ["", "x", "W10", "WyJhIiwiIiwwLFtdLCIiXQ", "WyJ3YWl0IiwiIiwtMSxbXSwiIl0"])
def test_a_search_says_that_a_cursor_is_invalid(app: App, cursor: str) -> None:
    with pytest.raises(ConfigError, match="cursor"):
        app.queue("mail").search(cursor=cursor)


@pytest.mark.one_server
async def test_coroutines_change_and_group_jobs_by_a_filter(app: App) -> None:
    ids = add_failed(app, FAILED)
    queue = app.aqueue("mail")
    found = await queue.group_failures(task="send")
    assert [(group.error, group.count, group.example) for group in found.groups] == [("host # refused", 2, ids[1])]
    assert (found.scanned, found.total) == (3, 3)
    change = queue.bulk("retry")
    assert await change.find() == 3
    assert await queue.remove(ids[0])
    assert await change.run() == 2
    assert [(job_id, error.job_id) for job_id, error in change.errors] == [(ids[0], ids[0])]
    assert change.reasons.total() == 1


def test_an_interrupted_change_of_a_program_continues_where_it_was(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    app.queue("mail").add_bulk([{"name": "send", "options": {"delay": 3600}}] * 5)
    interrupt_third_round_trip(monkeypatch)
    change = app.queue("mail").bulk("promote")
    with pytest.raises(KeyboardInterrupt):
        change.run()
    assert (change.done, change.matched) == (2, 5)
    assert (change.run(), change.errors) == (5, [])


@pytest.mark.parametrize(
    ("action", "conditions"),
    [
        ("retyr", {}),
        ("remove", {}),
        ("retry", {"states": "active"}),
        ("retry", {"older_than": -1}),
        ("retry", {"limit": 0}),
    ],
)
def test_an_impossible_change_is_refused_before_anything_is_read(
    app: App, action: str, conditions: Mapping[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        app.queue("mail").bulk(action, **conditions)
