"""Ids of the queue's own keys, and arguments of the wrong type, are refused wherever they come in."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from bulltask import App, chain, chord, group
from bulltask.errors import ConfigError, InvalidNameError
from bulltask.queue import FlowProducer, Queue

pytestmark = pytest.mark.redis

OWN_KEYS = ("meta", "events", "id", "marker", "repeat:hourly", "repeat:a:b", "metrics:completed", "de:once", "j1:logs")


@pytest.fixture
def queue(broker_url: str) -> Iterator[Queue]:
    """A queue with a job, its log, a scheduler, and a deduplication id."""
    with Queue("mail", broker_url) as queue:
        queue.add("send", {}, job_id="j1", deduplication="once").log("line")
        queue.schedulers.upsert("hourly", name="send", every=3_600)
        queue.set_global_concurrency(2)
        yield queue


def contents(client: Any) -> dict[bytes, bytes]:
    return {key: client.dump(key) for key in client.scan_iter("bull*")}


def entrances(app: App, queue: Queue, job_id: str) -> dict[str, Callable[[], Any]]:
    """Return every call that takes the id of a job."""
    return {
        "result": lambda: app.result(job_id, "mail").forget(),
        "AsyncResult": lambda: app.AsyncResult(job_id),
        "control.revoke": lambda: app.control.revoke(job_id),
        "remove": lambda: queue.remove(job_id),
        "revoke": lambda: queue.revoke(job_id),
        "get_job": lambda: queue.get_job(job_id),
        "get_job_state": lambda: queue.get_job_state(job_id),
        "get_job_logs": lambda: queue.get_job_logs(job_id),
        "get_dependencies": lambda: queue.get_dependencies(job_id, "pending"),
        "update_job_progress": lambda: queue.update_job_progress(job_id, 1),
        "add_job_log": lambda: queue.add_job_log(job_id, "line"),
        "get_flow": lambda: FlowProducer("redis://127.0.0.1:1").get_flow("mail", job_id),
        "add": lambda: queue.add("send", job_id=job_id),
        "parent": lambda: queue.add("send", parent={"id": job_id, "queue": "mail"}),
        "send_task": lambda: app.send_task("send", queue="mail", job_id=job_id),
    }


@pytest.mark.parametrize("job_id", OWN_KEYS)
def test_the_name_of_a_key_that_belongs_to_the_queue_is_refused_as_the_id_of_a_job(
    app: App, queue: Queue, redis_client: redis.Redis, job_id: str
) -> None:
    before = contents(redis_client)
    for name, call in entrances(app, queue, job_id).items():
        with pytest.raises(InvalidNameError):
            pytest.fail(f"{name} accepts {job_id}: {call()}")
    assert contents(redis_client) == before


def test_ids_that_other_clients_choose_are_accepted(queue: Queue) -> None:
    for job_id in ("1", "repeat:hourly:1790000000000", "repeat:a:b:c:d:e:1790000000000", "orders:7:eu", "x" * 300):
        assert queue.get_job(job_id) is None
        assert queue.remove(job_id)


def plain_parameters(kind: type) -> Iterator[tuple[str, str, str]]:
    """Return the methods' parameters with plain hints."""
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_") and not inspect.isgeneratorfunction(method):
            for parameter in inspect.signature(method).parameters.values():
                hint = str(parameter.annotation).removesuffix(" | None")
                if hint in WRONG and parameter.kind is not parameter.VAR_POSITIONAL:
                    yield name, parameter.name, hint


WRONG = {"bool": ["false", 1, b""], "int": ["1", 1.5, True], "str": [5, b"x", ["a"]]}
VALUES = {"bool": True, "int": 1, "str": "failed", "Duration": 1, "Json": 1}


