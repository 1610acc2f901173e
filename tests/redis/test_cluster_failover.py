"""A replica takes over the slots of a node that has died: sends, results and events continue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bulltask import App
from bulltask.errors import BrokerNotReadyError, BrokerUnavailableError
from bulltask.queue import FlowJob
from bulltask.transport.call import Call, command
from bulltask.transport.cluster import ClusterClient
from tests.support.redis_cluster import Cluster

pytestmark = [pytest.mark.redis, pytest.mark.slow]

PATIENCE: dict[str, Any] = {
    "broker_publish_retries": 100,
    "broker_publish_timeout": 60,
    "broker_reconnect_delay_max": 1,
}


def test_sends_wait_for_replicas_and_survive_with_their_results_the_death_of_a_node(failover_cluster: Cluster) -> None:
    cluster = failover_cluster
    app = App("shop", cluster.broker_url, **PATIENCE)
    names = cluster.queues()
    dead = cluster.owner(cluster.slot(names[0]))
    send_with_replicas(cluster, names)
    client: Any = app._broker.client()
    assert isinstance(client, ClusterClient)
    calls: list[Call[Any]] = [command("LLEN", app._broker.keys(name).wait) for name in names]
    idle = ClusterClient(app._broker.endpoint, None)
    assert client.run_many(calls) == idle.run_many(calls) == [1, 1, 1]
    cluster.servers[dead].kill()
    (lost,) = [result for result in client.try_many(calls) if result != 1]
    assert isinstance(lost, BrokerUnavailableError)
    assert lost.node == f"127.0.0.1:{cluster.servers[dead].port}"
    results = [app.send_task("work", queue=name) for name in names]

    async def main() -> list[Any]:
        sent = [await app.asend_task("work", queue=name) for name in names]
        waiting = asyncio.gather(*(result.aget(timeout=60) for result in sent))
        await asyncio.to_thread(finish_jobs, app, names)
        values = await waiting
        await app.aclose()
        return values

    assert asyncio.run(main()) == [{"ok": True}] * 3
    assert [result.get(timeout=60) for result in results] == [{"ok": True}] * 3
    assert client.run_many(calls) == [0, 0, 0]
    idle.close_if_dead()  # as a pool does
    assert idle.run_many(calls) == [0, 0, 0], "a client that was idle learns of the new node without an error"
    client.close()
    idle.close()
    app.close()


def send_with_replicas(cluster: Cluster, names: list[str]) -> None:
    """Send a job to each queue and wait for replicas, after checking that this fails while one does not reply."""
    app = App("shop", cluster.broker_url, broker_publish_replicas=1, broker_publish_timeout=2, broker_publish_retries=0)
    jobs = [app.signature("work", queue=name) for name in names]
    app.send_many(jobs)
    primary = cluster.owner(cluster.slot(names[-1]))
    with cluster.stopped(cluster.replica_of(primary)):
        for has_scripts in (True, False):
            for send in (
                lambda: app.send_many(jobs),
                lambda: app.flows().add(FlowJob("work", names[-1])),
                lambda: asyncio.run(asend(app, names)),
            ):
                if not has_scripts:
                    for node in cluster.clients[:3]:
                        node.script_flush()
                with pytest.raises(BrokerNotReadyError, match="only 0 of 1 replicas"):
                    send()
    for name in names:
        app.queue(name).obliterate()
    app.send_many(jobs)
    app.close()


async def asend(app: App, names: list[str]) -> None:
    """Send a job to each queue."""
    try:
        await asyncio.gather(*(app.asend_task("work", queue=name) for name in names))
    finally:
        await app.aclose()


def finish_jobs(app: App, names: list[str]) -> None:
    """Complete three jobs of each queue, as workers do."""
    for name in names:
        for _ in range(3):
            job = app.queue(name).get_next_job("token")
            assert job is not None
            job.move_to_completed({"ok": True}, "token", fetch_next=False)
