"""``bulltask doctor`` finds each sickness of a server and its queues, and nothing in a healthy system."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from click.testing import CliRunner, Result

from bulltask import App
from bulltask.cli.main import main
from bulltask.errors import BulltaskError
from bulltask.queue import doctor
from bulltask.queue.doctor import CHECKS, Diagnosis, Finding, examine
from bulltask.queue.overview import find_queues
from bulltask.queue.reasons import REASONS
from bulltask.testing import RedisServer
from bulltask.testing.worker import wait_until
from bulltask.transport.call import QueueKeys, known_queues
from bulltask.transport.permissions import role_grants
from tests.conftest import ServerFactory
from tests.redis import test_reasons
from tests.redis.test_reasons import CASES, World, check_command, restricted
from tests.support.command_output import json_of
from tests.support.flaky_proxy import FlakyProxy

pytestmark = [pytest.mark.redis, pytest.mark.one_server]

world = test_reasons.world  # a fixture
Prepare = Callable[[World], object]


@pytest.fixture(autouse=True)
def healthy(redis_client: Any) -> Iterator[None]:
    """A server that stores its data, and remembers nothing of other tests."""
    redis_client.config_set("save", "3600 1")
    redis_client.slowlog_reset()
    redis_client.execute_command("ACL", "LOG", "RESET")
    yield
    redis_client.config_set("save", "")
    redis_client.config_set("maxmemory-policy", "noeviction")
    redis_client.config_set("maxmemory", 0)


def examined(app: App, budget_s: float = 10.0) -> Diagnosis:
    broker = app._broker
    with broker.pool.client() as client:
        client.connect()
        names = find_queues(client, "bull", ["{mail}"]).names
    keys = [QueueKeys("bull", name, name.strip("{}")) for name in names]
    return examine(broker, keys, lambda name: app.queue(name).context, budget_s=budget_s)


def found(world: World) -> dict[str, Finding]:
    return {finding.reason.code: finding for finding in examined(world.app).findings}


SERVER_CASES: list[tuple[str, str, Prepare]] = []


def case(code: str, words: str) -> Callable[[Prepare], Prepare]:
    def register(function: Prepare) -> Prepare:
        SERVER_CASES.append((code, words, function))
        return function

    return register


@case("eviction", "broken: .* also jobs: maxmemory-policy is allkeys-lru$")
def a_cache(world: World) -> None:
    world.redis.config_set("maxmemory", "1gb")
    world.redis.config_set("maxmemory-policy", "allkeys-lru")


@case("eviction", "warning: .*There is no limit now")
def a_cache_without_a_limit(world: World) -> None:
    world.redis.config_set("maxmemory-policy", "volatile-ttl")


@case("no-persistence", "warning: .*a restart loses all jobs")
def a_server_that_stores_nothing(world: World) -> None:
    world.redis.config_set("save", "")


@case("memory", r"warning: .* bytes \(maxmemory\)")
def a_server_that_is_nearly_full(world: World) -> None:
    world.redis.config_set("maxmemory", int(world.redis.info("memory")["used_memory"] * 1.05))


@case("acl", r"broken: .*refused user doctored the commands .*xadd, which bulltask needs")
def a_user_without_a_command(world: World) -> None:
    refused(world, [*role_grants(["sender"]).rules(), "-xadd"])


@case("acl", r"broken: .*refused user doctored \d+ keys? of queues, such as bull:\{mail\}:")
def a_user_without_a_key(world: World) -> None:
    refused(world, [*role_grants(["sender"]).rules(), "resetkeys", "~bull:{other}:*"])


@case("acl", "warning: .*has rejected a password of user doctored 1 time")
def a_wrong_password(world: World) -> None:
    world.redis.execute_command("ACL", "SETUSER", "doctored", "on", ">right")
    with pytest.raises(redis.AuthenticationError):
        redis.Redis.from_url(world.url.replace("://", "://doctored:wrong@")).ping()


@case("schedule-without-worker", "broken: Queue mail has 1 job scheduler, and no worker")
def a_schedule_without_a_worker(world: World) -> None:
    world.queue.schedulers.upsert("yearly", cron="0 0 1 1 *", name="send")


@case("mixed-bullmq", "warning: Clients of BullMQ 6, and clients of BullMQ 5 use queue mail")
def both_versions_of_which_the_older_one_came_last(world: World) -> None:
    world.redis.hset(world.keys.meta, mapping={"version": "bullmq:5.81.5", "paused": 1})  # as BullMQ 6 pauses
    world.redis.rpush(world.keys.wait, "j")


@case("mixed-bullmq", "warning: Clients of BullMQ 6, and clients of BullMQ 5 use")
def both_versions_of_which_the_newer_one_came_last(world: World) -> None:
    world.add("a", deduplication="once")
    world.add("b", deduplication="once")  # BullMQ 6 has no event "debounced"
    world.redis.hset(world.keys.meta, "version", "bullmq:6.7.0")


@case("mixed-bullmq", "notice: Clients of BullMQ 6, and bulltask, which has the protocol of BullMQ 5")
def bulltask_and_bullmq_6(world: World) -> None:
    world.register()
    world.redis.hset(world.keys.meta, "version", "bullmq:6.7.0")


@case("old-bullmq", "broken: A client of bullmq:4.17.0 uses queue mail")
def an_old_client(world: World) -> None:
    world.redis.hset(world.keys.meta, "version", "bullmq:4.17.0")


@case("mixed-bullmq", "warning: Clients of BullMQ 6, and clients of BullMQ 5 use queue mail")
def jobs_that_both_versions_have_deduplicated(world: World) -> None:
    world.add("a", deduplication="once")
    world.add("b", deduplication="once")
    world.redis.xadd(world.keys.events, {"event": "deduplicated", "jobId": "a"})  # as BullMQ 6: without "debounced"


@case("stream-too-short", r"warning: The event stream of queue mail keeps 100 events, those of .* its 1 reader would")
def a_short_stream(world: World) -> None:
    world.redis.hset(world.keys.meta, mapping={"version": "bullmq:5.62.0", "opts.maxLenEvents": 100})
    with world.redis.pipeline() as pipe:
        for number in range(120):
            pipe.xadd(world.keys.events, {"event": "added", "jobId": number})
        pipe.execute()
    reader = redis.Redis.from_url(world.url, client_name=f"{world.keys.client_name()}:qe")
    world.stack.enter_context(closing(reader)).ping()


@case("keys-without-owner", r"warning: 1 key of queue mail belongs to .* such as bull:\{mail\}:gone:logs")
def logs_without_a_job(world: World) -> None:
    world.add()
    world.redis.rpush(world.keys.logs("j"), "kept")
    world.redis.rpush(world.keys.logs("gone"), "orphaned")


@case("keys-without-owner", r"warning: 1 key of queue mail belongs to .* such as bull:\{mail\}:repeat:daily")
def a_scheduler_without_its_entry(world: World) -> None:
    world.queue.schedulers.upsert("yearly", cron="0 0 1 1 *", name="send")
    world.redis.hset(world.keys.scheduler("daily"), "name", "send")


@case("keys-without-owner", "warning: Redis at .* has keys of 1 queue without `meta`, such as old: left behind")
def keys_of_a_queue_that_does_not_exist(world: World) -> None:
    world.redis.rpush("bull:old:wait", "1")
    world.redis.set("bull:another-program", "x")


@case("crash-record-without-job", "warning: 1 removed job of queue mail left a record of crashes, such as gone")
def a_crash_record_without_a_job(world: World) -> None:
    world.add()
    world.redis.hset(world.keys.job("gone"), mapping={"bulltask:crashes": 2, "bulltask:crashTokens": "t"})


@case("deduplicated", "warning: The deduplication id once belongs to job j, whose hash is gone")
def a_deduplication_id_without_a_job(world: World) -> None:
    world.add(deduplication="once")
    world.redis.delete(world.keys.job("j"))


@case("wrong-hash-tag", r"broken: Jobs wait in the queue tagless, which has no workers, .*spell \{tagless\}")
def jobs_under_another_spelling(world: World) -> None:
    with closing(App("node", world.url, queue_hash_tag=False)) as app:
        app.queue("tagless").add("send", {})


def refused(world: World, rules: list[str]) -> None:
    world.redis.execute_command("ACL", "SETUSER", "doctored", "on", ">secret", *rules)
    with closing(App("refused", world.url.replace("://", "://doctored:secret@"))) as app, suppress(BulltaskError):
        app.queue("mail").add("send", {})


@pytest.fixture(autouse=True)
def _no_user_stays(redis_client: Any) -> Iterator[None]:
    yield
    redis_client.acl_deluser("doctored")


@pytest.mark.parametrize(("code", "words", "prepare"), [pytest.param(*it, id=it[2].__name__) for it in SERVER_CASES])
def test_a_sickness_of_the_server_or_its_keys_is_found(world: World, code: str, words: str, prepare: Prepare) -> None:
    prepare(world)
    finding = found(world)[code]
    assert re.match(words, f"{finding.severity}: {finding.reason.sentence}"), finding
    assert finding.reason.evidence
    check_command(finding.reason, world)
    json.dumps(finding.to_json())


OF_QUEUES: Final = {code: prepare for code, _, prepare in reversed(CASES) if code in CHECKS and code != "deduplicated"}
"""For each reason that is a sickness, how it is made."""


@pytest.mark.parametrize("code", OF_QUEUES)
def test_each_sickness_that_why_explains_is_found_without_a_name(world: World, code: str) -> None:
    OF_QUEUES[code](world)
    finding = found(world)[code]
    assert (finding.severity, finding.queue) == (CHECKS[code].severity, "mail")
    assert finding.reason.evidence
    check_command(finding.reason, world)


def test_every_check_has_a_case() -> None:
    elsewhere = {
        "redis-unreachable",
        "redis-loading",
        "redis-full",
        "redis-read-only",
        "old-redis",
        "connections",
        "slow-commands",
    }
    made = {code for code, _, _ in SERVER_CASES} | OF_QUEUES.keys() | elsewhere | {"incompatible"}
    assert made == CHECKS.keys()


def test_the_reference_lists_every_check() -> None:
    page = Path("docs/reference/reasons.md").read_text().partition("\n## Doctor")[2]
    rows = re.findall(r"^\| `([a-z-]+)` \| (\w+) \| (.*) \|$", page, re.MULTILINE)
    assert rows == [(it.code, it.severity, it.meaning) for it in CHECKS.values() if it.code not in REASONS]


def test_a_healthy_system_yields_nothing(world: World) -> None:
    world.register()
    world.queue.schedulers.upsert("yearly", cron="0 0 1 1 *", name="send")
    some: list[dict[str, Any]] = [{}, {"priority": 3}, {"delay": 60}, {"deduplication": "once"}, {"attempts": 2}]
    for number, options in enumerate(some):
        world.add(f"j{number}", **options)
    world.queue.add_job_log("j0", "a line")
    world.worker.complete()
    world.worker.fail()
    world.acquire()
    world.queue.set_global_rate_limit(100, 1)
    diagnosis = examined(world.app)
    assert ([it.reason for it in diagnosis.findings], diagnosis.not_examined) == ([], [])
    assert (diagnosis.worst, diagnosis.queues) == (None, 1)
    assert diagnosis.keys > 10


def test_what_is_normal_is_no_sickness(world: World) -> None:
    world.connect()
    world.connect("{files}")
    test_reasons.waiting_for_a_retry(world)
    test_reasons.waiting_for_children(world)
    world.add("running", lifo=True)
    world.acquire()
    world.add("later", delay=60)
    world.queue.set_global_concurrency(1)
    test_reasons.queue_with_a_limiter_of_its_workers(world)
    diagnosis = examined(world.app)
    assert [it.reason.code for it in diagnosis.findings] == []
    assert diagnosis.not_examined == []


def test_a_replica_and_a_server_that_cannot_write_are_found(server_factory: ServerFactory) -> None:
    server = server_factory()
    with closing(App("shop", server.url)) as app, redis.Redis.from_url(server.url) as plain:
        app.queue("mail").add("send", {})
        plain.replicaof("127.0.0.1", 1)
        finding = {it.reason.code: it for it in examined(app).findings}["redis-read-only"]
    assert (finding.severity, finding.queue, bool(finding.reason.evidence)) == ("broken", None, True)


def test_a_server_that_loads_its_data_is_found(world: World, redis_server: RedisServer) -> None:
    with FlakyProxy("127.0.0.1", redis_server.port) as proxy:
        proxy.inject_error("LOADING Redis is loading the dataset in memory", None)
        result = run(f"redis://127.0.0.1:{proxy.port}/0", "--json")
    (finding,) = json_of(result, "doctor")["findings"]
    assert (finding["code"], finding["severity"], finding["queue"]) == ("redis-loading", "broken", None)
    assert result.exit_code == 2


def test_a_server_is_found_that_was_restarted_and_loads_its_data(server_factory: ServerFactory) -> None:
    server = server_factory(extra=["--key-load-delay", "20000", "--loading-process-events-interval-bytes", "1024"])
    with redis.Redis.from_url(server.url) as plain:
        plain.mset({f"bull:key-{number}": os.urandom(300) for number in range(100)})
        plain.save()

    def codes() -> list[str]:
        return [it["code"] for it in json_of(run(server.url, "--json"), "doctor")["findings"]]

    with ThreadPoolExecutor() as threads:
        restart = threads.submit(server.restart)  # waits until it is loaded
        wait_until(lambda: "redis-loading" in codes(), 30, "the finding")
        restart.result()


def test_a_server_that_cannot_save_is_found(server_factory: ServerFactory, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    server = server_factory(extra=["--dir", str(directory)])
    directory.rmdir()
    with closing(App("shop", server.url)) as app, redis.Redis.from_url(server.url) as plain:
        app.queue("mail").add("send", {})
        plain.config_set("save", "3600 1")
        plain.bgsave()
        wait_until(lambda: plain.info("persistence")["rdb_last_bgsave_status"] == "err", 10, "the failure")
        finding = {it.reason.code: it for it in examined(app).findings}["no-persistence"]
        plain.config_set("save", "")  # or it does not exit
    assert (finding.severity, finding.reason.evidence) == ("broken", {"rdb_last_bgsave_status": "err"})


def test_an_evicting_server_that_is_full_is_not_mended_without_a_decision(world: World) -> None:
    a_cache_without_a_limit(world)
    assert found(world)["eviction"].fix is not None
    world.redis.config_set("maxmemory", int(world.redis.info("memory")["used_memory"] * 1.05))
    finding = found(world)["eviction"]
    assert finding.fix is None
    assert "Give it more memory first" in finding.reason.sentence
    assert "Nothing that --fix can mend" in run(world.url, "--fix", "--yes").stdout


def test_a_full_server_is_named_once_with_queues_and_without_any(world: World) -> None:
    world.redis.config_set("maxmemory", "1mb")
    assert [(it.reason.code, it.queue) for it in examined(world.app).findings] == [("redis-full", None)]
    world.redis.config_set("maxmemory", 0)
    world.add()
    world.connect()
    world.redis.config_set("maxmemory", "1mb")
    codes = [it.reason.code for it in examined(world.app).findings]
    assert codes.count("redis-full") == 1


def test_a_slow_command_is_named_without_its_data(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SLOW_MS", 0)
    world.redis.config_set("slowlog-log-slower-than", 0)
    world.redis.slowlog_reset()
    world.redis.eval("for _ = 1, 100000 do end", 0, "private")
    world.redis.config_set("slowlog-log-slower-than", 10_000)
    sentence = found(world)["slow-commands"].reason.sentence
    assert re.search(r"commands kept all clients of Redis .* the slowest for \d+ ms: EVAL$", sentence), sentence


def test_too_many_connections_an_old_server_and_wrong_clocks_are_found(
    world: World, monkeypatch: pytest.MonkeyPatch, time_machine: Any
) -> None:
    monkeypatch.setattr(doctor, "MIN_REDIS_VERSION", (99, 1))
    world.add()
    limit = world.redis.config_get("maxclients")["maxclients"]
    world.redis.config_set("maxclients", world.redis.info("clients")["connected_clients"])
    time_machine.move_to(datetime.now(UTC) + timedelta(hours=2))
    try:
        findings = found(world)
    finally:
        world.redis.config_set("maxclients", limit)
    assert {"connections", "old-redis", "clocks-apart"} <= findings.keys()
    assert "s ahead of that of Redis" in findings["clocks-apart"].reason.sentence
    assert "bulltask needs 99.1 or newer" in findings["old-redis"].reason.sentence


# The command


def run(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["-b", url, "doctor", *arguments])


def test_the_exit_code_is_that_of_the_worst_finding(world: World) -> None:
    world.connect()
    assert run(world.url).exit_code == 0
    world.queue.pause()
    assert run(world.url).exit_code == 1
    world.redis.config_set("maxmemory", "1mb")
    result = run(world.url)
    assert result.exit_code == 2
    assert re.search(r"1 broken, 1 warning\n\nbroken: redis-full\n", result.stdout), result.stdout


def test_only_chosen_queues_are_examined(world: World) -> None:
    for name in ("mail", "files"):
        world.app.queue(name).add("send", {})
    document = json_of(run(world.url, "--json", "-Q", "files"), "doctor")
    assert [it["queue"] for it in document["findings"]] == ["files"]
    result = run(world.url, "-Q", "nope")
    assert (result.exit_code, "no queue '{nope}'" in result.stderr) == (4, True)


def test_the_document_matches_its_schema_and_an_unreachable_server_is_a_finding(world: World) -> None:
    world.add()
    document = json_of(run(world.url, "--json"), "doctor")
    (finding,) = document["findings"]
    assert (finding["code"], finding["severity"], finding["queue"]) == ("no-worker", "broken", "mail")
    assert finding["command"] == f"bulltask -b {world.url} worker -A APP -Q mail"
    result = run("redis://127.0.0.1:1", "--json")
    assert ([it["code"] for it in json_of(result, "doctor")["findings"]], result.exit_code) == (
        ["redis-unreachable"],
        2,
    )


def test_a_sickness_of_many_queues_is_shown_a_few_times(world: World) -> None:
    for number in range(9):
        world.app.queue(f"q{number}").add("send", {})
    shown = run(world.url).stdout
    assert shown.count("broken: no-worker, queue ") == 3
    assert "  The same in 6 queues: q3, q4, q5, q6, q7, q8\n" in shown


def test_fix_mends_what_needs_no_decision_after_it_was_listed(world: World) -> None:
    a_crash_record_without_a_job(world)
    world.connect()
    a_cache_without_a_limit(world)
    world.redis.rename(world.keys.wait, world.keys.paused)  # and the queue is not paused
    assert run(world.url, "--fix").exit_code == 2, "nobody can confirm it"
    assert world.redis.exists(world.keys.job("gone"))
    result = run(world.url, "--fix", "--yes")
    done = result.stdout.split("To mend:\n")[1]
    assert set(re.findall(r"^  - (\w+)", done, re.MULTILINE)) == {"set", "merge", "remove"}
    assert "1 crash record of queue mail removed" in done
    assert not world.redis.exists(world.keys.job("gone"))
    assert world.redis.lrange(world.keys.wait, 0, -1) == ["j"]
    assert examined(world.app).findings == []


def test_fix_does_nothing_that_is_no_longer_right_and_nothing_twice(world: World) -> None:
    a_crash_record_without_a_job(world)
    world.connect()
    world.redis.rename(world.keys.wait, world.keys.paused)
    fixes = [it.fix for it in examined(world.app).findings if it.fix is not None]
    assert len(fixes) == 2
    world.queue.pause()  # while the operator reads what --fix would do
    world.redis.hset(world.keys.job("gone"), "name", "send")
    assert {fix.apply() for fix in fixes} == {
        "not done: queue mail has been paused meanwhile",
        "0 crash records of queue mail removed",
    }
    assert world.queue.is_paused()
    assert world.redis.hget(world.keys.job("gone"), "bulltask:crashes") == "2"
    world.queue.resume()
    world.redis.delete(world.keys.job("gone"))
    assert json_of(run(world.url, "--json", "--fix", "--yes"), "doctor")["fixed"] == []


def test_fix_releases_jobs_that_no_worker_looks_for(world: World) -> None:
    world.add()
    world.die()
    document = json_of(run(world.url, "--json", "--fix", "--yes"), "doctor")
    assert document["fixed"] == ["the jobs of queue mail are marked: repeat --fix after 30 s, to release them"]
    world.redis.delete(world.keys.stalled_check)
    document = json_of(run(world.url, "--json", "--fix", "--yes"), "doctor")
    assert document["fixed"] == ["1 job of queue mail released, to run again"]
    assert world.redis.lrange(world.keys.wait, 0, -1) == ["j"]


def test_what_may_not_be_read_is_listed_and_not_taken_for_health(world: World) -> None:
    world.redis.config_set("save", "")
    world.connect()
    world.add()
    result = run(restricted(world, role_grants(["reader"]).rules()))
    assert (result.exit_code, "nothing found" in result.stdout) == (0, True), result.stdout
    listed = result.stdout.split("Not examined:")[1]
    for what in ("persistence (CONFIG GET save)", "the slow log (SLOWLOG GET)", "refused calls (ACL LOG)"):
        assert f"- {what}: " in listed
    assert "acl" not in found(world), "jobs do not need what was refused to the command"


FILL = """
local queue, from, upto, state = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
for number = from, upto do
  redis.call("HSET", queue .. ":" .. number, "name", "send", "data", "{}", "opts", "{}", "timestamp", ARGV[4])
  if state == "wait" then
    redis.call("RPUSH", queue .. ":wait", number)
  else
    redis.call("ZADD", queue .. ":" .. state, number, number)
  end
