"""``bulltask acl`` prints the minimum permissions that a Redis user needs for its roles."""

from __future__ import annotations

import json
import re
import secrets
import shlex
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
import redis
import structlog
from click.testing import CliRunner

from bulltask import App, GroupResult, chord
from bulltask.cli.main import main
from bulltask.errors import BrokerAuthError, ConfigError, JobNotFoundError, ResultTimeoutError
from bulltask.observe.bus import Bus
from bulltask.queue import FlowJob, FlowProducer, Queue
from bulltask.queue.flows import add_flow_once, plan, read_workflow
from bulltask.transport.call import command
from bulltask.transport.operation import run_sync
from bulltask.transport.permissions import CLUSTER, NEEDED_BY_JOBS, ROLES, role_grants
from bulltask.transport.scripts.add import IdempotentWrite
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.run import StartupCheck
from tests.conftest import ServerFactory, needs_redis_7
from tests.support.manual_worker import ManualWorker
from tests.support.queue_contents import add

pytestmark = pytest.mark.redis

on_a_cluster = pytest.mark.parametrize("broker_url", [pytest.param("cluster", id=pytest.HIDDEN_PARAM)], indirect=True)
ROOT: Final = Path(__file__).parents[2]
MakeUser = Callable[..., str]
ALWAYS_ALLOWED: Final = {"auth", "hello"}


