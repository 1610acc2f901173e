"""The ACL grants that ``bulltask.spark.acl`` lists are sufficient in a Redis Cluster with TLS."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import pytest

from bulltask.errors import BrokerAuthError
from bulltask.jobs.job import JobOptions, NewJob
from bulltask.queue import Queue
from bulltask.spark.acl import READER, WRITER
from bulltask.spark.source.connection import Connection, broker_of
from bulltask.spark.source.options import WriteOptions, read_options
from bulltask.transport.permissions import Grants
from bulltask.transport.scripts.add import IdempotentWrite
from bulltask.transport.scripts.queue import state_size
from tests.support.certificates import Certificates
from tests.support.fake_query import FakeQuery
from tests.support.queue_contents import add
from tests.support.redis_cluster import Cluster

pytestmark = [pytest.mark.redis, pytest.mark.slow]

MakeUser = Callable[..., str]


@pytest.fixture
def cluster(tls_cluster: Cluster) -> Cluster:
    return tls_cluster


@pytest.fixture
def user(cluster: Cluster, certificates: Certificates) -> Iterator[MakeUser]:
    """Create a user on all nodes, optionally without one grant; return a URL with credentials and certificates."""
    name = f"spark-{secrets.token_hex(4)}"

    def make(grants: Grants, *, without: str = "") -> str:
        rules = [rule for rule in grants.rules(cluster=True) if rule != f"+{without}"]
        for client in cluster.clients:
            assert client.execute_command("ACL", "SETUSER", name, "reset", "on", ">secret", *rules)
        return f"rediss://{name}:secret@localhost:{cluster.tls_ports[0]}/0?{certificates.query()}"

    yield make
    for client in cluster.clients:
        client.acl_deluser(name)


@pytest.fixture
def queues(cluster: Cluster) -> list[str]:
    """A queue with five jobs on each node."""
    names = cluster.queues(1)
    for name in names:
        with Queue(name, cluster.broker_url) as queue:
            add(queue, 5)
    return names


def options(url: str) -> WriteOptions:
    return read_options(WriteOptions, {"url": url})


def test_a_reader_reads_from_all_nodes_over_tls(user: MakeUser, queues: list[str]) -> None:
    query = FakeQuery(user(READER), queue="*")
    query.run_until_idle()
    assert sorted(row["queue"] for row in query.rows if row["event"] == "added") == sorted(queues * 5)


def test_a_writer_writes_to_all_nodes_over_tls(user: MakeUser, queues: list[str], cluster: Cluster) -> None:
    broker = broker_of(options(user(WRITER)).config)
    try:
        jobs = [NewJob(name, f"s{number}", "send", b"{}", JobOptions()) for name in queues for number in range(3)]
        assert [job.status for job in broker.producer.send_once(jobs, IdempotentWrite("w1", 60_000))] == ["added"] * 9
    finally:
        broker.close()
    assert [cluster.client_of(name).llen(f"bull:{{{name}}}:wait") for name in queues] == [8, 8, 8]


@pytest.mark.parametrize("grants", [READER, WRITER], ids=["reader", "writer"])
def test_readers_and_writers_need_the_command_cluster_slots(user: MakeUser, queues: list[str], grants: Grants) -> None:
    url = user(grants, without="cluster|slots")
    with Connection(options(url).config) as connection, pytest.raises(BrokerAuthError, match=r"\+cluster\|slots"):
        connection.run(state_size(options(url).keys(queues[0]), "wait"))


def test_a_reader_needs_the_command_asking_while_a_slot_moves(
    user: MakeUser, cluster: Cluster, queues: list[str]
) -> None:
    slot = cluster.slot(queues[0])
    target = (cluster.owner(slot) + 1) % 3
    cluster.begin_move(slot, target)
    cluster.move_keys(slot, target)
    try:
        for without in ("asking", ""):
            url = user(READER, without=without)
            with Connection(options(url).config) as connection:
                call = state_size(options(url).keys(queues[0]), "wait")
                if without:
                    with pytest.raises(BrokerAuthError, match=r"Grant it: .* \+asking"):
                        connection.run(call)
                else:
                    assert connection.run(call) == 5
    finally:
        cluster.end_move(slot, target)
