"""How calls get to the nodes of a cluster, without one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import TryAgainError

from bulltask.errors import BrokerError, BrokerNotReadyError, BrokerUnavailableError
from bulltask.transport import cluster
from bulltask.transport.call import Call, command
from bulltask.transport.cluster import ClusterClient
from bulltask.transport.cluster_slots import SlotMap
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.faults import reply_error

LEFT, RIGHT = ("127.0.0.1", 7001), ("127.0.0.1", 7002)
MAP = SlotMap((0, 5_000), (4_999, 16_383), (LEFT, RIGHT))
MAIL, NEWS = "{mail}", "{news}"  # slots 4,247 and 5,161


class Nodes:
    """Both nodes: which were asked what, and what they say instead of their port."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []
        self.faults: list[tuple[int, str, BrokerError]] = []

    def answer(self, port: int, call: Call[Any]) -> Any:
        name = str(call.args[0])
        self.asked.append((port, name))
        for fault in self.faults:
            if fault[:2] == (port, name):
                self.faults.remove(fault)
                return fault[2]
        return MAP if name == "CLUSTER" else f"{name} of {port}"


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    made = Nodes()

    class Node:
        def __init__(self, endpoint: Endpoint, _: object) -> None:
            self.port = endpoint.address[1]
            self.set_deadline: Callable[[object], None] = lambda _: None

        def run(self, call: Call[Any]) -> Any:
            (result,) = self.try_many([call])
            if isinstance(result, BrokerError):
                raise result
            return result

        def try_many(self, calls: list[Call[Any]]) -> list[Any]:
            return [made.answer(self.port, call) for call in calls]

    monkeypatch.setattr(cluster, "Client", Node)
    return made


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(cluster, "threading", SimpleNamespace(Event=lambda: SimpleNamespace(wait=found.append)))
    return found


@pytest.fixture
def client(nodes: Nodes) -> ClusterClient:
    return ClusterClient(Endpoint(f"redis://127.0.0.1:{LEFT[1]}/0", 1_000, 5_000), None)


def try_again() -> BrokerError:
    fault = TryAgainError("TRYAGAIN multiple keys")
    error = reply_error(fault, "redis://there")
    error.__cause__ = fault
    return error


def test_each_call_goes_to_the_node_of_its_key_and_results_are_in_order(client: ClusterClient) -> None:
    calls: list[Call[Any]] = [command("GET", NEWS), command("TTL", MAIL), command("TYPE", NEWS), command("INFO")]
    assert client.run_many(calls) == ["GET of 7002", "TTL of 7001", "TYPE of 7002", "INFO of 7001"]
    assert client.run(command("GET", MAIL)) == "GET of 7001"


def test_a_call_to_a_node_returns_what_that_node_says(client: ClusterClient) -> None:
    assert client.run_at(RIGHT, command("INFO")) == "INFO of 7002"
    assert client.nodes() == {LEFT: MAP, RIGHT: MAP}


@pytest.mark.parametrize("fault", [BrokerNotReadyError("LOADING"), BrokerUnavailableError("gone")])
def test_the_map_comes_from_the_next_node_if_one_does_not_serve(
    client: ClusterClient, nodes: Nodes, fault: BrokerError
) -> None:
    client.run_many([command("GET", MAIL), command("GET", NEWS)])
    nodes.faults = [(LEFT[1], "CLUSTER", fault)]
    nodes.asked.clear()
    client._map = None
    assert client.run(command("GET", NEWS)) == "GET of 7002"
    assert nodes.asked == [(7001, "CLUSTER"), (7002, "CLUSTER"), (7002, "GET")]


def test_a_call_that_no_node_can_serve_yet_is_repeated_after_longer_and_longer_pauses(
    client: ClusterClient, nodes: Nodes, pauses: list[float]
) -> None:
    nodes.faults = [(LEFT[1], "GET", try_again()) for _ in range(3)]
    assert client.run(command("GET", MAIL)) == "GET of 7001"
    first = cluster._FIRST_PAUSE_MS / 1000
    assert pauses == [first, 2 * first, 4 * first]


def test_a_cluster_without_a_node_that_answers_is_an_error(client: ClusterClient, nodes: Nodes) -> None:
    nodes.faults = [(LEFT[1], "CLUSTER", BrokerUnavailableError("gone"))]
    with pytest.raises(BrokerUnavailableError, match="gone"):
        client.run(command("GET", MAIL))