def acl(*args: str) -> list[str]:
    """Return the arguments of ``ACL SETUSER`` that ``bulltask acl`` prints."""
    done = CliRunner().invoke(main, ["acl", *args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return shlex.split(done.stdout)


@pytest.fixture
def user(broker_url: str, redis_client: redis.Redis) -> Iterator[MakeUser]:
    """Create a user with the permissions that the command prints; return a URL with its credentials."""
    name = f"acl-{secrets.token_hex(4)}"

    def make(*args: str) -> str:
        redis_client.acl_deluser(name)
        command = acl("--user", name, "-b", broker_url, *args)
        assert redis_client.execute_command(*(">secret" if arg == ">PASSWORD" else arg for arg in command))
        return broker_url.replace("://", f"://{name}:secret@")

    yield make
    redis_client.acl_deluser(name)


def calls_of(client: redis.Redis, work: Callable[..., None], *args: Any) -> set[str]:
    """Run ``work`` and return the commands that the server executed meanwhile, including those called by scripts."""
    client.script_flush()
    client.config_resetstat()
    work(*args)
    stats: Any = client.info("commandstats")
    own = {"config|resetstat", "script|flush"}
    rejected = {name for name, numbers in stats.items() if numbers["rejected_calls"]}
    assert not rejected
    return {name.removeprefix("cmdstat_") for name in stats} - own - ALWAYS_ALLOWED


def send_everything(url: str, removed: str) -> None:
    """Send jobs of every kind, canvases, flows and the rows of an outbox, and wait for results."""
    app = App("shop", url, task_default_queue="mail")
    with pytest.raises(JobNotFoundError):
        app.AsyncResult(removed).get(timeout=1)
    add_task = app.task(name="add")(lambda x, y: x + y)
    queue = app.queue("mail")
    for options in JOB_OPTIONS:
        queue.add("send", {}, **options)
    result = add_task.delay(1, 2)
    with pytest.raises(ResultTimeoutError):
        result.get(timeout=0.1)
    assert result.state == "PENDING"
    group: Any = chord([add_task.s(1, 1), add_task.s(2, 2)])(add_task.s(3))
    group.state  # noqa: B018 - reads the state
    saved = GroupResult("saved", [result])
    saved.save()
    assert GroupResult.restore("saved", app) is not None
    saved.delete()
    with FlowProducer(url) as flows:
        flows.add(flow("done"))
    tree, single = plan([flow("new"), FlowJob("send", "mail")], None, {}, app._config)
    app._broker.producer.send_once([single.job], IdempotentWrite("w1", 60_000))
    with app._broker.pool.client() as client:
        client.connect()
        run_sync(client, add_flow_once([tree], app._broker, "w2", 60_000))
    app.close()


JOB_OPTIONS: list[dict[str, Any]] = [
    {},
    {"lifo": True},
    {"delay": 60},
    {"priority": 3},
    {"deduplication": {"id": "once"}},
    {"deduplication": {"id": "active", "keep_last_if_active": True}},
    {"deduplication": {"id": "late", "replace": True, "ttl": 60}, "delay": 60},
    {"deduplication": {"id": "late", "replace": True, "ttl": 60}, "delay": 60},
]


def flow(child_id: str) -> FlowJob:
    return FlowJob(
        "report",
        "mail",
        children=[FlowJob("part", "mail", options={"job_id": child_id}), FlowJob("part", "other{mail}")],
    )


READING_COMMANDS = [
    "job show {}",
    "job tree {}",
    "job logs {}",
    "jobs mail --search x --older-than 1h",
    "failures",
    "result {}",
    "events -Q mail --since 1h --limit 1",
    "schedule list",
    "schedule show mail hourly",
    "report",
    "queues",
]


def read_everything(url: str, ids: list[str]) -> None:
    """Read queues, jobs, flows, results, schedules and events."""
    app = App("shop", url, task_default_queue="mail")
    queue = app.queue("mail")
    assert sum(queue.get_job_counts().values()) > 5
    queue.get_counts_per_priority([1, 2, 3])
    queue.get_summary()
    for ascending in (True, False):
        assert len(list(queue.iter_jobs(["completed", "failed", "wait"], asc=ascending))) == 3
    job = queue.get_job(ids[0])
    assert job is not None
    job.get_state()
    queue.get_job_state(ids[-2])
    job.get_logs()
    job.get_dependencies()
    job.get_dependencies_count()
    job.get_children_values()
    job.get_failed_children()
    for kind in ("processed", "pending"):
        queue.get_dependencies(ids[-1], kind)
    queue.get_metrics("completed")
    queue.get_workers()
    queue.get_meta()
    queue.is_paused()
    queue.is_maxed()
    queue.get_rate_limit_ttl()
    queue.get_global_concurrency()
    queue.get_global_rate_limit()
    queue.get_deduplication_job_id("once")
    queue.export_prometheus_metrics()
    queue.schedulers.list()
    queue.schedulers.get("hourly")
    queue.schedulers.count()
    FlowProducer(url).get_flow("mail", ids[-1])
    queue.context.run(read_workflow(lambda: app._broker, "mail", ids[-1]))
    with app.events("mail", start="0") as events:
        assert events.next(timeout=1)
    app.AsyncResult(ids[0]).get(timeout=1)
    with pytest.raises(JobNotFoundError):
        app.AsyncResult(ids[1]).get(timeout=1)
    for line in READING_COMMANDS:
        shown = CliRunner().invoke(main, ["-b", url, *line.format(ids[0]).split()])
        assert shown.exit_code == 0, (line, shown.output)
    app.close()


@pytest.fixture
def removed_id(broker_url: str) -> Iterator[str]:
    """Finish the job ``done`` and remove another one; return its id."""
    with Queue("mail", broker_url) as queue:
        queue.set_global_concurrency(5)
        queue.add("part", job_id="done")
        removed = queue.add("part", priority=1)
        removed.remove()
        worker = ManualWorker(queue.context.broker, queue.context.keys)
        worker.complete()
        queue.add("active", deduplication={"id": "active"})
        worker.acquire()
        worker.close()
        yield removed.id


@pytest.fixture
def job_ids(broker_url: str) -> Iterator[list[str]]:
    """Add jobs in several states and a schedule; return the ids of the jobs, the first of which is completed."""
    with Queue("mail", broker_url) as queue:
        ids = add(queue, 5)
        worker = ManualWorker(queue.context.broker, queue.context.keys)
        worker.complete({"sum": 3})
        worker.fail()
        add(queue, 1, delay=60)
        add(queue, 1, priority=3)
        queue.add_job_log(ids[0], "line")
        queue.remove(ids[1])
        queue.schedulers.upsert("hourly", name="send", every=3_600)
        with FlowProducer(broker_url) as flows:
            parent = flows.add(FlowJob("report", "mail", children=[FlowJob("part", "mail"), FlowJob("part", "mail")]))
        while worker.acquire() not in [child.job.id for child in parent.children]:
            pass
        worker.finish(parent.children[0].job.id, 1)
        worker.close()
        yield [*ids, parent.job.id]


@needs_redis_7
@pytest.mark.one_server
def test_a_sender_needs_exactly_its_commands(user: MakeUser, redis_client: redis.Redis, removed_id: str) -> None:
    calls = calls_of(redis_client, send_everything, user("sender"), removed_id)
    only_if_a_job_is_removed_while_its_sender_waits, only_for_broker_publish_replicas = {"xrange"}, {"wait"}
    needed = calls | only_if_a_job_is_removed_while_its_sender_waits | only_for_broker_publish_replicas
    assert needed == set(role_grants(["sender"]).commands)


@needs_redis_7
@pytest.mark.one_server
def test_a_reader_needs_exactly_its_commands(user: MakeUser, redis_client: redis.Redis, job_ids: list[str]) -> None:
    assert calls_of(redis_client, read_everything, user("reader"), job_ids) == set(role_grants(["reader"]).commands)


@on_a_cluster
def test_in_a_cluster_a_sender_needs_no_other_commands(user: MakeUser, removed_id: str) -> None:
    send_everything(user("sender"), removed_id)


@on_a_cluster
def test_in_a_cluster_a_reader_needs_no_other_commands(user: MakeUser, job_ids: list[str]) -> None:
    read_everything(user("reader"), job_ids)


def test_a_reader_can_change_nothing(user: MakeUser, redis_client: redis.Redis, job_ids: list[str]) -> None:
    before = redis_client.hgetall("bull:{mail}:meta"), redis_client.keys()
    with Queue("mail", user("reader")) as queue:
        changes: list[Callable[[], object]] = [
            lambda: queue.add("send"),
            lambda: queue.remove(job_ids[0]),
            queue.pause,
            lambda: queue.obliterate(force=True),
            lambda: queue.set_global_concurrency(1),
            lambda: queue.schedulers.remove("hourly"),
        ]
        for change in changes:
            with pytest.raises(BrokerAuthError):
                change()
    assert (redis_client.hgetall("bull:{mail}:meta"), redis_client.keys()) == before


def test_a_manager_may_run_every_command_in_the_code_and_nothing_else() -> None:
    sources = [
        path.read_text()
        for path in (ROOT / "bulltask").rglob("*.py")
        if not {"spark", "testing"} & set(path.parts) and path.name not in {"cluster.py", "cluster_slots.py"}
    ]
    calls = re.compile(r'\bcommand\(\s*"([A-Z]+)"(?:, "([A-Z]+)")?')
    found = {match for text in sources for match in calls.findall(text)}
    direct = {f"{name}|{more}".lower() if name in {"CLIENT", "XINFO"} else name.lower() for name, more in found}
    allowed = set(role_grants(["manager"]).commands)
    only_spark = {"sscan"}
    assert direct - ALWAYS_ALLOWED - only_spark <= allowed | set(CLUSTER)
    for role in NEEDED_BY_JOBS:
        assert set(role_grants([role]).commands) <= allowed


@pytest.mark.parametrize("options", [(), ("--queue", "mail"), ("--prefix", "shop"), ("--queue", "mail*")])
def test_a_sender_may_give_no_orders_to_workers(user: MakeUser, options: tuple[str, ...]) -> None:
    app = App("shop", user("sender", *options), prefix="shop" if "shop" in options else "bull")
    keys = app._broker.keys(options[1] if "--queue" in options else "mail")
    app.queue(keys.queue).add("send")
    with app._broker.pool.client() as client, pytest.raises(BrokerAuthError, match=r"a key|one of the keys"):
        client.run(command("SET", keys.orders("worker-1"), "x"))
    app.close()


def test_a_user_of_one_queue_has_no_access_to_others(user: MakeUser) -> None:
    url = user("manager", "--queue", "mail")
    with Queue("mail", url) as queue:
        queue.add("send")
        queue.pause()
        assert queue.count() == 1
    with Queue("reports", url) as other, pytest.raises(BrokerAuthError, match="Grant the keys"):
        other.add("send")


def test_a_prefix_has_the_keys_of_groups_and_of_beat_schedules(user: MakeUser) -> None:
    app = App("shop", user("sender", "--prefix", "shop"), prefix="shop")
    group = GroupResult("saved", [app.send_task("add")])
    group.save()
    assert GroupResult.restore("saved", app) is not None
    app.close()
    assert "~bulltask:beat:shop:*" in acl("worker", "--prefix", "shop")


@pytest.mark.one_server
def test_a_database_other_than_0_needs_select(user: MakeUser, broker_url: str) -> None:
    url = user("manager", "-b", broker_url.removesuffix("/0") + "/3").removesuffix("/0") + "/3"
    with Queue("mail", url) as queue:
        queue.add("send")
    for other in ("redis://host", "redis://host/0", "redis+sentinel://host/main?db=0", "redis+cluster://host"):
        assert "+select" not in acl("manager", "-b", other)
    for other in ("redis://host?db=3", "redis+sentinel://host/main?db=3"):
        assert "+select" in acl("manager", "-b", other)


@pytest.mark.parametrize(
    ("name", "other"),
    [("a*b", "acb"), ("a?b", "acb"), ("[ab]", "a"), ("a\\b", "ab"), ('a"b', "ab"), ("it's", "its"), ("a b", "ab")],
)
def test_special_characters_in_names_match_only_themselves(user: MakeUser, name: str, other: str) -> None:
    url = user("manager", "--queue", name)
    with Queue(name, url) as queue:
        queue.add("send")
    with Queue(other, url) as forbidden, pytest.raises(BrokerAuthError):
        forbidden.add("send")


def test_redis_reads_special_names_from_a_file_of_users(server_factory: ServerFactory, tmp_path: Path) -> None:
    name = "a\" b\\x20'c"
    done = CliRunner().invoke(main, ["acl", "manager", "--queue", name, "--user", "it's\"me", "--format", "file"])
    path = tmp_path / "users.acl"
    path.write_text(f"user default on nopass ~* &* +@all\n{done.stdout.replace('PASSWORD', 'secret')}")
    server = server_factory(flavor="redis", extra=["--aclfile", str(path)])
    with Queue(name, server.url.replace("://", "://it's%22me:secret@")) as queue:
        queue.add("send")
    with Queue("other", server.url.replace("://", "://it's%22me:secret@")) as other, pytest.raises(BrokerAuthError):
        other.add("send")


@pytest.mark.parametrize("name", ["a b", "a\n", ""])
def test_a_name_that_redis_allows_for_no_user_is_refused(name: str) -> None:
    done = CliRunner().invoke(main, ["acl", "sender", "--user", name])
    assert (done.exit_code, "Redis allows no spaces in a user's name" in done.output) == (2, True)


def test_prefixes_that_overlap_are_reported() -> None:
    run = CliRunner().invoke
    assert (
        "every prefix that begins with shop: (such as shop:eu)"
        in run(main, ["acl", "sender", "--prefix", "shop"]).stderr
    )
    for args in (["--prefix", "shop", "--queue", "mail"], []):
        assert run(main, ["acl", "sender", *args]).stderr == ""
    for prefix in ("bulltask", "bulltask:shop"):
        refused = run(main, ["acl", "sender", "--prefix", prefix])
        assert (refused.exit_code, "prefix must not be bulltask" in refused.output) == (1, True)
        with pytest.raises(ConfigError, match="prefix must not be bulltask"):
            Queue("mail", "redis://127.0.0.1:1", prefix=prefix)


@pytest.mark.every_topology
def test_a_worker_of_one_queue_starts_and_runs_its_jobs_with_the_permissions_for_it(user: MakeUser) -> None:
    url = user("worker", "--queue", "mail")
    app = App("shop", url, task_default_queue="mail")
    with structlog.testing.capture_logs() as lines, closing(app._broker.client()) as client:
        backoff = ReconnectBackoff(Bus(), app._config)
        startup_check = StartupCheck(client, [app._broker.keys("mail")], app._config, structlog.get_logger(), backoff)
        assert startup_check.run(lambda _: None, lambda: True) is None
    assert [line for line in lines if line["log_level"] != "info"] == []
    app.close()


COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "job show": (["reader"], ["job", "show", "done", "--queue", "mail"]),
    "revoke": (["manager"], ["revoke", "waiting", "--queue", "mail"]),
    "revoke as a worker": (["worker"], ["revoke", "waiting", "--queue", "mail"]),
    "migrate-bull": (["manager"], ["migrate-bull", "{old}"]),  # its queues have two spellings, so it takes no --queue
}


@pytest.mark.every_topology
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs_with_the_permissions_of_its_role(
    user: MakeUser, broker_url: str, removed_id: str, name: str
) -> None:
    roles, command = COMMANDS[name]
    with Queue("mail", broker_url) as queue:
        queue.add("send", job_id="waiting")
    url = user(*roles, *([] if name == "migrate-bull" else ["--queue", "mail"]))
    done = CliRunner().invoke(main, ["-b", url, *command])
    assert done.exit_code == 0, done.output


@pytest.fixture
def operated(broker_url: str) -> Iterator[None]:
    """Jobs in several states in the queue ``mail``, and a schedule."""
    with Queue("mail", broker_url) as queue:
        worker = ManualWorker(queue.context.broker, queue.context.keys)
        queue.add("send", job_id="done")
        worker.complete()
        with FlowProducer(broker_url) as flows:
            flows.add(FlowJob("report", "mail", children=[FlowJob("part", "mail", options={"job_id": "child"})]))
        assert worker.fail() == "child"
        queue.add("send", job_id="broken")
        assert worker.fail() == "broken"
        worker.close()
        queue.add("send", job_id="waiting")
        queue.add("send", job_id="urgent", priority=1)
        queue.add("send", job_id="late", delay=60)
        queue.schedulers.upsert("hourly", name="send", every=3_600)
        yield


OPERATIONS: Final = [
    "queue pause mail",
    "queue resume mail",
    "queue drain mail --delayed --yes",
    "queue clean mail --state failed --yes",
    "queue clean mail --state waiting --yes",
    "queue clean mail --state active --yes",
    "queue limit mail 10/s",
    "queue limit mail --remove",
    "queue concurrency mail 3",
    "queue concurrency mail --remove",
    "jobs mail --retry --yes",
    "jobs mail --retry --state completed --yes",
    "jobs mail --promote --yes",
    "jobs mail --remove --state failed --yes",
    "jobs mail --revoke --terminate --yes",
    "job retry broken",
    "job retry done --reset-attempts",
    "job promote late",
    "job remove waiting",
    "job revoke urgent",
    "revoke waiting --terminate",
    "schedule add mail daily --every 1d",
    "schedule add mail weekly --cron 0_8_*_*_1",
    "schedule run mail hourly",
    "schedule pause mail hourly",
    "schedule add mail hourly --every 2h",
    "schedule list",
    "schedule resume mail hourly",
    "schedule remove mail hourly",
    "call send -Q mail",
    "result done",
    "events -Q mail --since 1h --limit 1",
    "failures",
    "report",
    "why waiting",
    "workers",
    "inspect ping -t 0.1s",
    "control pause -t 0.1s",
]
ALSO_FINE: Final = {
    "jobs mail --revoke --terminate --yes": 3,  # the next job of a schedule cannot be revoked
    "workers": 69,
    "inspect ping -t 0.1s": 69,
    "control pause -t 0.1s": 69,
}
"""Exit codes other than 0 of commands that were permitted."""


def run(url: str, line: str, *options: str) -> tuple[int, str]:
    words = [word.replace("_", " ") if "*" in word else word for word in line.split()]
    done = CliRunner().invoke(main, ["-b", url, *words, *options])
    return done.exit_code, done.output


@pytest.mark.parametrize("line", OPERATIONS)
@pytest.mark.usefixtures("operated")
def test_an_operator_may_run_every_command_for_queues_and_jobs(user: MakeUser, line: str) -> None:
    code, output = run(user("operator"), line)
    assert code == ALSO_FINE.get(line, 0), output
    assert "permission" not in output


def test_an_operator_of_a_prefix_may_run_every_command_there(user: MakeUser, broker_url: str) -> None:
    url = user("operator", "--prefix", "shop")
    with Queue("mail", broker_url, prefix="shop") as queue:
        for line in OPERATIONS:
            for job_id in ("done", "broken", "waiting", "urgent", "late"):
                queue.add("send", job_id=job_id, delay=60 if job_id == "late" else 0)
            queue.schedulers.upsert("hourly", name="send", every=3_600)
            assert "permission" not in run(url, line, "--prefix", "shop")[1], line


@needs_redis_7
@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("revoke waiting", "hincrby"),
        ("revoke waiting", "xadd"),
        ("job revoke urgent", "zadd"),
        ("jobs mail --revoke --yes", "hincrby"),
        ("job retry broken", "xadd"),
        ("job retry broken --reset-attempts", "xadd"),
        ("jobs mail --retry --yes", "xadd"),
        ("job promote late", "xadd"),
        ("job remove waiting", "xadd"),
        ("queue pause mail", "xadd"),
        ("queue drain mail --yes", "del"),
        ("schedule remove mail hourly", "xadd"),
        ("schedule pause mail hourly", "xadd"),
    ],
)
@pytest.mark.usefixtures("operated")
def test_a_command_that_is_not_permitted_to_the_end_changes_nothing(
    user: MakeUser, redis_client: redis.Redis, line: str, missing: str
) -> None:
    url = user("operator")
    name = url.split("://")[1].split(":")[0]
    redis_client.acl_setuser(name, enabled=True, commands=[f"-{missing}"])
    before = contents(redis_client)
    code, output = run(url, line)
    assert (code, contents(redis_client)) == (1, before), output
    assert f"Redis user '{name}' at" in output
    assert f"lacks permission for {missing}, which the script" in output
    assert f"ACL SETUSER {name} +{missing}, or all permissions of the role: bulltask acl operator" in output
    assert output.strip().count("\n") == 0


