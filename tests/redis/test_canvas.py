"""What a canvas stores, and which canvases are rejected before anything is stored."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from bulltask import App, GroupResult, Signature, chain, chord, group, signature
from bulltask.errors import ConfigError, PermanentError
from bulltask.events import Bus
from bulltask.jobs.names import REVOKED
from bulltask.registry.canvas import Canvas
from bulltask.testing.worker import RedisServer
from bulltask.worker.recovery import FailureRecorder
from tests.support.flaky_proxy import FlakyProxy

pytestmark = pytest.mark.redis


class Calls:
    """An app's tasks."""

    def __init__(self, url: str) -> None:
        self.app = app = App("canvas", url)

        @app.task(name="add")
        def add(x: int, y: int) -> int:
            return x + y

        @app.task(name="total")
        def total(numbers: list[int]) -> int:
            return sum(numbers)

        self.add, self.total = add, total


@pytest.fixture
def calls(broker_url: str) -> Iterator[Calls]:
    calls = Calls(broker_url)
    yield calls
    calls.app.close()


def stored(client: redis.Redis, job_id: str) -> dict[str, Any]:
    fields: Any = client.hgetall(f"bull:{{default}}:{job_id}")
    return {name: json.loads(fields[name]) for name in ("data", "opts", "parent") if name in fields}


@pytest.mark.every_topology
def test_a_chord_is_a_parent_whose_children_have_ids_with_their_positions(
    calls: Calls, redis_client: redis.Redis
) -> None:
    result = (group(calls.add.s(1, 1), calls.add.s(2, 2)) | calls.total.s()).delay()
    body = stored(redis_client, result.id)
    assert body["data"] == {}
    assert body["opts"]["bulltask"]["canvas"] == {"to": "numbers", "shape": "2"}
    assert redis_client.smembers(f"bull:{{default}}:{result.id}:dependencies") == {
        f"bull:{{default}}:{result.id}.{index}" for index in (0, 1)
    }
    member = stored(redis_client, f"{result.id}.1")
    assert member["data"] == {"x": 2, "y": 2}
    assert "canvas" not in member["opts"]["bulltask"]
    assert member["parent"]["fpof"] is True
    assert [job.id for job in result.parent] == [f"{result.id}.0", f"{result.id}.1"]


async def test_a_signature_without_callbacks_is_sent_in_one_round_trip(calls: Calls, redis_client: redis.Redis) -> None:
    calls.add.delay(0, 0)  # writes the queue's meta
    before: Any = redis_client.info("commandstats")
    signature = calls.add.s(1, 1).set(countdown=60)
    results = [signature.delay(), signature.apply_async(priority=3), await signature.aapply_async()]
    after: Any = redis_client.info("commandstats")
    assert after.get("cmdstat_multi") == before.get("cmdstat_multi"), "no transaction"
    assert [redis_client.hget(f"bull:{{default}}:{result.id}", "delay") for result in results] == ["60000"] * 3
    await calls.app.aclose()


def test_all_jobs_of_a_fan_out_are_stored_when_it_is_sent(calls: Calls, redis_client: redis.Redis) -> None:
    result = (calls.add.s(1, 1) | group(calls.add.s(1), calls.add.s(2))).delay()
    assert redis_client.zcard("bull:{default}:waiting-children") == 3
    dependents = {f"bull:{{default}}:{job.id}" for job in result}
    dependencies: list[Any] = [redis_client.smembers(f"{key}:dependencies") for key in dependents]
    (fan_out,) = {key for keys in dependencies for key in keys}
    assert redis_client.hget(fan_out, "name") == "bulltask.fan_out"
    assert set(json.loads(str(redis_client.hget(fan_out, "data")))["dependents"]) == dependents
    assert redis_client.smembers(f"{fan_out}:dependencies") == {f"bull:{{default}}:{result.parent.id}"}


@pytest.mark.every_topology
@pytest.mark.parametrize("ending", ["completed", "failed", "killed", "revoked"])
def test_dependents_are_ready_in_the_step_that_finishes_their_fan_out_job(
    calls: Calls, redis_client: redis.Redis, ending: str
) -> None:
    result = (calls.add.s(1, 1) | group(calls.add.s(1), calls.add.s(2))).delay()
    queue, broker = calls.app.queue("default"), calls.app._broker
    first = queue.get_next_job("t")
    assert first is not None
    fan_out = first.move_to_completed(2, fetch_next=True)
    assert fan_out is not None
    assert fan_out.name == "bulltask.fan_out"
    if ending == "completed":
        fan_out.move_to_completed(2, fetch_next=True)
    elif ending == "failed":
        fan_out.move_to_failed(PermanentError("no"))
    else:  # the supervisor has killed the child that was running it
        client, reason = broker.client(), REVOKED if ending == "revoked" else "killed"
        recorder = FailureRecorder(client, broker.clock, calls.app._config, Bus())
        recorder.fail(broker.keys("default"), "t", fan_out.id, reason)
        client.close()
    assert redis_client.lrange("bull:{default}:wait", 0, -1) == [job.id for job in result]
    failure = None if ending == "completed" else f"child {fan_out.key} failed"
    for job in result:
        assert redis_client.hget(f"bull:{{default}}:{job.id}", "defa") == failure


