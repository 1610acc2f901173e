"""A rolling deploy: workers and senders with the old and the new version of an app run side by side.

docs/how-to/rolling-deploys.md has a row for each change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from bulltask import App, AsyncResult, JobState, chord, group
from bulltask.errors import InvalidJobError
from tests.support.machine_load import scale_to_load
from tests.support.payloads import ENCRYPTION_KEY, FIRST_KEY, OTHER_ENCRYPTION_KEY
from tests.support.streams import server_ms
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

OLD = """
import sys
sys.modules["zstandard"] = None  # not installed
from dataclasses import dataclass
from datetime import date

@dataclass
class Order:
    id: int

@app.task(name="orders.charge")
def charge(x): return "old"

@app.task(name="default_added")
def default_added(x): return "old"

@app.task(name="added")
def added(x): return "old"

@app.task(name="removed")
def removed(x, y): return "old"

@app.task(name="retyped")
def retyped(x: date): return "old"

@app.task(name="field_added")
def field_added(order: Order): return "old"

@app.task(name="pickled")
def pickled(x): return "old"

@app.task(name="compressed")
def compressed(x): return "old"

@app.task(name="secret", queue="secret")
def secret(x): return "old"

@app.task(name="requeued", queue="first")
def requeued(x): return "old"
"""
NEW = """
from dataclasses import dataclass
from uuid import UUID

@dataclass
class Order:
    id: int
    total: int = 0

@app.task(name="billing.charge")
def charge(x): return "new"

app.task(name="orders.charge")(charge.function)

@app.task(name="default_added")
def default_added(x, y=0): return "new"

@app.task(name="added")
def added(x, y): return "new"

@app.task(name="removed")
def removed(x): return "new"

@app.task(name="retyped")
def retyped(x: UUID): return "new"

@app.task(name="field_added")
def field_added(order: Order): return "new"

@app.task(name="pickled", serializer="cloudpickle")
def pickled(x): return "new"

@app.task(name="compressed", compression="zstd")
def compressed(x): return "new"

@app.task(name="secret", queue="secret")
def secret(x): return "new"

@app.task(name="requeued", queue="second")
def requeued(x): return "new"
"""
SOURCES = {"old": OLD, "new": NEW}
LONG = "a" * 5_000
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "old": {"payload_encryption_keys": {"secret": [ENCRYPTION_KEY]}},
    "new": {
        "payload_encryption_keys": {"secret": [OTHER_ENCRYPTION_KEY, ENCRYPTION_KEY]},
        "accept_content": ["json", "cloudpickle"],
        "payload_signing_keys": [FIRST_KEY],
    },
}
UUID_1, DAY_1 = "00000000-0000-0000-0000-000000000001", "2026-01-01"
CALLS: Mapping[str, Mapping[str, tuple[dict[str, Any], str]]] = {
    "old": {
        "orders.charge": ({"x": 1}, ""),
        "default_added": ({"x": 1}, ""),
        "added": ({"x": 1}, "missing a required argument: 'y'"),
        "removed": ({"x": 1, "y": 2}, "unexpected keyword argument 'y'"),
        "retyped": ({"x": DAY_1}, "x: expected"),
        "field_added": ({"order": {"id": 1}}, ""),
        "pickled": ({"x": 1}, ""),
        "compressed": ({"x": LONG}, ""),
        "secret": ({"x": 1}, ""),
    },
    "new": {
        "billing.charge": ({"x": 1}, "task 'billing.charge' is not registered"),
        "default_added": ({"x": 1, "y": 2}, "unexpected keyword argument 'y'"),
        "added": ({"x": 1, "y": 2}, "unexpected keyword argument 'y'"),
        "removed": ({"x": 1}, "missing a required argument: 'y'"),
        "retyped": ({"x": UUID_1}, "x: expected"),
        "field_added": ({"order": {"id": 1, "total": 2}}, "order: expected Order"),
        "pickled": ({"x": 1}, "serialized with 'cloudpickle', which this app does not accept"),
        "compressed": ({"x": LONG}, "cannot be decompressed"),
        "secret": ({"x": 1}, "encrypted with key 'e2'"),
    },
}
"""The calls that senders of each version make, and why workers of the other version cannot run their jobs, if so."""
QUEUES = {"old": "default,secret,first", "new": "default,secret,first,second"}


def sender(harness: WorkerHarness, version: str) -> App:
    """Return an app with the tasks of a version."""
    app = harness.sender(**SETTINGS[version])
    variables: dict[str, Any] = {"app": app, "__name__": "tested"}
    source = SOURCES[version].replace('sys.modules["zstandard"] = None', "")
    exec(compile(source, "tested.py", "exec", dont_inherit=True), variables)
    app.task(name="quick")(lambda: None)
    return app


def worker(harness: WorkerHarness, version: str, **settings: Any) -> Any:
    """Start a worker with the tasks of a version."""
    source = SOURCES[version] + f"\napp.conf.update({ {**SETTINGS[version], **settings}!r})\n"
    return harness.worker(source, children=1, options=["-Q", QUEUES[version]])


def send(app: App, version: str) -> dict[str, list[AsyncResult[Any]]]:
    """Make every call of a version: at once, delayed, and as the body of a chord."""
    jobs = {}
    for name, (kwargs, _) in CALLS[version].items():
        call = app.tasks[name].si(**{**kwargs, **typed(app, name, kwargs)})
        header = app.tasks["quick"].si()
        jobs[name] = [call.apply_async(), call.apply_async(countdown=0.1), chord(group([header]), call).apply_async()]
    return jobs


def send_maps(app: App, version: str) -> list[AsyncResult[Any]]:
    """Send jobs that call a task of a version several times."""
    if version == "old":
        return [app.tasks["added"].map([1]).apply_async()]
    return [app.tasks["billing.charge"].map([1]).apply_async(), app.tasks["added"].starmap([(1, 2)]).apply_async()]


def typed(app: App, name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return those arguments that are not JSON."""
    hints = app.tasks[name].function.__annotations__
    return {
        key: hint(value)
        if key == "x" and hint.__name__ == "UUID"
        else hint.fromisoformat(value)
        if key == "x"
        else hint(**value)
        for key, value in kwargs.items()
        if (hint := hints.get(key)) is not None
    }


