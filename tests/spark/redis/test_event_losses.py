"""A stream reader reports lost events with their exact number, as an error or as gap rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from bulltask.errors import EventsLostError
from tests.support.event_writing import fill
from tests.support.fake_query import FakeQuery

pytestmark = pytest.mark.redis

STREAM = "bull:{mail}:events"

Damage = Callable[[redis.Redis], list[str]]
"""Damages the stream; returns the ids of the entries that it added."""


def ids_left(client: redis.Redis) -> list[str]:
    entries: Any = client.xrange(STREAM)
    return [entry_id for entry_id, _ in entries]


def trim(client: redis.Redis) -> list[str]:
    client.xtrim(STREAM, 4, approximate=False)
    return []


def delete(client: redis.Redis) -> list[str]:
    client.delete(STREAM)
    return []


def obliterate(client: redis.Redis) -> list[str]:
    client.delete(STREAM, "bull:{mail}:meta")
    return []


def recreate(client: redis.Redis) -> list[str]:
    last_ms = int(ids_left(client)[-1].partition("-")[0])
    client.delete(STREAM)
    client.xadd(STREAM, {"event": "stalled"}, id=f"{last_ms + 1}-0")  # the clock may still be in the same millisecond
    fill(client, 2)
    return ids_left(client)


@dataclass(frozen=True)
class Case:
    """Damage to a stream of 20 events, 5 of which are read, and its expected report.

    Attributes:
        damage: The function that damages the stream.
        lost: The number of lost events.
        message: The part of the error message that describes the damage.
        loss_reason: The ``loss_reason`` in a gap row.
        exact: Whether ``lost`` is exact; otherwise it is a minimum.
    """

    damage: Damage
    lost: int
    message: str
    loss_reason: str
    exact: bool = True


BEFORE = [
    pytest.param(Case(trim, 11, "11 events lost (trimmed before they were read)", "trimmed"), id="trimmed"),
    pytest.param(
        Case(delete, 15, "at least 15 events lost (the stream was deleted)", "stream-deleted", exact=False),
        id="deleted",
    ),
    pytest.param(
        Case(obliterate, 15, "at least 15 events lost (the stream was deleted)", "stream-deleted", exact=False),
        id="obliterated",
    ),
    pytest.param(
        Case(
            recreate,
            15,
            "at least 15 events lost (the stream was deleted and created again)",
            "stream-recreated",
            exact=False,
        ),
        id="new",
    ),
]

BETWEEN = [
    pytest.param(
        Case(trim, 11, "11 events lost (trimmed between planning and reading)", "trimmed-during-read"), id="trimmed"
    ),
    pytest.param(
        Case(delete, 15, "15 events lost (trimmed between planning and reading)", "trimmed-during-read"), id="deleted"
    ),
    pytest.param(
        Case(recreate, 15, "15 events lost (trimmed between planning and reading)", "trimmed-during-read"), id="new"
    ),
]


def error(case: Case, after: str, client: redis.Redis) -> str:
    left = ids_left(client)
    rest = f"the first remaining event is {left[0]}" if left else "no event is left"
    return re.escape(
        f"[BULLTASK_EVENTS_LOST] queue={{mail}} last_id_before={after}: {case.message}, {rest}. "
        "To record the gap and continue, use on_loss='gap'"
    )


def gap_rows(query: FakeQuery) -> list[tuple[str, dict[str, Any]]]:
    """Return the ids and contents of the gap rows."""
    ids = [row["event_id"] for row in query.rows if row["event"] == "bulltask.gap"]
    return list(zip(ids, query.gaps(), strict=True))


def expected(case: Case, client: redis.Redis) -> dict[str, str]:
    left = ids_left(client)[:1]
    gap = {"lost": str(case.lost), "exact": str(case.exact).lower(), "loss_reason": case.loss_reason}
    return {**gap, "first_id_after": left[0]} if left else gap


@pytest.mark.parametrize("case", BEFORE)
def test_a_loss_before_planning_is_an_error_or_a_gap_row(
    broker_url: str, redis_client: redis.Redis, case: Case
) -> None:
    ids = fill(redis_client, 20)
    query = FakeQuery(broker_url, queue="*")
    query.batch(5)

    added = case.damage(redis_client)

    with pytest.raises(EventsLostError, match=f"^{error(case, ids[4], redis_client)}"):
        query.plan()
    gap = expected(case, redis_client)
    query.restart(failOnDataLoss="false", gapRows="true")
    query.run_until_idle()
    assert gap_rows(query) == [(ids[4], gap)]
    assert query.events() == ids[:5] + ([] if case.lost == 15 else ids[16:]) + added
    assert len(query.events()) + case.lost == len(ids) + len(added)


@pytest.mark.parametrize("case", BETWEEN)
def test_a_loss_between_planning_and_reading_is_an_error_or_a_gap_row(
    broker_url: str, redis_client: redis.Redis, case: Case
) -> None:
    ids = fill(redis_client, 20)
    query = FakeQuery(broker_url)
    query.batch(5)
    end = query.plan()
    (part,) = query.reader.partitions(query.offset, end)

    added = case.damage(redis_client)

    for read in (lambda: query.read(end), lambda: list(query.reader.read(part))):
        with pytest.raises(EventsLostError, match=f"^{error(case, ids[4], redis_client)}"):
            read()
    query.restart(failOnDataLoss="false", gapRows="true")
    late = [row for batch in query.reader.read(part) for row in batch.to_pylist()]
    query.rows += query.read(end)
    assert late == sorted(query.rows[5:], key=lambda row: bool(row["extra"])), "both reads report the same loss"
    assert gap_rows(query) == [(ids[4], expected(case, redis_client))]
    query.offset = end
    query.run_until_idle()
    assert query.events() == ids[:5] + ([] if case.lost == 15 else ids[16:]) + added
    assert len(query.events()) + sum(int(gap["lost"]) for gap in query.gaps()) == len(ids) + len(added)


def test_a_query_without_gap_rows_continues_after_a_loss(broker_url: str, redis_client: redis.Redis) -> None:
    ids = fill(redis_client, 20)
    query = FakeQuery(broker_url, failOnDataLoss="false")
    query.batch(5)
    trim(redis_client)
    query.run_until_idle()
    assert (query.events(), query.gaps()) == (ids[:5] + ids[16:], [])


def test_a_deleted_stream_is_reported_once_and_later_events_are_read(
    broker_url: str, redis_client: redis.Redis
) -> None:
    fill(redis_client, 20)
    query = FakeQuery(broker_url, failOnDataLoss="false", gapRows="true")
    query.run_until_idle()
    delete(redis_client)
    assert query.batch()
    assert not query.batch()
    late = fill(redis_client, 3)
    query.run_until_idle()
    # No unread entries are known, but there may have been some.
    assert [(gap["lost"], gap["exact"]) for gap in query.gaps()] == [("0", "false")]
    assert query.events()[20:] == late


def test_a_trim_before_the_first_batch_is_reported_after_a_restart(broker_url: str, redis_client: redis.Redis) -> None:
    ids = fill(redis_client, 20)
    query = FakeQuery(broker_url, failOnDataLoss="false", gapRows="true")
    end = query.plan()
    trim(redis_client)
    query.restart()  # Spark was killed, and had stored only the end offset of the batch
    query.offset = query.reader.initialOffset()
    rows = query.read(end)
    assert [row["event_id"] for row in rows if row["event"] != "bulltask.gap"] == ids[16:]
    assert [json.loads(row["extra"])["lost"] for row in rows if row["event"] == "bulltask.gap"] == ["16"]


@pytest.mark.parametrize("fails", [True, False])
def test_events_trimmed_before_the_query_began_are_a_gap_and_never_an_error(
    broker_url: str, redis_client: redis.Redis, fails: bool
) -> None:
    ids = fill(redis_client, 20)
    trim(redis_client)
    query = FakeQuery(broker_url, failOnDataLoss=str(fails).lower(), gapRows="true")
    query.run_until_idle()
    assert query.events() == ids[16:]
    gap = {"lost": "16", "exact": "true", "loss_reason": "trimmed-before-start", "first_id_after": ids[16]}
    assert gap_rows(query) == [("0-0", gap)]


def test_events_trimmed_since_the_query_began_are_an_error_in_the_first_batch(
    broker_url: str, redis_client: redis.Redis
) -> None:
    fill(redis_client, 20)
    redis_client.xtrim(STREAM, 10, approximate=False)
    query = FakeQuery(broker_url)
    trim(redis_client)
    with pytest.raises(EventsLostError, match=r"16 events lost .trimmed before they were read"):
        query.plan()


def test_entries_deleted_between_planning_and_reading_are_counted(broker_url: str, redis_client: redis.Redis) -> None:
    ids = fill(redis_client, 20)
    query = FakeQuery(broker_url, failOnDataLoss="false", gapRows="true")
    end = query.plan()
    redis_client.xdel(STREAM, *ids[5:8])
    query.rows = query.read(end)
    assert query.events() == ids[:5] + ids[8:]
    assert [(gap["lost"], gap["exact"]) for gap in query.gaps()] == [("3", "true")]
