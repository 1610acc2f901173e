"""The cluster of the tests: its clients, and moves of slots."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.support.redis_cluster import Cluster
from tests.support.server_clients import client_of

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.one_server]


def test_a_client_of_a_cluster_reads_and_writes_keys_on_all_nodes(cluster: Cluster) -> None:
    keys = {f"bull:{{{queue}}}:id" for queue in cluster.queues(each=2)}
    with client_of(cluster.broker_url, decode_responses=True) as client:
        for key in keys:
            client.set(key, 1)
        assert set(cast("list[str]", client.keys("*"))) == keys
        assert client.dbsize() == len(keys) == 6
        ids = [entry["id"] for entry in cast("list[Any]", client.client_list())]
        assert len(set(ids)) == len(ids) >= 6, "this client and the fixture have connections to three nodes"
        client.flushall()
    assert [node.dbsize() for node in cluster.clients] == [0, 0, 0]


@pytest.mark.parametrize("way", ["key by key", "at once"])
def test_a_slot_moves_with_its_keys_and_back(cluster: Cluster, way: str) -> None:
    if way == "at once" and not cluster.moves_atomically:
        pytest.skip("only Valkey 9 and newer move a slot at once")
    slot = cluster.slot("mail")
    source = cluster.owner(slot)
    with client_of(cluster.broker_url, decode_responses=True) as client:
        client.mset({f"bull:{{mail}}:{number}": number for number in range(100)})
        for target in ((source + 1) % 3, source):
            if way == "at once":
                cluster.move_atomically(slot, target)
            else:
                cluster.begin_move(slot, target)
                while cluster.move_keys(slot, target, 30):
                    assert client.get("bull:{mail}:99") == "99"
                cluster.end_move(slot, target)
            assert [node.dbsize() for node in cluster.clients] == [100 * (node == target) for node in range(3)]
            assert client.get("bull:{mail}:99") == "99"
