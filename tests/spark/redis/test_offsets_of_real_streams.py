"""Offsets are reconciled with real streams that are trimmed, emptied, deleted and recreated."""

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
    """Return a function that reads the state of the queue's stream."""
    options = read_options(JobsOptions, {"queue": "mail", "url": broker_url}, {})
    with Connection(options.config) as connection:
        yield lambda: read_states(connection, [options.keys("mail")])[0]


@pytest.fixture
def add(redis_client: redis.Redis) -> Callable[[int], list[Any]]:
    """Return a function that adds entries and returns their ids."""

    def add_entries(count: int) -> list[Any]:
        return [redis_client.xadd(EVENTS, {"event": "added"}) for _ in range(count)]

    return add_entries


def entries_left(client: redis.Redis, position: QueueOffset) -> int:
    return len(client.xrange(EVENTS, f"({position.id}") or ())


def test_trimmed_entries_are_counted_exactly(
    redis_client: redis.Redis, add: Callable[[int], list[Any]], state: Callable[[], StreamState | None]
) -> None:
    add(10)
    read = first_offset(state(), "latest")
    add(10)
    redis_client.xtrim(EVENTS, maxlen=13, approximate=False)
    assert reconcile("mail", read, state()) == (read, None)
    redis_client.xtrim(EVENTS, maxlen=3, approximate=False)
    reconciled, gap = reconcile("mail", read, state())
    assert gap is not None
    assert (gap.lost, gap.loss_reason, reconciled.ordinal, reconciled.lost) == (7, LossReason.TRIMMED, 17, 7)
    assert entries_left(redis_client, reconciled) == 3
    redis_client.xtrim(EVENTS, maxlen=0, approximate=False)
    emptied, gap = reconcile("mail", reconciled, state())
    assert gap is not None
    assert (gap.lost, gap.first_id_after, emptied.ordinal, emptied.lost) == (3, None, 20, 10)
    assert reconcile("mail", emptied, state()) == (emptied, None)
    add(1)
    assert reconcile("mail", emptied, state()) == (emptied, None)


def test_a_start_at_the_oldest_entry_reads_all_and_counts_the_entries_trimmed_before(
    redis_client: redis.Redis, add: Callable[[int], list[Any]], state: Callable[[], StreamState | None]
) -> None:
    assert first_offset(state(), "earliest") == START
    add(10)
    redis_client.xtrim(EVENTS, maxlen=4, approximate=False)
    start = first_offset(state(), "earliest")
    assert (start.missed, entries_left(redis_client, start)) == (6, 4)
    reconciled, gap = reconcile("mail", start, state())
    assert gap is not None
    assert (gap.lost, gap.loss_reason) == (6, LossReason.TRIMMED_BEFORE_START)
    assert reconcile("mail", reconciled, state()) == (reconciled, None)


@pytest.mark.parametrize("entries", [1, 5, 9])
def test_a_recreated_stream_is_read_in_a_new_generation(
    entries: int, redis_client: redis.Redis, add: Callable[[int], list[Any]], state: Callable[[], StreamState | None]
) -> None:
    add(5)
    read = first_offset(state(), "latest")
    redis_client.delete(EVENTS)
    deleted, gap = reconcile("mail", read, state())
    assert gap is not None
    assert (deleted, gap.loss_reason) == (QueueOffset(BEGINNING, 0, 0, 1), LossReason.STREAM_DELETED)
    redis_client.xadd(EVENTS, {"event": "added"}, id=f"{read.id.ms + 1}-0")  # the clock may still be in the same ms
    add(entries - 1)
    recreated, gap = reconcile("mail", read, state())
    assert gap is not None
    assert (recreated, gap.loss_reason, gap.exact) == (
        QueueOffset(BEGINNING, 0, 0, 1),
        LossReason.STREAM_RECREATED,
        False,
    )


def test_manually_deleted_entries_only_disable_counting(
    redis_client: redis.Redis, add: Callable[[int], list[Any]], state: Callable[[], StreamState | None]
) -> None:
    add(5)
    read = first_offset(state(), "latest")
    redis_client.xdel(EVENTS, add(5)[2])
    reconciled, gap = reconcile("mail", read, state())
    assert (reconciled, gap) == (QueueOffset(read.id, None), None)