@pytest.mark.parametrize(("first", "second"), [("old", "new"), ("new", "old")])
def test_jobs_that_one_version_cannot_run_wait_for_the_other(harness: WorkerHarness, first: str, second: str) -> None:
    running = worker(harness, first)
    apps = {version: sender(harness, version) for version in (first, second)}
    jobs = send(apps[second], second)

    def result(job: AsyncResult[Any]) -> Any:
        return apps["new"].result(job.id, queue=job.queue).get(timeout=60)  # the old version cannot read all results

    for name, (_, reason) in CALLS[second].items():
        for job in jobs[name]:
            if not reason:
                assert result(job) == first
                continue
            line = running.wait_for_line("Job incompatible", job_id=job.id)[0]
            assert (line["level"], line["task"], line["queue"]) == ("warning", name, job.queue)
            assert reason in line["reason"]
            key = harness.keys_of(job.queue).job(job.id)
            assert reason in str(harness.redis.hget(key, "failedReason"))
            assert job.state in {JobState.DELAYED, JobState.WAITING, JobState.ACTIVE}
            assert harness.redis.hget(key, "atm") in {None, "0"}, "the attempt does not count"
    maps = send_maps(apps[second], second)
    for job in maps:
        running.wait_for_line("Job incompatible", job_id=job.id)
    held = harness.hold()  # the first worker has one child
    harness.wait_for_start(held)
    waiting = [job for name, (_, reason) in CALLS[second].items() if reason for job in jobs[name]]
    worker(harness, second)
    assert [result(job) for job in waiting] == [second] * len(waiting)
    assert [result(job) for job in maps] == [[second]] * len(maps)
    harness.open_gate()
    assert held.get(timeout=60) == "gate"
    assert not running.logged("Job failed")


def test_jobs_in_the_queue_of_the_other_version_wait_for_its_worker(harness: WorkerHarness) -> None:
    worker(harness, "old")
    moved = sender(harness, "new").tasks["requeued"].delay(1)
    before = sender(harness, "old").tasks["requeued"].delay(1)
    assert before.get(timeout=60) == "old"
    assert moved.state is JobState.WAITING
    worker(harness, "new")
    assert moved.get(timeout=60) == "new"
    assert not harness.redis.exists(harness.keys_of("second").incompatible)


def test_a_worker_makes_only_jobs_of_its_tasks_due(harness: WorkerHarness) -> None:
    harness.worker(children=1)
    other = harness.app.send_task("in_a_third_version", kwargs={"x": 1})
    job = harness.app.send_task("billing.charge", kwargs={"x": 1})
    for waiting in (other, job):
        harness.wait_for_event("delayed", waiting)
        since_ms = server_ms(harness.redis) - 40_000
        harness.redis.hset(harness.keys.job(waiting.id), "bulltask:incompatible", f"0:{since_ms}")
        harness.wait_for_event("delayed", waiting, 2)  # for 41 s
    delayed_ms = harness.redis.zscore(harness.keys.delayed, other.id)
    held = harness.hold()
    harness.wait_for_start(held)
    new = worker(harness, "new")
    assert new.wait_for_line("Jobs that waited for this worker are due")[0]["jobs"] == 1
    assert job.get(timeout=scale_to_load(10)) == "new"
    assert harness.redis.zscore(harness.keys.delayed, other.id) == delayed_ms
    assert harness.redis.zrange(harness.keys.incompatible, 0, -1) == [other.id]
    harness.open_gate()


def test_an_incompatible_job_fails_after_the_timeout_with_its_reason(harness: WorkerHarness) -> None:
    running = worker(harness, "old", incompatible_timeout=0.5)
    job = sender(harness, "new").tasks["removed"].delay(1)
    with pytest.raises(InvalidJobError, match=r"missing a required argument: 'y' \(no worker could run it for 0.5 s"):
        job.get(timeout=60)
    running.wait_for_line("Job incompatible", job_id=job.id)
    running.wait_for_line("Job failed", job_id=job.id, category="permanent")
