"""Calls, queues, results and events in a Redis Cluster of three nodes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from bulltask import App
from bulltask.cli.main import main
from bulltask.errors import BrokerConfigError, BrokerError, BrokerNotReadyError, BrokerUnavailableError
from bulltask.jobs.clock import ServerClock, mono_ms, wall_ms
from bulltask.lua import loader, wrappers
from bulltask.queue import AsyncQueue, Queue, QueueEvents
from bulltask.queue.events import JobEvent
from bulltask.testing.worker import wait_until
from bulltask.transport import cluster as topology
from bulltask.transport.broker import read_server_settings
from bulltask.transport.call import Call, QueueKeys, SyncClient, command, script_call
from bulltask.transport.client import Client, ClientPool
from bulltask.transport.cluster import AsyncClusterClient, ClusterClient
from bulltask.transport.cluster_slots import guarded
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.operation import atomic
from bulltask.transport.scripts.queue import get_counts, is_maxed, list_clients
from tests.conftest import ServerFactory
from tests.support.redis_cluster import Cluster

pytestmark = [pytest.mark.redis, pytest.mark.slow]

KEYS = QueueKeys("bull", "{mail}", "mail")
QUEUES = tuple(QueueKeys("bull", f"{{q{number}}}") for number in range(30))
UNGUARDED = {"lastIdOfRange", "pageAfter"}
"""Scripts that access only the key that they declare."""
ASKING: Call[Any] = command("ASKING")


def endpoint(cluster: Cluster, timeout_ms: int = 5_000) -> Endpoint:
    return Endpoint(cluster.broker_url, 2_000, timeout_ms, clustered=True)


@pytest.fixture
def client(cluster: Cluster) -> Iterator[ClusterClient]:
    client = ClusterClient(endpoint(cluster), ServerClock())
    yield client
    client.close()


@pytest.fixture
def moving(cluster: Cluster) -> Iterator[int]:
    """Begin to move the slot of the queue ``mail``; return the number of the new node. It moves back at the end."""
    slot, source = cluster.slot("mail"), cluster.owner(cluster.slot("mail"))
    target = (source + 1) % 3
    plain = cluster.clients[source]
    plain.rpush(KEYS.wait, "1")
    plain.hset(KEYS.meta, "version", "x")
    plain.rpush(KEYS.active, "2")
    plain.set(KEYS.id, 2)
    plain.xadd(KEYS.events, {"event": "x"})
    plain.hset(KEYS.job("1"), "name", "x")
    plain.zadd(KEYS.delayed, {"3": 1})
    cluster.begin_move(slot, target)
    yield target
    if cluster.owner(slot) == source:
        finish_move(cluster, target)
    cluster.begin_move(slot, source)
    finish_move(cluster, source)


def finish_move(cluster: Cluster, target: int) -> None:
    cluster.move_keys(cluster.slot("mail"), target)
    cluster.end_move(cluster.slot("mail"), target)


def contents(cluster: Cluster) -> list[dict[Any, Any]]:
    found = []
    for server in cluster.servers:
        with redis.Redis(port=server.port) as node:
            keys: Any = node.keys()
            node.execute_command("ASKING")
            found.append({key: node.execute_command("ASKING") and node.dump(key) for key in keys})
    return found


def node_client(cluster: Cluster, number: int) -> Client:
    return Client(endpoint(cluster).at("127.0.0.1", cluster.servers[number].port), None)


def call_of(script: loader.Script) -> Call[Any]:
    """Return a call with as many keys as the script takes; it is not meant to run."""
    names = [KEYS.wait, KEYS.meta, KEYS.active, KEYS.id, KEYS.events, KEYS.job("1"), KEYS.delayed]
    keys = tuple(names[number % len(names)] for number in range(script.key_count))
    return script_call(script, keys, (1, 2, 3, 4, 5))


# --- the guard key ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moved", [0, 1, 1_000])
def test_no_script_runs_while_its_slot_moves(cluster: Cluster, moving: int, moved: int) -> None:
    source = cluster.owner(cluster.slot("mail"))
    cluster.move_keys(cluster.slot("mail"), moving, moved)
    before = contents(cluster)
    combined = [wrappers.fetching(name) for name in ("collectBatch", "fetchAhead", "fetchNow")]
    scripts = [script for script in loader.all_scripts() if script.key_count and script.name not in UNGUARDED]
    scripts += [wrappers.add_once("addStandardJob"), wrappers.release_unstarted(), *combined]
    assert len(scripts) > 50
    old, new = (node_client(cluster, node) for node in (source, moving))
    for script in scripts:
        call = guarded(call_of(script))
        for sent in (call, command(script.by_source, script.source, *call.args)):
            (reply,) = old.try_many([sent])
            assert str(reply.__cause__).startswith(("ASK", "4247", "TRYAGAIN", "Multiple keys")), (script.name, reply)
            _, reply = new.try_many([ASKING, sent])
            assert isinstance(reply, BrokerNotReadyError), (script.name, reply)
        *_, end = old.try_many([command("MULTI"), call, command("EXEC")])
        assert isinstance(end, BrokerError), (script.name, end)
    assert contents(cluster) == before
    old.close()
    new.close()


def test_a_script_waits_until_its_slot_has_moved(cluster: Cluster, client: ClusterClient, moving: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.run, get_counts(KEYS, ["wait"]))
        wait_until(lambda: rejected(cluster, "TRYAGAIN") + rejected(cluster, "ASK") > 0, what="a rejected script")
        assert not waiting.done()
        finish_move(cluster, moving)
        assert waiting.result(5) == {"wait": 1}


def rejected(cluster: Cluster, code: str) -> int:
    infos: list[Any] = [node.info("errorstats") for node in cluster.clients]
    return sum(info.get(f"errorstat_{code}", {"count": 0})["count"] for info in infos)


async def test_a_script_of_an_asyncio_client_waits_until_its_slot_has_moved(cluster: Cluster, moving: int) -> None:
    client = AsyncClusterClient(endpoint(cluster), ServerClock())
    before = rejected(cluster, "TRYAGAIN")
    waiting = asyncio.create_task(client.run(get_counts(KEYS, ["wait"])))
    await asyncio.to_thread(wait_until, lambda: rejected(cluster, "TRYAGAIN") > before, 10, "a rejected script")
    assert not waiting.done()
    finish_move(cluster, moving)
    assert await waiting == {"wait": 1}
    await client.close()


async def test_a_slot_that_moves_for_too_long_is_named(cluster: Cluster, client: ClusterClient, moving: int) -> None:
    client.set_deadline(mono_ms() + 200)
    with pytest.raises(BrokerNotReadyError, match=r"slot 4247 of the Redis Cluster at redis\+cluster://.* being moved"):
        client.run(is_maxed(KEYS))
    aclient = AsyncClusterClient(endpoint(cluster, timeout_ms=200))
    with pytest.raises(BrokerNotReadyError, match="slot 4247"):
        await aclient.run(is_maxed(KEYS))
    await aclient.close()


# --- calls ------------------------------------------------------------------------------------------------------------


def counts_of_all_queues() -> list[Call[Any]]:
    return [get_counts(keys, ["wait"]) for keys in QUEUES]


def test_calls_to_all_nodes_return_their_results_in_order(cluster: Cluster, client: ClusterClient) -> None:
    for node in cluster.clients:
        node.script_flush()
    client.run_many([command("RPUSH", keys.wait, *range(number + 1)) for number, keys in enumerate(QUEUES)])
    assert client.run_many(counts_of_all_queues()) == [{"wait": number + 1} for number in range(30)]
    transaction = atomic([command("LLEN", QUEUES[3].wait), get_counts(QUEUES[3], ["wait"])], "test")
    *_, last, size = client.run_many([*counts_of_all_queues(), *transaction, command("LLEN", QUEUES[7].wait)])
    assert (last, size) == ([4, {"wait": 4}], 8)
    assert client.run_many([]) == []


async def test_an_asyncio_client_makes_calls_to_all_nodes(cluster: Cluster) -> None:
    client = AsyncClusterClient(endpoint(cluster), clock := ServerClock())
    await client.run_many([command("RPUSH", keys.wait, *range(number + 1)) for number, keys in enumerate(QUEUES)])
    results = await asyncio.gather(*(client.run_many(counts_of_all_queues()) for _ in range(20)))
    assert all(result == [{"wait": number + 1} for number in range(30)] for result in results)
    assert abs(clock.now_ms() - wall_ms()) < 1_000
    assert mono_ms() < clock.due_at_ms
    with pytest.raises(BrokerError, match="wrong number"):
        await client.run_many([command("GET", KEYS.wait, "x"), command("PING")])
    await client.close()


def test_packed_calls_are_routed_by_their_key(cluster: Cluster, client: ClusterClient) -> None:
    calls: list[Call[Any]] = [get_counts(keys, ["wait"]) for keys in QUEUES]
    client.run_many(calls)  # loads the script
    client.run_many([command("RPUSH", keys.wait, *range(number + 1)) for number, keys in enumerate(QUEUES)])
    assert client.send_packed([client.pack(call) for call in calls]) == [[number + 1] for number in range(30)]


def test_a_client_makes_a_call_to_every_node(cluster: Cluster, client: ClusterClient) -> None:
    ports = client.run_on_all_nodes(command("CONFIG", "GET", "port", parse_reply=lambda reply: int(reply[1])))
    assert sorted(ports) == sorted(server.port for server in cluster.servers)
    named = [ClusterClient(endpoint(cluster), ServerClock(), "bull:bWFpbA==") for _ in range(2)]
    for one, keys in zip(named, QUEUES[:2], strict=True):
        one.run(command("EXISTS", keys.probe))
    assert len(client.run(list_clients("bull:bWFpbA=="))) == 2, "each has one connection, to the node of its call"
    for one in named:
        one.close()


async def test_an_asyncio_client_makes_a_call_to_every_node(cluster: Cluster) -> None:
    client = AsyncClusterClient(endpoint(cluster), None, "somebody")
    other = AsyncClusterClient(endpoint(cluster))
    await client.run(command("EXISTS", KEYS.probe))
    assert len(await other.run(list_clients("somebody"))) == 1, "it has no connection to other nodes yet"
    await client.run_many([command("EXISTS", keys.probe) for keys in QUEUES])
    assert len(await other.run(list_clients("somebody"))) == 3
    await other.close()
    await client.close()


def test_a_dry_run_asks_every_node(cluster: Cluster, client: ClusterClient) -> None:
    cluster.clients[1].acl_setuser("limited", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-hset"])
    for number in (0, 2):
        cluster.clients[number].acl_setuser("limited", enabled=True, nopass=True, keys=["*"], commands=["+@all"])
    limited = ClusterClient(Endpoint(cluster.broker_url.replace("//", "//limited:x@", 1), 2_000, 5_000), None)
    replies = limited.dry_run([command("HSET", KEYS.meta, "a", "b")])
    assert replies is not None
    assert sum("NOPERM" in str(reply) or "no permissions" in str(reply) for reply in replies) == 1
    limited.close()
    for node in cluster.clients:
        node.acl_deluser("limited")


def test_the_clock_is_set_from_one_node(cluster: Cluster) -> None:
    clock = ServerClock()
    client = ClusterClient(endpoint(cluster), clock)
    for node in cluster.clients:
        node.config_resetstat()
    client.connect()
    client.connect()
    client.run_many(counts_of_all_queues())
    assert mono_ms() < clock.due_at_ms
    stats: list[Any] = [node.info("commandstats") for node in cluster.clients]
    assert sum(stat.get("cmdstat_time", {"calls": 0})["calls"] for stat in stats) == 1
    client.close()


def test_a_single_server_is_rejected(server_factory: ServerFactory) -> None:
    url = server_factory().url.replace("redis://", "redis+cluster://").removesuffix("/0")
    with Queue("mail", url) as queue, pytest.raises(BrokerConfigError, match="is not a node of a Redis Cluster"):
        queue.add("work", {})


def test_a_forked_process_uses_its_own_connections(cluster: Cluster) -> None:
    pool = ClientPool(lambda: ClusterClient(endpoint(cluster), None))
    ids = pool.run_many([command("CLIENT", "ID")])
    if (pid := os.fork()) == 0:
        os._exit(0 if pool.run_many([command("CLIENT", "ID")]) != ids else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert pool.run_many([command("CLIENT", "ID")]) == ids
    pool.close()


# --- blocking calls ---------------------------------------------------------------------------------------------------


def pop(wait_ms: int) -> Call[Any]:
    return command("BZPOPMIN", KEYS.marker, f"{wait_ms / 1000:.3f}")


@pytest.fixture
def waiter(cluster: Cluster) -> Iterator[SyncClient]:
    waiter = ClusterClient(endpoint(cluster).blocking(10_000), None)
    yield waiter
    waiter.close()


def test_a_wait_ends_with_the_marker_or_to_the_millisecond(client: ClusterClient, waiter: SyncClient) -> None:
    ping: Any = lambda: client.run(command("EXISTS", KEYS.probe))  # noqa: E731
    assert waiter.wait(pop(50), 50, ping) is None
    client.run(command("ZADD", KEYS.marker, 7, "0"))
    assert waiter.wait(pop(5_000), 5_000, ping) == [KEYS.marker.encode(), b"0", b"7"]
    client.run(command("ZADD", KEYS.marker, 7, "0"))
    popped, counts = waiter.wait_then(pop(5_000), get_counts(KEYS, ["wait"]), 5_000, ping)
    assert popped is not None
    assert counts == {"wait": 0}
    popped, error = waiter.wait_then(pop(20), command("LPOP", KEYS.marker, "x"), 20, ping)
    assert popped is None
    assert isinstance(error, BrokerError)


def test_a_wait_continues_on_the_new_node_when_its_slot_moves(
    cluster: Cluster, client: ClusterClient, waiter: SyncClient
) -> None:
    slot, source = cluster.slot("mail"), cluster.owner(cluster.slot("mail"))
    target = (source + 1) % 3
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waiter.wait_then, pop(9_000), get_counts(KEYS, ["wait"]), 9_000, lambda: None)
        wait_until(lambda: blocked(cluster, source) == 1, what="the blocked call")
        cluster.begin_move(slot, target)
        cluster.end_move(slot, target)
        wait_until(lambda: blocked(cluster, target) == 1, what="the call on the new node")
        client.run_many([command("RPUSH", KEYS.wait, "1"), command("ZADD", KEYS.marker, 7, "0")])
        assert waiting.result(5) == ([KEYS.marker.encode(), b"0", b"7"], {"wait": 1})
    cluster.begin_move(slot, source)
    finish_move(cluster, source)


def test_a_wait_for_a_slot_that_moves_ends_with_an_error(waiter: SyncClient, moving: int) -> None:
    with pytest.raises(BrokerNotReadyError, match="slot 4247"):
        waiter.wait_then(pop(300), get_counts(KEYS, ["wait"]), 300, lambda: None)


def test_another_thread_can_interrupt_a_wait(cluster: Cluster, waiter: SyncClient) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waiter.wait, pop(9_000), 9_000, lambda: None)
        wait_until(lambda: blocked(cluster, cluster.owner(cluster.slot("mail"))) == 1, what="the blocked call")
        waiter.interrupt()
        with pytest.raises(BrokerError, match="was lost"):
            waiting.result(5)


def test_a_node_that_ends_a_long_wait_with_an_error_is_called_again_immediately(
    cluster: Cluster, waiter: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology, "PROBE_MS", 1)
    node = cluster.clients[cluster.owner(cluster.slot("mail"))]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waiter.wait, pop(9_000), 9_000, lambda: None)
        wait_until(lambda: blocked(cluster, cluster.owner(cluster.slot("mail"))) == 1, what="the blocked call")
        clients: Any = node.client_list()
        node.client_kill_filter(_id=next(client["id"] for client in clients if client["cmd"] == "bzpopmin"))
        with pytest.raises(BrokerUnavailableError):
            waiting.result(5)
    assert waiter.run(command("EXISTS", KEYS.marker)) == 0


def blocked(cluster: Cluster, number: int) -> int:
    info: Any = cluster.clients[number].info("clients")
    return int(info["blocked_clients"])


# --- queues, results and events ---------------------------------------------------------------------------------------


@pytest.fixture
def app(cluster: Cluster) -> Iterator[App]:
    app = App("shop", cluster.broker_url)
    yield app
    app.close()


def names(cluster: Cluster) -> Sequence[str]:
    return cluster.queues(each=2)


def test_a_queue_on_every_node_can_be_used(cluster: Cluster, app: App) -> None:
    for name in names(cluster):
        with Queue(name, cluster.broker_url) as queue:
            jobs = [queue.add("work", {"n": n}) for n in range(3)]
            assert queue.get_waiting_count() == 3
            assert [job.data for job in queue.get_waiting()] == [{"n": 0}, {"n": 1}, {"n": 2}]
            queue.pause()
            assert queue.is_paused()
            queue.resume()
            jobs[0].remove()
            assert queue.get_job(jobs[0].id) is None
            assert queue.get_workers() == []
            queue.obliterate()
            assert queue.get_waiting_count() == 0


async def test_an_asyncio_queue_on_every_node_can_be_used(cluster: Cluster) -> None:
    for name in names(cluster):
        async with AsyncQueue(name, cluster.broker_url) as queue:
            await queue.add("work", {"n": 1})
            assert await queue.get_waiting_count() == 1
            assert await queue.get_workers() == []


def test_results_of_jobs_on_all_nodes_can_be_awaited(cluster: Cluster, app: App) -> None:
    results = [app.send_task("work", queue=name) for name in names(cluster)]
    for result, name in zip(results, names(cluster), strict=True):
        finish(cluster, app, name, result.id)
    assert [result.get(timeout=10) for result in results] == [{"ok": True}] * len(results)


async def test_results_of_jobs_on_all_nodes_can_be_awaited_with_asyncio(cluster: Cluster, app: App) -> None:
    results = [await app.asend_task("work", queue=name) for name in names(cluster)]
    waiting = asyncio.gather(*(result.aget(timeout=10) for result in results))
    await asyncio.sleep(0)
    for result, name in zip(results, names(cluster), strict=True):
        await asyncio.to_thread(finish, cluster, app, name, result.id)
    assert await waiting == [{"ok": True}] * len(results)
    await app.aclose()


def finish(cluster: Cluster, app: App, name: str, job_id: str) -> None:
    """Complete a job as a worker does."""
    queue = app.queue(name)
    job = queue.get_next_job("token")
    assert job is not None
    assert job.id == job_id
    job.move_to_completed({"ok": True}, "token", fetch_next=False)


def test_events_of_queues_on_all_nodes_are_received(cluster: Cluster, app: App) -> None:
    for name in names(cluster):
        with QueueEvents(name, cluster.broker_url) as events, Queue(name, cluster.broker_url) as queue:
            stream = iter(events)
            with ThreadPoolExecutor(1) as pool:
                first = pool.submit(next, stream)
                wait_until(lambda queue=queue: len(queue.get_queue_events()) == 1, what="the reader")  # type: ignore[misc]
                job = queue.add("work", {})
                event = first.result(10)
            assert isinstance(event, JobEvent)
            assert event.job_id == job.id


@pytest.mark.parametrize("settings", [{"queue_hash_tag": False}])
def test_a_queue_without_a_hash_tag_is_rejected(cluster: Cluster, settings: dict[str, Any]) -> None:
    with (
        Queue("mail", cluster.broker_url, **settings) as queue,
        pytest.raises(BrokerConfigError, match=r"queue mail: .* queue_hash_tag=True, .* prefix='\{bull\}'"),
    ):
        queue.add("work", {})
    with Queue("mail", cluster.broker_url, prefix="{bull}", **settings) as queue:
        queue.add("work", {})
        assert queue.get_waiting_count() == 1


def test_a_node_that_hangs_does_not_delay_each_call_to_the_other_nodes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology, "_SILENT_MS", 1_000)
    client = ClusterClient(endpoint(cluster, timeout_ms=700), None)
    names = cluster.queues()
    calls: list[Call[Any]] = [command("LLEN", f"bull:{{{name}}}:wait") for name in names]
    assert client.try_many(calls) == [0, 0, 0]
    hung = cluster.servers[cluster.owner(cluster.slot(names[0]))]
    os.kill(hung.pid, signal.SIGSTOP)
    began_ms = mono_ms()
    try:
        for _ in range(30):
            lost, *others = client.try_many(calls)
            assert others == [0, 0]
            assert isinstance(lost, BrokerUnavailableError)
            assert lost.node == f"127.0.0.1:{hung.port}"
        took_ms = mono_ms() - began_ms
    finally:
        os.kill(hung.pid, signal.SIGCONT)
    assert took_ms < 30 * 700 / 3
    wait_until(lambda: client.try_many(calls) == [0, 0, 0], 20, "replies from the node that continues")
    client.close()


def test_the_settings_of_all_nodes_are_read(cluster: Cluster, client: ClusterClient) -> None:
    assert read_server_settings(client).eviction == "noeviction"
    for node in cluster.clients:
        node.config_set("maxmemory-policy", "allkeys-lru")
        assert read_server_settings(client).eviction == "allkeys-lru"
        node.config_set("maxmemory-policy", "noeviction")


def test_a_cluster_is_as_old_as_its_oldest_node(client: ClusterClient, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = [b"redis_version:7.2.4", b"redis_version:6.0.16", b"redis_version:8.0.1"]
    monkeypatch.setattr(client, "run_on_all_nodes", lambda call: [call.parse_reply(version) for version in versions])
    assert read_server_settings(client).version == (6, 0, 16)


def test_jobs_on_all_nodes_are_found_without_their_queue(cluster: Cluster) -> None:
    for name in cluster.queues():
        with Queue(name, cluster.broker_url) as queue:
            job = queue.add("send")
        shown = CliRunner().invoke(main, ["-b", cluster.broker_url, "job", "show", job.id])
        assert f"queue {name}" in shown.output