def test_an_invalid_canvas_is_rejected_before_anything_is_stored(calls: Calls, redis_client: redis.Redis) -> None:
    add = calls.add
    anything: Any = add

    def with_option(**options: Any) -> Callable[[], Any]:
        return (add.s(1, 1).set(**options) | add.s(1)).delay

    callback = calls.app.signature("e", link=add.s(1))
    rejected: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: anything.s(1, 2, 3), TypeError, "too many positional arguments"),
        (lambda: anything.s(z=1), TypeError, "unexpected keyword argument 'z'"),
        (lambda: anything.s(1).delay(), TypeError, "missing a required argument: 'y'"),
        ((anything.s(1, 2) | anything.s(1, 2)).delay, TypeError, "too many positional"),
        (chain([]).delay, TypeError, "at least one step"),
        (lambda: chain().link(add.s(1)), TypeError, "at least one step"),
        (lambda: group([5]), TypeError, "consists of signatures"),  # type: ignore[list-item]
        (group([anything]).delay, TypeError, "missing a required argument"),
        (lambda: anything.s(1, 2) | anything, TypeError, "consists of signatures"),
        (lambda: anything.starmap([(1,)]), TypeError, "missing a required argument"),
        (with_option(deduplication="x"), ConfigError, "cannot be deduplicated"),
        (with_option(ignore_dependency_on_failure=True), ConfigError, "cannot have the option 'idof'"),
        (with_option(parent={"id": "1", "queue": "q"}), ConfigError, "is followed by another step"),
        (lambda: group(add.s(1, 1).set(job_id="a"), add.s(1, 2).set(job_id="a")).delay(), ConfigError, "different id"),
        (lambda: add.s(1, 1).on_error(callback).delay(), ConfigError, "cannot have callbacks"),
        (lambda: anything.s(1, 1).set(link=5), TypeError, "consists of signatures"),
    ]
    for send, error, message in rejected:
        with pytest.raises(error, match=message):
            send()
    assert redis_client.keys() == []


def test_a_frozen_canvas_has_the_announced_ids_the_first_time_it_is_sent(
    calls: Calls, redis_client: redis.Redis
) -> None:
    add, total = calls.add, calls.total

    def ids(result: Any) -> set[str]:
        own = {result.id} | {found for member in getattr(result, "results", ()) for found in ids(member)}
        return own | (set() if result.parent is None else ids(result.parent))

    canvases: list[Canvas[Any, Any]] = [
        add.s(1, 1),
        add.s(1, 1) | add.s(2) | add.s(3),
        group(add.s(1, 1), add.s(2, 2) | add.s(3)),
        chord([add.s(1, 1), add.s(2, 2)], total.s() | add.s(1)),
        add.s(1, 1) | group(add.s(1), add.s(2)) | total.s(),
        add.s(1, 1) | group(add.s(1), add.s(2)),
    ]
    for canvas in canvases:
        assert canvas.id is None
        frozen: Any = canvas.freeze()
        assert canvas.freeze().id == frozen.id == canvas.id
        sent: Any = canvas.delay()
        single = {result for result in ids(frozen) if redis_client.exists(f"bull:{{default}}:{result}")}
        assert len(single) == len(list(canvas.calls()))
        assert sent.id == frozen.id
        again: Any = canvas.delay()
        assert not ids(again) & ids(sent)
    callback = total.s()
    linked = group(add.s(1, 1), add.s(2, 2))
    linked.link(callback)
    frozen = callback.freeze()
    assert {key.rpartition(":")[2] for key in parents(redis_client, linked.delay())} == {frozen.id}
    assert (add.s(1, 1) | add.s(2)).apply_async(job_id="last").id == "last"
    assert chain([add.s(1, 1), add.s(2)], task_id="other").delay().id == "other"
    assert group(add.s(1, 1)).set(job_id="group").delay().id == "group"
    assert add.s(1, 1).freeze("given").id == "given"