@needs_redis_7
@pytest.mark.parametrize("fails_parent", [True, False])
def test_revoking_a_child_job_does_not_leave_it_active_if_the_queue_of_its_parent_is_not_permitted(
    user: MakeUser, broker_url: str, redis_client: redis.Redis, fails_parent: bool
) -> None:
    options: Any = {"job_id": "child", "fail_parent_on_failure": fails_parent}
    with FlowProducer(broker_url) as flows:
        flows.add(FlowJob("report", "other{mail}", children=[FlowJob("part", "mail", options=options)]))
    code, output = run(user("operator", "--queue", "mail"), "job revoke child -Q mail")
    assert (code, "Grant the keys: `bulltask acl ROLE" in output) == (int(fails_parent), fails_parent), output
    assert redis_client.lrange("bull:{mail}:active", 0, -1) == []
    assert len(redis_client.lrange("bull:{mail}:wait", 0, -1)) == fails_parent


def contents(client: redis.Redis) -> dict[Any, Any]:
    return {key: client.dump(key) for key in client.keys("bull*mail*")}


@needs_redis_7
@pytest.mark.usefixtures("operated")
async def test_revoking_and_pausing_with_asyncio_change_nothing_if_they_are_not_permitted_to_the_end(
    user: MakeUser, redis_client: redis.Redis
) -> None:
    url = user("operator")
    redis_client.acl_setuser(url.split("://")[1].split(":")[0], enabled=True, commands=["-xadd"])
    before = contents(redis_client)
    app = App("shop", url, task_default_queue="mail")
    queue = app.aqueue("mail")
    for change in (app.AsyncResult("waiting").arevoke, queue.pause, lambda: queue.revoke("urgent")):
        with pytest.raises(BrokerAuthError, match=r"lacks permission for xadd.*nothing was changed"):
            await change()
    assert contents(redis_client) == before
    await app.aclose()


