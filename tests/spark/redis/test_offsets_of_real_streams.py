"""Offsets of real streams that are trimmed, emptied, deleted and created again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from bulltask.spark.source.connection import Connection
from bulltask.spark.source.offsets import (
    BEGINNING,
    START,
    LossReason,
    QueueOffset,
    StreamState,
    first_offset,
    reconcile,
)
from bulltask.spark.source.options import JobsOptions, read_options
from bulltask.spark.source.streams import read_states

pytestmark = pytest.mark.redis

EVENTS = "bull:{mail}:events"


@pytest.fixture
def state(broker_url: str) -> Iterator[Callable[[], StreamState | None]]:
    """Ask the server for the facts of the queue's stream."""
    options = read_options(JobsOptions, {"queue": "mail", "url": broker_url}, {})
    with Connection(options.config) as connection:
        yield lambda: read_states(connection, [options.keys("mail")])[0]


@pytest.fixture
def add(redis_client: redis.Redis) -> Callable[[int], list[Any]]:
    """Add so many entries; returns their ids."""

    def added(count: int) -> list[Any]:
        return [redis_client.xadd(EVENTS, {"event": "added"}) for _ in range(count)]

    return added


def still_behind(client: redis.Redis, position: QueueOffset) -> int:
    return len(client.xrange(EVENTS, f"({position.id}") or ())


def test_what_a_trim_takes_is_counted_to_the_entry(
    redis_client: redis.Redis, add: Callable[[int], list[Any]], state: Callable[[], StreamState | None]
) -> None:
    add(10)
    read = first_offset(state(), "latest")
    add(10)
    redis_client.xtrim(EVENTS, maxlen=13, approximate=False)
    assert reconcile("mail", read, state()) == (read, None)
    redis_client.xtrim(EVENTS, maxlen=3, approximate=False)
    settled, gap = reconcile("mail", read, state())
    assert gap is not None
    assert (gap.lost, gap.reason, settled.ordinal, settled.lost) == (7, LossReason.TRIMMED, 17, 7)
    assert still_behind(redis_client, settled) == 3
    redis_client.xtrim(EVENTS, maxlen=0, approximate=False)
    emptied, gap = reconcile("mail", settled, state())
    assert gap is not None
    assert (gap.lost, gap.first, emptied.ordinal, emptied.lost) == (3, None, 20, 10)
    assert reconcile("mail", emptied, state()) == (emptied, None)
    add(1)
    assert reconcile("mail", emptied, state()) == (emptied, None)


def test_a_start_with_the_oldest_entry_leaves_nothing_out_and_counts_nothing_as_lost(
    redis_client: redis.Redis, add: Callable[[int], list[Any]], state: Callable[[], StreamState | None]
) -> None:
    assert first_offset(state(), "earliest") == START
    add(10)
    redis_client.xtrim(EVENTS, maxlen=4, approximate=False)
    begun = first_offset(state(), "earliest")
    assert (begun.ordinal, begun.lost, still_behind(redis_client, begun)) == (6, 0, 4)
    assert reconcile("mail", begun, state()) == (begun, None)


@pytest.mark.parametrize("again", [1, 5, 9])
def test_a_stream_that_was_deleted_and_made_again_is_another_one(
    again: int, redis_client: redis.Redis, add: Callable[[int], list[Any]], state: Callable[[], StreamState | None]
) -> None:
    add(5)
    read = first_offset(state(), "latest")
    redis_client.delete(EVENTS)
    gone, gap = reconcile("mail", read, state())
    assert gap is not None
    assert (gone, gap.reason) == (QueueOffset(BEGINNING, 0, 0, 1), LossReason.GONE)
    redis_client.xadd(EVENTS, {"event": "added"}, id=f"{read.id.ms + 1}-0")  # the clock may stand in the same ms
    add(again - 1)
    anew, gap = reconcile("mail", read, state())
    assert gap is not None
    assert (anew, gap.reason, gap.exact) == (QueueOffset(BEGINNING, 0, 0, 1), LossReason.RECREATED, False)


def test_entries_deleted_by_hand_end_the_counting_and_nothing_else(
    redis_client: redis.Redis, add: Callable[[int], list[Any]], state: Callable[[], StreamState | None]
) -> None:
    add(5)
    read = first_offset(state(), "latest")
    redis_client.xdel(EVENTS, add(5)[2])
    settled, gap = reconcile("mail", read, state())
    assert (settled, gap) == (QueueOffset(read.id, None), None)