def parents(client: redis.Redis, group_result: Any) -> set[str]:
    return {str(client.hget(f"bull:{{default}}:{member.id}", "parentKey")) for member in group_result}


def test_an_empty_group_is_saved_and_restored(calls: Calls) -> None:
    empty: GroupResult[Any] = group().delay()
    empty.save()
    restored = GroupResult.restore(empty.id, calls.app)
    assert restored == empty
    assert restored.get() == []
    restored.delete()
    assert GroupResult.restore(empty.id, calls.app) is None


def test_the_ids_of_a_group_contain_the_step_before_it_once(calls: Calls) -> None:
    result = (calls.add.s(1, 1) | group(calls.add.s(1), calls.add.s(2))).delay()
    members = [[[member.id, None], None] for member in result]
    assert result.as_tuple() == [[result.id, [[result.parent.id, None], None]], members]


def test_a_handle_equals_its_id(calls: Calls) -> None:
    result = group(calls.add.s(1, 1), calls.add.s(2, 2)).delay()
    ids = [f"{result.id}.{index}" for index in (0, 1)]
    assert [job_id in result.results for job_id in (*ids, result.id)] == [True, True, False]
    assert set(ids) == set(result.results)


def test_the_types_of_a_canvas_are_those_of_celery(calls: Calls) -> None:
    add, total = calls.add, calls.total
    types: dict[str, Any] = {"signature": Signature, "chain": chain, "group": group, "chord": chord}
    expected: list[tuple[Canvas[Any, Any], set[str]]] = [
        (add.s(1), {"signature"}),
        (add.s(1, 1) | add.s(1), {"signature", "chain"}),
        (group(add.s(1)), {"signature", "group"}),
        (chord([add.s(1, 1)], total.s()), {"signature", "chain", "chord"}),
        (chord(add.s(1, 1), total.s()), {"signature", "chain", "chord"}),
        (group(add.s(1, 1)) | total.s() | add.s(1), {"signature", "chain", "chord"}),
        (add.s(1, 1) | group(add.s(1)), {"signature", "chain"}),
    ]
    for canvas, names in expected:
        assert {name for name, kind in types.items() if isinstance(canvas, kind)} == names
        assert canvas == canvas.clone()
        assert hash(canvas) == hash(canvas.clone())
        assert canvas != add.s(7)
        assert signature(dict(canvas)) == canvas
    header, body = [add.s(1, 1), add.s(2, 2)], total.s()
    assert (chord(header, body).tasks, chord(header, body).body) == (header, body)
    with pytest.raises(TypeError):
        iter(add.s(1))  # type: ignore[call-overload]


@pytest.mark.slow
def test_a_group_of_ten_thousand_is_stored_in_one_step(
    calls: Calls, redis_client: redis.Redis, record_property: Callable[[str, object], None]
) -> None:
    started = time.monotonic()
    result = (group(calls.add.s(n, n) for n in range(10_000)) | calls.total.s()).delay()
    record_property("seconds", round(time.monotonic() - started, 2))
    record_property("bytes", redis_client.info("memory")["used_memory"])
    assert redis_client.llen("bull:{default}:wait") == 10_000
    assert redis_client.scard(f"bull:{{default}}:{result.id}:dependencies") == 10_000


def test_a_canvas_is_stored_once_even_if_the_reply_is_lost(
    redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    with FlakyProxy("127.0.0.1", redis_server.port) as proxy:
        calls = Calls(f"redis://{proxy.host}:{proxy.port}/0")
        calls.add.s(1, 1).delay()
        proxy.drop_replies(1, match="EXEC")
        result = (calls.add.s(1, 1) | group(calls.add.s(1), calls.add.s(2)) | calls.total.s()).delay()
        calls.app.close()
    assert redis_client.llen("bull:{default}:wait") == 2
    assert redis_client.zcard("bull:{default}:waiting-children") == 4
    assert redis_client.exists(f"bull:{{default}}:{result.id}")


def test_skew_delays_the_members_of_a_group_more_and_more(app: App) -> None:
    @app.task(name="item")
    def item(value: int) -> int:
        return value

    def countdowns(group: Any) -> list[Any]:
        return [member.given["countdown"] for member in group.members]

    chunks = item.chunks([(number,) for number in range(5)], 1)
    assert countdowns(chunks.group().skew(start=1, stop=3)) == [1, 2, 3, 3, 3]
    assert countdowns(group(item.s(1), item.s(2), item.s(3)).skew(step=0.5)) == [1.0, 1.5, 2.0]
