"""In random sequences of redirects, rejections and lost nodes, no call of a cluster's client is executed twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import AskError, MovedError, RedisError, TryAgainError

from bulltask.errors import BrokerError, BrokerNotReadyError, BrokerUnavailableError
from bulltask.jobs.clock import mono_ms
from bulltask.transport.call import AllNodesCall, Call, command
from bulltask.transport.cluster import Batch, Rounds, Topology
from bulltask.transport.cluster_slots import Address, SlotMap, slot_of_key
from bulltask.transport.redis_errors import reply_error

NODES = [("a", 1), ("b", 2), ("c", 3)]
MAP = SlotMap((0, 5_000, 10_000), (4_999, 9_999, 16_383), tuple(NODES))
REPLIES = ("executed", "moved", "ask", "try again")
FATES = ("replies", "replies", "replies", "lost before", "lost after")


def error_reply(cause: RedisError) -> BrokerError:
    error = reply_error(cause, "redis://server")
    error.__cause__ = cause
    return error


class FakeNodes:
    """Nodes that execute calls, redirect them, or are unreachable, as drawn."""

    def __init__(self, data: st.DataObject) -> None:
        self._data, self._left = data, 20
        self.executed: dict[object, list[Address]] = {}

    def make(self, batch: Batch) -> list[Any] | BrokerError:
        fate = self._draw(FATES)
        if fate == "lost before":
            return BrokerUnavailableError("gone")
        results: list[Any] = []
        for routed in batch.routed:
            own = batch.calls[len(results) :][: len(routed.positions) + (routed.ask is not None)]
            results += self._group(own, batch.address)
        return results if fate == "replies" else BrokerUnavailableError("gone")

    def _group(self, calls: list[Call[Any]], address: Address) -> list[Any]:
        names = [call.args[-1] for call in calls]
        slot = slot_of_key(next((call.args[1] for call in calls if len(call.args) == 3), "none"))
        other = next(node for node in NODES if node != address)
        match self._draw(REPLIES):
            case "moved":
                return ["OK"] * (len(calls) - 1) + [error_reply(MovedError(f"{slot} {other[0]}:{other[1]}"))]
            case "ask" if len(calls) == 1:
                return [error_reply(AskError(f"{slot} {other[0]}:{other[1]}"))]
            case "try again":
                return [*["OK"] * (len(calls) - 1), error_reply(TryAgainError("TRYAGAIN Multiple keys"))]
            case _:
                for name in names:
                    self.executed.setdefault(name, []).append(address)
                return names

    def _draw(self, values: tuple[str, ...]) -> str:
        self._left -= 1
        return self._data.draw(st.sampled_from(values)) if self._left > 0 else values[0]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.data())
def test_every_result_belongs_to_its_call_and_no_call_is_executed_twice(keys: list[int], data: st.DataObject) -> None:
    topology, nodes = Topology([NODES[0]]), FakeNodes(data)
    calls: list[Call[Any]] = []
    for number, key in enumerate(keys):
        call: Call[Any] = command("SET", f"{{{key}}}", f"call {number}")
        calls += [command("MULTI"), call, command("EXEC")] if key % 3 == 0 else [call]
    rounds = Rounds(topology, calls, mono_ms() + 100_000_000, "redis+cluster://server")
    while True:
        topology.set(MAP)
        for batch in rounds.batches():
            rounds.record(batch, nodes.make(batch))
        if rounds.pause_ms() is None:
            break
    for call, result in zip(calls, rounds.results, strict=True):
        if call.args[0] != "SET":
            continue
        executed = nodes.executed.get(call.args[-1], [])
        if isinstance(result, BrokerUnavailableError):
            assert len(executed) <= 1
            assert result.node in {"a:1", "b:2", "c:3"}
        else:
            assert result == call.args[-1]
            assert len(executed) == 1


def test_a_call_to_every_node_merges_their_results_or_has_the_error_of_one() -> None:
    topology = Topology([NODES[0]])
    topology.set(MAP)
    call = AllNodesCall(command("CLIENT", "LIST"), "+".join)
    rounds = Rounds(topology, [call], mono_ms() + 10_000, "redis+cluster://server")
    for batch in rounds.batches():
        rounds.record(batch, [batch.address[0]])
    assert rounds.pause_ms() is None
    assert rounds.results == ["a+b+c"]
    rounds = Rounds(topology, [call], mono_ms() + 10_000, "redis+cluster://server")
    for batch in rounds.batches():
        rounds.record(batch, BrokerUnavailableError("gone") if batch.address == NODES[1] else [batch.address[0]])
    (error,) = rounds.results
    assert isinstance(error, BrokerUnavailableError)
    assert error.node == "b:2"


def test_a_slot_without_a_node_is_awaited_until_the_deadline() -> None:
    topology = Topology([NODES[0]])
    topology.set(SlotMap((0,), (10,), (NODES[0],)))
    rounds = Rounds(topology, [command("GET", "{mail}")], mono_ms() + 100_000, "redis+cluster://server")
    assert rounds.batches() == []
    assert rounds.pause_ms() == 10
    assert not topology.is_known
    topology.set(MAP)
    (batch,) = rounds.batches()
    rounds.record(batch, ["value"])
    assert rounds.pause_ms() is None
    assert rounds.results == ["value"]
    rounds = Rounds(topology, [command("GET", "{mail}")], mono_ms(), "redis+cluster://server")
    topology.set(SlotMap((0,), (10,), (NODES[0],)))
    assert rounds.batches() == []
    assert rounds.pause_ms() is None
    assert isinstance(rounds.results[0], BrokerNotReadyError)


def test_without_waiting_only_the_calls_for_a_slot_in_trouble_fail_and_immediately() -> None:
    gone = MAP.starts.index(10_000)
    topology = Topology([NODES[0]])
    topology.set(SlotMap(MAP.starts[:gone], MAP.ends[:gone], MAP.addresses[:gone]))
    names = [f"{{{number}}}" for number in range(30)]
    calls: list[Call[Any]] = [command("GET", name) for name in names]
    rounds = Rounds(topology, calls, mono_ms() + 100_000, "redis+cluster://server", waits=False)
    for batch in rounds.batches():
        moving = batch.address == NODES[0]
        reply: Any = error_reply(TryAgainError("TRYAGAIN Multiple keys")) if moving else b"value"
        rounds.record(batch, [reply] * len(batch.calls))
    assert rounds.pause_ms() is None
    for name, result in zip(names, rounds.results, strict=True):
        slot = slot_of_key(name)
        if 5_000 <= slot < 10_000:
            assert result == b"value"
        else:
            assert isinstance(result, BrokerNotReadyError)
            assert result.node == ("a:1" if slot < 5_000 else f"slot {slot}")


def test_an_error_before_any_call_is_raised_and_later_it_is_the_result_of_the_calls_that_remain() -> None:
    topology = Topology([NODES[0]])
    topology.set(MAP)
    error = BrokerUnavailableError("no node replies")
    rounds = Rounds(topology, [command("GET", "{mail}"), command("GET", "{news}")], mono_ms() + 10_000, "redis://x")
    with pytest.raises(BrokerUnavailableError, match="no node replies"):
        rounds.fail(error)
    first, second = rounds.batches()
    rounds.record(first, ["value"])
    rounds.record(second, [error_reply(TryAgainError("TRYAGAIN Multiple keys"))])
    rounds.fail(error)
    assert rounds.results == ["value", error]
    assert rounds.pause_ms() is None


def test_calls_for_a_node_that_refuses_the_connection_go_to_the_node_that_has_replaced_it() -> None:
    topology = Topology([NODES[0]])
    rounds = Rounds(topology, [command("GET", "{mail}")], mono_ms() + 10_000, "redis+cluster://server")
    topology.set(MAP)
    (batch,) = rounds.batches()
    rounds.record(batch, refused())
    assert rounds.pause_ms() == 0
    assert not topology.is_known
    topology.set(SlotMap((0,), (16_383,), (NODES[2],)))
    (batch,) = rounds.batches()
    assert batch.address == NODES[2]
    rounds.record(batch, ["value"])
    assert rounds.pause_ms() is None
    assert rounds.results == ["value"]


def test_a_node_that_refuses_the_connection_and_is_not_replaced_is_an_error() -> None:
    topology = Topology([NODES[0]])
    rounds = Rounds(topology, [command("GET", "{mail}")], mono_ms() + 10_000, "redis+cluster://server")
    topology.set(MAP)
    (batch,) = rounds.batches()
    rounds.record(batch, refused())
    topology.set(MAP)
    assert rounds.batches() == []
    assert rounds.pause_ms() is None
    (error,) = rounds.results
    assert isinstance(error, BrokerUnavailableError)
    assert error.node == "a:1"
    assert not error.refused, "a caller should not give up immediately: a replica may take over"


def refused() -> BrokerUnavailableError:
    error = BrokerUnavailableError("connection refused")
    error.refused = True
    return error
