"""Calls are sent to the right nodes of a fake cluster."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import AskError, MovedError, ReadOnlyError, ResponseError, TryAgainError

from bulltask.errors import BrokerError, BrokerNotReadyError, BrokerUnavailableError
from bulltask.transport import cluster
from bulltask.transport.call import Call, command
from bulltask.transport.cluster import ClusterClient
from bulltask.transport.cluster_slots import SlotMap
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.redis_errors import reply_error

LEFT, RIGHT = ("127.0.0.1", 7001), ("127.0.0.1", 7002)
MAP = SlotMap((0, 5_000), (4_999, 16_383), (LEFT, RIGHT))
MAIL, NEWS = "{mail}", "{news}"  # slots 4,247 and 5,161


class Nodes:
    """Two fake nodes. They record calls and reply with their port, or with an error that a test has set."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str]] = []
        self.errors: list[tuple[int, str, BrokerError]] = []

    def reply(self, port: int, call: Call[Any]) -> Any:
        name = str(call.args[0])
        self.calls.append((port, name))
        for planned in self.errors:
            if planned[:2] == (port, name):
                self.errors.remove(planned)
                return planned[2]
        return MAP if name == "CLUSTER" else f"{name} of {port}"


class Node:
    """The client of a fake node."""

    def __init__(self, nodes: Nodes, endpoint: Endpoint) -> None:
        self.nodes, self.port = nodes, endpoint.address[1]
        self.set_deadline: Callable[[object], None] = lambda _: None
        self.receive: Callable[[int], list[None]] = lambda count: [None] * count

    def run(self, call: Call[Any]) -> Any:
        (result,) = self.try_many([call])
        if isinstance(result, BrokerError):
            raise result
        return result

    def try_many(self, calls: list[Call[Any]]) -> list[Any]:
        return [self.nodes.reply(self.port, call) for call in calls]

    def wait_many(self, calls: list[Call[Any]], _wait_ms: int, _ping: object) -> list[Any]:
        return self.try_many(calls)

    def send(self, _: list[bytes]) -> None:
        self.nodes.calls.append((self.port, "send"))
        for port, name, error in self.nodes.errors:
            if (port, name) == (self.port, "send"):
                raise error

    def results(self, calls: list[Call[Any]], _: list[None]) -> list[Any]:
        return self.try_many(calls)

    def close(self) -> None:
        self.nodes.calls.append((self.port, "close"))

    def close_if_dead(self) -> None:
        self.nodes.calls.append((self.port, "close_if_dead"))


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    fake = Nodes()
    monkeypatch.setattr(cluster, "Client", lambda endpoint, *_: Node(fake, endpoint))
    return fake


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waits: list[float] = []
    event = SimpleNamespace(wait=waits.append, clear=lambda: None)
    monkeypatch.setattr(cluster, "threading", SimpleNamespace(Event=lambda: event))
    return waits


@pytest.fixture
def client(nodes: Nodes, pauses: list[float]) -> ClusterClient:
    return ClusterClient(Endpoint(f"redis://127.0.0.1:{LEFT[1]}/0", 1_000, 5_000), None)


def try_again() -> BrokerError:
    return error_reply(TryAgainError("TRYAGAIN multiple keys"))


def moved_to(address: tuple[str, int]) -> BrokerError:
    return error_reply(MovedError(f"4247 {address[0]}:{address[1]}"))


def error_reply(cause: ResponseError) -> BrokerError:
    error = reply_error(cause, "redis://server")
    error.__cause__ = cause
    return error


def test_calls_go_to_the_node_of_their_key_and_results_keep_the_order(client: ClusterClient) -> None:
    calls: list[Call[Any]] = [command("GET", NEWS), command("TTL", MAIL), command("TYPE", NEWS), command("INFO")]
    assert client.run_many(calls) == ["GET of 7002", "TTL of 7001", "TYPE of 7002", "INFO of 7001"]
    assert client.run(command("GET", MAIL)) == "GET of 7001"


def test_run_at_sends_the_call_to_the_given_node(client: ClusterClient) -> None:
    assert client.run_at(RIGHT, command("INFO")) == "INFO of 7002"
    assert client.nodes() == {LEFT: MAP, RIGHT: MAP}


@pytest.mark.parametrize("error", [BrokerNotReadyError("LOADING"), BrokerUnavailableError("gone")])
def test_the_slot_map_is_read_from_the_next_node_if_a_node_fails(
    client: ClusterClient, nodes: Nodes, error: BrokerError
) -> None:
    client.run_many([command("GET", MAIL), command("GET", NEWS)])
    nodes.errors = [(LEFT[1], "CLUSTER", error)]
    nodes.calls.clear()
    client._topology.forget()
    assert client.run(command("GET", NEWS)) == "GET of 7002"
    assert nodes.calls == [(7001, "CLUSTER"), (7002, "CLUSTER"), (7002, "GET")]


def test_a_call_is_retried_with_increasing_delays_after_tryagain(
    client: ClusterClient, nodes: Nodes, pauses: list[float]
) -> None:
    nodes.errors = [(LEFT[1], "GET", try_again()) for _ in range(3)]
    assert client.run(command("GET", MAIL)) == "GET of 7001"
    assert pauses == [0.01, 0.02, 0.04]
    assert nodes.calls == [(7001, "CLUSTER"), *[(7001, "GET")] * 4]