end
redis.call("HSET", queue .. ":meta", "version", "bullmq:5.62.0", "opts.maxLenEvents", 10000)
"""


@pytest.mark.extended
def test_a_million_jobs_and_2000_queues_take_seconds_and_no_call_takes_5_ms(server_factory: ServerFactory) -> None:
    server = server_factory()
    with closing(App("shop", server.url)) as app, redis.Redis.from_url(server.url) as plain:
        fill, now_ms, page = plain.register_script(FILL), app._now_ms(), 5_000
        for state, jobs, start in (("completed", 700_000, 0), ("wait", 100_000, 700_000)):
            for first in range(start, start + jobs, page):
                fill(["bull:{big}"], [first, first + page - 1, state, now_ms])
        with plain.pipeline(transaction=False) as pipe:
            for number in range(2_000):
                fill([f"bull:{{q{number}}}"], [1, 100, "completed" if number % 10 else "wait", now_ms], pipe)
                pipe.zadd(known_queues("bull"), {f"{{q{number}}}": now_ms})
            pipe.zadd(known_queues("bull"), {"{big}": now_ms})
            pipe.execute()
        plain.config_set("slowlog-log-slower-than", 5_000)
        plain.config_set("slowlog-max-len", 10_000)
        slow = []
        for _ in range(3):
            plain.slowlog_reset()
            diagnosis = json_of(run(server.url, "--json"), "doctor")
            assert (diagnosis["queues"], diagnosis["seconds"] < 30) == (2_001, True), diagnosis["seconds"]
            assert {it["queue"] for it in diagnosis["findings"] if it["code"] == "no-worker"} > {"big", "q0", "q1990"}
            slow.append({entry["command"][:80] for entry in plain.slowlog_get(10_000)})
    # On a busy machine, any call may wait for the processor; one that does too much is slow each time.
    assert set.intersection(*slow) == set()


def test_a_short_budget_says_what_was_not_looked_at(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PER_PAGE", 10)
    for name in ("a", "b", "c"):
        world.app.queue(name).add_bulk([{"name": "send"} for _ in range(20)])
    diagnosis = examined(world.app, budget_s=0)
    assert "2 of 3 queues with jobs: no time was left" in diagnosis.not_examined
    assert re.search(r"^keys: \d+ of about \d+ were looked at", diagnosis.not_examined[-1])
    assert 0 < diagnosis.keys < 60
