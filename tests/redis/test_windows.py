"""Programs on Windows send jobs, wait for them, and operate queues; a worker says what to use instead.

A new interpreter removes what Windows lacks (:mod:`tests.support.windows`), and then imports bulltask.
"""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys

import pytest

import bulltask
from tests.support.programs import ROOT

pytestmark = [pytest.mark.redis, pytest.mark.slow]

NOT_IMPORTED = (
    # Only the processes of a worker import these.
    "bulltask.observe.metrics",
    "bulltask.worker.child",
    "bulltask.worker.child",
    "bulltask.worker.spawned",
    "bulltask.worker.child",
    "bulltask.worker.run",
    "bulltask.worker.supervisor.",
    # These need Django's settings, or Spark, or run a command.
    "bulltask.contrib.django.",
    "bulltask.outbox.django.",
    "bulltask.spark.",
    "bulltask.__main__",
)

PROGRAM = """
import asyncio, importlib, json, signal, sys
from concurrent.futures import ThreadPoolExecutor

from tests.support.windows import simulate_windows

url, modules = sys.argv[1], json.loads(sys.argv[2])
simulate_windows(lambda: [importlib.import_module(name) for name in modules])
assert not any(name.startswith("bulltask.") for name in sys.modules)
for name in modules:
    importlib.import_module(name)

from click.testing import CliRunner

from bulltask import App, chain
from bulltask.cli.main import main
from bulltask.errors import BulltaskError
from bulltask.config.process import stop_signals
from bulltask.testing import InlineWorker, use_server


def run(*arguments):
    done = CliRunner().invoke(main, ["-b", url, *arguments])
    return done.exit_code, done.output.strip()


app = App("desk", url)


@app.task(name="add")
def add(x: int, y: int) -> int:
    return x + y


@app.task(name="aadd")
async def aadd(x: int, y: int) -> int:
    return x + y


with use_server(app, url), ThreadPoolExecutor() as pool:
    worker = InlineWorker(app)
    sent = [add.delay(1, 2), chain(add.s(1, 2), add.s(3)).delay(), *aadd.delay_many([(1, 1), (2, 2)])]
    values = [pool.submit(result.get, 60) for result in sent]
    worker.run_jobs()
    received = [value.result() for value in values]


async def send():
    result = await add.adelay(5, 5)
    state = await app.aqueue("default").get_job_state(result.id)
    await app.aclose()
    return result.id, state


job_id, state = asyncio.run(send())
queue = app.queue("default")
queue.add("add", {"x": 1, "y": 2}, job_id="own")
with stop_signals() as wait_for_stop:
    signal.raise_signal(signal.SIGINT)
    wait_for_stop()
errors = []
for other in ("unix:///run/redis.sock", "embedded://"):
    try:
        App("other", other).queue("default").get_job_counts("waiting")
    except BulltaskError as exc:
        errors.append(str(exc))
print(json.dumps({
    "sent": received,
    "eager": [add.apply((2, 2)).get(), aadd.apply((3, 3)).get()],
    "state": str(state),
    "counts": queue.get_job_counts("waiting", "completed"),
    "works": [run("job", "show", job_id), run("revoke", job_id), run("acl", "sender", "--queue", "default")],
    "refused": [run("-A", "any", "worker"), run("server")],
    "errors": errors,
}))
"""


def test_everything_but_a_worker_works_without_what_windows_lacks(broker_url: str) -> None:
    every = (module.name for module in pkgutil.walk_packages(bulltask.__path__, "bulltask."))
    modules = [name for name in every if not f"{name}.".startswith(NOT_IMPORTED)]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, broker_url, json.dumps(modules)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["sent"] == [3, 6, 2, 4]
    assert found["eager"] == [4, 6]
    assert (found["state"], found["counts"]["waiting"]) == ("waiting", 2)
    succeeded, failed = ([code for code, _ in found[which]] for which in ("works", "refused"))
    assert (succeeded, failed) == ([0, 0, 0], [1, 1])
    assert "revoked: the job has failed and will not run" in found["works"][1][1]
    assert [output.count("\n") for _, output in found["refused"]] == [0, 0]
    assert "run it in WSL 2 or in a Linux container" in found["refused"][0][1]
    assert "bulltask cannot start a server on Windows" in found["refused"][1][1]
    assert [error[:23] for error in found["errors"]] == ["unix:///run/redis.sock:", "bulltask cannot start a"]