@pytest.mark.parametrize(
    ("line", "role"),
    [("queue limit mail 10/s", "operator"), ("schedule add mail x --every 1h", "operator"), ("call x", "operator")],
)
@pytest.mark.usefixtures("operated")
def test_a_reader_is_told_the_role_that_a_command_needs(user: MakeUser, line: str, role: str) -> None:
    code, output = run(user("reader"), line)
    assert (code, output.strip().count("\n")) == (1, 0)
    assert f"bulltask acl {role}" in output


@pytest.mark.every_topology
def test_the_doctor_reads_all_that_it_looks_at_with_the_role_of_its_name(user: MakeUser, redis_client: Any) -> None:
    with closing(App("shop", user("manager"))) as app:
        app.queue("mail").add("send", {}, job_id="j", deduplication="once")
        redis_client.rpush(app.queue("mail").context.keys.logs("gone"), "a line")
    url = user("doctor")
    found = json.loads(CliRunner().invoke(main, ["-b", url, "doctor", "--json"]).stdout)
    assert found["not_examined"] == []
    assert {it["code"] for it in found["findings"]} >= {"no-persistence", "no-worker", "keys-without-owner"}
    refused = [it["evidence"] for it in found["findings"] if it["code"] == "acl"]
    assert urlsplit(url).username not in {evidence["user"] for evidence in refused}