def test_every_method_of_queues_jobs_and_schedulers_refuses_values_of_another_type(
    queue: Queue, redis_client: redis.Redis
) -> None:
    job = queue.get_job("j1")
    before, count = contents(redis_client), 0
    for target in (queue, job, queue.schedulers, queue.repeatables, FlowProducer("redis://127.0.0.1:1")):
        for method, name, hint in plain_parameters(type(target)):
            function = getattr(target, method)
            required = {
                other.name: VALUES.get(str(other.annotation), "failed")
                for other in inspect.signature(function).parameters.values()
                if other.default is other.empty and other.kind not in {other.VAR_POSITIONAL, other.VAR_KEYWORD}
            }
            for value in [*WRONG[hint], "x" * 1_000 if hint != "str" else ["x" * 1_000]]:
                with pytest.raises((ConfigError, InvalidNameError), match=r"(?s)^.{,300}$"):
                    pytest.fail(f"{method}({name}={value!r:.20}): {function(**{**required, name: value})}")
                count += 1
    assert count > 150
    assert contents(redis_client) == before


@pytest.mark.parametrize(("name", "value"), [("count", -1), ("limit", -1), ("keep_logs", -1), ("max_length", -1)])
def test_counts_are_not_negative(queue: Queue, name: str, value: int) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "count": lambda: queue.retry_jobs(count=value),
        "limit": lambda: queue.clean(0, limit=value),
        "keep_logs": lambda: queue.add_job_log("j1", "line", keep_logs=value),
        "max_length": lambda: queue.trim_events(value),
    }
    with pytest.raises(ConfigError, match=f"^{name} must be 0 or more, not -1$"):
        calls[name]()


LONG = "x" * 10_000


def test_calls_and_canvases_refuse_what_celery_refuses(app: App, redis_client: redis.Redis) -> None:
    @app.task
    def add(x: object, y: object = 0) -> object:
        return x

    def calls_with(bad: Any) -> list[Callable[[], Any]]:
        calls: list[Callable[[], Any]] = [
            lambda: add.apply_async(bad),
            lambda: add.apply(bad),
            lambda: add.s(1).clone(bad),
            lambda: add.delay_many([bad]),
            lambda: add.starmap([bad]),
            lambda: add.chunks([bad], 1),
            lambda: app.send_task("other", bad),
            lambda: app.signature("other", bad),
            lambda: group(bad),
            lambda: chain(bad),
            lambda: chord(bad, add.s()),
            lambda: chord([add.s(1)], bad),
            lambda: add.s(1).link(bad),
            lambda: add.s(1).on_error(bad),
            lambda: (add.s(1) | add.s()).on_error(bad),
            lambda: add.s(1).set(immutable=bad),
            lambda: add.apply_async((1,), lifo=bad),
            lambda: add.s(1).set(ignore_result=bad),
        ]
        if not isinstance(bad, set):  # a set is iterable
            calls += [lambda: add.map(bad), lambda: add.delay_many(bad)]
        if not isinstance(bad, dict):
            calls += [lambda: add.apply_async((1,), bad), lambda: app.send_task("other", (), bad)]
        return calls

    calls = [
        call for bad in ("ab", b"ab", bytearray(b"ab"), {"x": 1, "y": 2}, 5, {"x"}, LONG) for call in calls_with(bad)
    ]
    sizes: tuple[Any, ...] = (-1, 0, 1.5, True, "1")
    calls += [functools.partial(add.chunks, [(1,)], size) for size in sizes]
    for number, call in enumerate(calls):
        with pytest.raises((TypeError, ValueError), match=r"(?s)^.{,400}$"):
            pytest.fail(f"{number}: {call()!r:.200}")
    assert contents(redis_client) == {}


def test_no_positional_arguments_may_be_given_as_none_as_in_celery(app: App) -> None:
    @app.task
    def add(x: int) -> int:
        return x

    assert add.apply(None, {"x": 1}).get() == 1  # type: ignore[arg-type]
    assert app.send_task("other", None, {"x": 1}).id  # type: ignore[arg-type]
