"""Pickled and encrypted payloads in real workers, whose keys come from the environment and from files."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bulltask import AsyncResult
from bulltask.jobs.payloads import ENVELOPE_KEY, Envelope, dump
from bulltask.testing.worker import wait_until
from tests.support.payloads import ENCRYPTION_KEY, FIRST_KEY, PICKLES, Refused, WritesFile
from tests.support.programs import ROOT
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
from tests.support.payloads import Refused

@app.task(name="call", serializer="cloudpickle")
def call(function, x):
    return function(x)

@app.task(name="fail", serializer="cloudpickle", max_retries=0)
def fail(code):
    raise Refused(code, {"set": {1, 2}})

@app.task(bind=True, name="wait", serializer="cloudpickle")
def wait(self, gates):
    record("start", job=self.request.id)
    for gate in gates:
        wait_at(gate)
    return gates
"""


def test_children_run_signed_pickles_and_encrypted_jobs_and_never_load_other_pickles(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text(json.dumps({"secret": ENCRYPTION_KEY}))
    environ = {
        "PYTHONPATH": str(ROOT),
        "BULLTASK_PAYLOAD_SIGNING_KEYS": FIRST_KEY,
        "BULLTASK_PAYLOAD_ENCRYPTION_KEYS_FILE": str(tmp_path / "keys"),
    }
    workers = [
        harness.worker(
            TASKS,
            children=children,
            environ=environ,
            settings={"accept_content": "json,cloudpickle", "worker_start_method": method, "lock_duration": 30},
            options=["-Q", queue],
        )
        for queue, method, children in [("secret", "spawn", 1), ("default", "fork", 2)]
    ]
    app = harness.sender(**PICKLES, payload_encryption_keys={"secret": ENCRYPTION_KEY})

    def send(name: str, *args: object, queue: str = "default") -> AsyncResult[Any]:
        return app.send_task(name, args, queue=queue, serializer="cloudpickle")

    killed = send("wait", {"gate"})
    os.kill(int(harness.wait_for_start(killed)["pid"]), signal.SIGKILL)
    for queue in ("default", "secret"):
        called = send("call", lambda x: {x, "secret"}, 1, queue=queue)
        assert called.get(timeout=60) == {1, "secret"}
        stored = harness.redis.hgetall(harness.keys_of(queue).job(called.id))
        payloads = [json.loads(stored[name])[ENVELOPE_KEY] for name in ("data", "returnvalue")]
        assert {payload.get("enc") for payload in payloads} == {"e1" if queue == "secret" else None}
        with pytest.raises(Refused) as caught:
            send("fail", 7, queue=queue).get(timeout=60)
        assert (caught.value.code, caught.value.details) == (7, {"set": {1, 2}})
        written = tmp_path / queue
        foreign = Envelope("cloudpickle", dump({"function": WritesFile(written), "x": 1}, "it"))
        bad = harness.app.queue(queue).add("call", json.loads(foreign.to_json()))
        with pytest.raises(Exception, match="is pickled but not signed"):
            app.result(bad.id, queue).get(timeout=60)
        assert not written.exists()
    harness.wait_for_start(killed, 2)
    harness.open_gate()
    assert killed.get(timeout=60) == {"gate"}
    for worker in workers:
        worker.send(signal.SIGTERM)
    for worker in workers:
        assert worker.wait() == 0
        assert not any(key.partition(":")[2] in worker.log for key in (FIRST_KEY, ENCRYPTION_KEY))


SECRET = "4242-4242-4242-4242"
MISMATCHES = """
import enum
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypedDict
from pydantic import BaseModel, field_validator

@dataclass
class Card:
    number: int

@dataclass
class Checked:
    number: str
    def __post_init__(self):
        raise ValueError(f"bad card {self.number}")

class Keys(TypedDict):
    number: int

class Model(BaseModel):
    number: str
    @field_validator("number")
    @classmethod
    def check(cls, value):
        raise ValueError(f"bad card {value}")

class BadJson:
    def __json__(self):
        raise ValueError("bad card 4242-4242-4242-4242")

def take(name, hint):
    def function(value):
        pass
    function.__annotations__ = {"value": hint}
    app.task(name=name, typed=True, max_retries=0)(function)

hints = (
    int, Card, Checked, dict[str, int], list[int], Literal["a"], datetime, Model, Card | int, Keys, tuple[int, int]
)
for index, hint in enumerate(hints):
    take(f"take {index}", hint)

@app.task(name="bind", max_retries=0)
def bind(value):
    pass

@app.task(name="keywords", typed=True, max_retries=0)
def keywords(**values: int):
    pass

@app.task(name="batch", typed=True, batch=2, max_retries=0)
def batch(jobs: list[BatchJob[int]]) -> None:
    pass

def give(name, value, hint):
    def function():
        return value
    function.__annotations__ = {"return": hint}
    app.task(name=name, typed=True, max_retries=0)(function)

secret = "4242-4242-4242-4242"
give("give int", secret, int)
give("give card", {"number": secret}, Card)
give("give key", {(secret,): 1}, Any)
give("give path", {secret: float("nan")}, Any)
give("give json", BadJson(), Any)
give("give model", {"number": secret}, Model)
give("give secret", secret, str)
give("give date", secret, datetime)

@app.task(name="send", max_retries=0)
def send():
    bind.delay({(secret,): 1})

@app.task(name="send typed", max_retries=0)
def send_typed():
    keywords.delay(value=secret)
"""


def test_no_error_of_an_encrypted_queue_shows_a_value(harness: WorkerHarness) -> None:
    keys = {"*": ENCRYPTION_KEY}
    worker = harness.worker(
        f"from bulltask import BatchJob\n{MISMATCHES}",
        environ={"PYTHONPATH": str(ROOT), "BULLTASK_PAYLOAD_ENCRYPTION_KEYS": json.dumps(keys)},
        settings={"incompatible_timeout": 0.5},  # in the reasons of incompatible jobs, too
    )
    app = harness.sender(payload_encryption_keys=keys)
    queue = app.queue("default")
    values = [SECRET, {"number": SECRET}, {SECRET: SECRET}, [SECRET], [1, SECRET]]
    sent: list[tuple[str, Any]] = [(f"take {index}", {"value": value}) for index in range(11) for value in values]
    sent += [(name, value) for name in ("bind", "keywords", "batch") for value in values]
    sent += [(f"give {name}", {}) for name in "int card key path json model secret date".split()]
    sent += [("send", {}), ("send typed", {})]
    jobs = [queue.add(name, data) for name, data in sent]
    wait_until(lambda: sum(queue.get_job_counts("completed", "failed").values()) == len(jobs))
    failed = {job.name for job in queue.get_failed()}
    assert failed >= {name for name, _ in sent} - {"bind", "give secret"}
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert "Job failed" in worker.log
    assert SECRET not in worker.log
    for kind, read in (("hash", harness.redis.hgetall), ("stream", harness.redis.xrange)):
        for key in harness.redis.scan_iter("bull*", _type=kind):
            assert SECRET not in str(read(key)), key