def test_the_line_has_several_forms() -> None:
    rules = role_grants(["worker"]).rules()
    assert acl("worker") == ["ACL", "SETUSER", "worker", "on", ">PASSWORD", *rules]
    assert acl("worker", "--format", "file", "--user", "w1") == ["user", "w1", "on", ">PASSWORD", *rules]
    assert acl("worker", "--format", "rules") == ["on", *rules]
    assert acl("worker", "sender") == ["ACL", "SETUSER", "worker", "on", ">PASSWORD", *_union("worker", "sender")]


def _union(*roles: str) -> list[str]:
    return role_grants(roles).rules()


@pytest.mark.parametrize("form", ["setuser", "file"])
def test_redis_accepts_the_permissions_of_all_roles(server_factory: ServerFactory, form: str, tmp_path: Path) -> None:
    lines = [" ".join(acl(role, "--format", form)) for role in ROLES]
    if form == "file":
        path = tmp_path / "users.acl"
        path.write_text("user default on nopass ~* &* +@all\n" + "".join(f"{line}\n" for line in lines))
        server = server_factory(flavor="redis", extra=["--aclfile", str(path)])
    else:
        server = server_factory(flavor="redis")
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        if form == "setuser":
            for line in lines:
                client.execute_command(*line.split())
        assert set(client.acl_users()) == {"default", *ROLES}
