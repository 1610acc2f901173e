"""Where the secrets of a running worker do not appear: the process list, Redis' list of clients, metrics, its log."""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from bulltask.embedded.server import pick_port
from bulltask.testing.worker import RedisServer
from tests.support.payloads import ENCRYPTION_KEY, FIRST_KEY
from tests.support.processes import parent_of
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

PASSWORD = "s3cr3t-password"
TASKS = """
@app.task(name="fails", max_retries=0)
def fails():
    raise OSError(app.conf.broker_url.get_secret_value())
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_secrets_of_a_worker_are_not_visible_from_outside(
    harness_on: Callable[[str], WorkerHarness],
    server_factory: Callable[..., RedisServer],
    method: str,
) -> None:
    server, port = server_factory(password=PASSWORD), pick_port()
    harness = harness_on(server.url)
    environ = {
        "BULLTASK_PAYLOAD_SIGNING_KEYS": FIRST_KEY,
        "BULLTASK_PAYLOAD_ENCRYPTION_KEYS": f'{{"*": "{ENCRYPTION_KEY}"}}',
    }
    settings = {"worker_start_method": method, "metrics_port": port, "accept_content": "json,cloudpickle"}
    worker = harness.worker(TASKS, children=1, settings=settings, environ=environ, fresh=True)
    job = harness.app.send_task("fails")
    with pytest.raises(Exception, match="redis://"):
        job.get(timeout=60)
    worker.send(signal.SIGUSR1)
    worker.wait_for_line("Stacks", count=2)
    pids = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    family = [worker.pid, *(pid for pid in pids if parent_of(pid) == worker.pid), server.pid]
    assert len(family) >= 4
    files = [Path(f"/proc/{pid}/{name}") for pid in family for name in ("cmdline", "comm")]
    shown = {str(file): file.read_text() for file in files}
    shown["clients"] = str(harness.redis.execute_command("CLIENT", "LIST"))
    shown["metrics"] = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    assert worker.stop() == 0
    shown["log"] = worker.log
    secrets = [PASSWORD, *(key.partition(":")[2] for key in (FIRST_KEY, ENCRYPTION_KEY))]
    assert [(place, secret) for place, text in shown.items() for secret in secrets if secret in text] == []