def test_the_slot_map_is_read_again_if_a_node_has_become_a_replica(
    client: ClusterClient, nodes: Nodes, pauses: list[float]
) -> None:
    nodes.errors = [(LEFT[1], "GET", error_reply(ReadOnlyError("READONLY You can't write against a replica")))]
    assert client.run(command("GET", MAIL)) == "GET of 7001"
    assert nodes.calls == [(7001, "CLUSTER"), (7001, "GET")] * 2
    assert pauses == [0.01]


def test_calls_are_sent_to_all_nodes_before_any_reply_is_read(client: ClusterClient, nodes: Nodes) -> None:
    client.run_many([command("GET", MAIL), command("GET", NEWS)])
    assert nodes.calls[1:] == [(7001, "send"), (7002, "send"), (7001, "GET"), (7002, "GET")]


def test_the_error_of_an_unreachable_node_names_it_and_is_the_result_of_its_calls_only(
    client: ClusterClient, nodes: Nodes
) -> None:
    calls: list[Call[Any]] = [command("GET", NEWS), command("GET", MAIL), command("TTL", NEWS)]
    nodes.errors = [(RIGHT[1], "send", BrokerUnavailableError("gone"))]
    first, second, third = client.try_many(calls)
    assert first is third
    assert isinstance(first, BrokerUnavailableError)
    assert first.node == "127.0.0.1:7002"
    assert second == "GET of 7001"
    nodes.errors.clear()
    nodes.calls.clear()
    assert client.run_many(calls) == ["GET of 7002", "GET of 7001", "TTL of 7002"]
    assert nodes.calls[0] == (7001, "CLUSTER"), "another node may have the slots now"


def test_a_call_without_keys_avoids_the_node_that_failed_last(client: ClusterClient, nodes: Nodes) -> None:
    nodes.errors = [(LEFT[1], "send", BrokerUnavailableError("gone"))]
    client.try_many([command("GET", NEWS), command("GET", MAIL)])
    nodes.calls.clear()
    assert client.run(command("PING")) == "PING of 7002"
    assert nodes.calls[0] == (7002, "CLUSTER")


def test_an_interrupt_closes_the_connections_with_unread_replies(client: ClusterClient, nodes: Nodes) -> None:
    client.run_many([command("GET", MAIL), command("GET", NEWS)])
    interrupt: Any = KeyboardInterrupt()
    nodes.errors = [(RIGHT[1], "send", interrupt)]
    nodes.calls.clear()
    with pytest.raises(KeyboardInterrupt):
        client.run_many([command("GET", MAIL), command("GET", NEWS)])
    assert nodes.calls == [(7001, "send"), (7002, "send"), (7001, "close"), (7002, "close")]


def test_a_transaction_whose_watched_key_moved_is_not_executed_on_the_new_node(
    client: ClusterClient, nodes: Nodes
) -> None:
    client.run_many([command("WATCH", MAIL), command("EXISTS", MAIL)])
    nodes.errors = [(LEFT[1], "MULTI", moved_to(RIGHT))]
    transaction: list[Call[Any]] = [command("MULTI"), command("DEL", MAIL), command("EXEC")]
    with pytest.raises(BrokerNotReadyError, match="slot 4247, with a watched key, is moving"):
        client.run_many(transaction)
    client.run_many([command("WATCH", MAIL), command("EXISTS", MAIL)])
    client._topology._moved[4_247] = LEFT
    with pytest.raises(BrokerNotReadyError, match="slot 4247, with a watched key, is moving"):
        client.run_many(transaction)
    client.run(command("WATCH", MAIL))
    client._topology._moved[4_247] = RIGHT
    assert client.run(command("UNWATCH")) == "UNWATCH of 7001"
    nodes.errors = [(RIGHT[1], "MULTI", moved_to(LEFT))]
    assert client.run_many(transaction)[-1] == "EXEC of 7001", "without a watched key, it is sent again"


def test_a_single_call_follows_a_moving_slot_without_a_pause(
    client: ClusterClient, nodes: Nodes, pauses: list[float]
) -> None:
    nodes.errors = [(LEFT[1], "GET", reply_error(AskError("4247 127.0.0.1:7002"), "redis://server"))]
    assert client.run(command("GET", MAIL)) == "GET of 7002"
    assert not pauses


def test_a_marker_is_not_lost_if_the_slot_moves_just_after_it_was_read(client: ClusterClient, nodes: Nodes) -> None:
    nodes.errors = [(LEFT[1], "GET", moved_to(RIGHT))]
    replies: tuple[Any, Any] = client.wait_then(command("BZPOPMIN", MAIL), command("GET", MAIL), 1_000, lambda: None)
    assert replies == ("BZPOPMIN of 7001", "GET of 7001")
    assert [name for _, name in nodes.calls].count("BZPOPMIN") == 1


def test_dead_connections_of_all_nodes_are_closed(client: ClusterClient, nodes: Nodes) -> None:
    client.run_many([command("GET", MAIL), command("GET", NEWS)])
    nodes.calls.clear()
    client.close_if_dead()
    assert nodes.calls == [(7001, "close_if_dead"), (7002, "close_if_dead")]


def test_an_unreachable_cluster_raises_broker_unavailable_error(client: ClusterClient, nodes: Nodes) -> None:
    nodes.errors = [(LEFT[1], "CLUSTER", BrokerUnavailableError("gone"))]
    with pytest.raises(BrokerUnavailableError, match="gone"):
        client.run(command("GET", MAIL))
