"""A worker whose password changes while it runs loses no job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bulltask.testing.worker import RedisServer, wait_until
from bulltask.transport.permissions import role_grants
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process


def test_a_worker_continues_with_a_new_password_after_the_old_one_was_revoked(
    harness_on: Callable[[str], WorkerHarness], server_factory: Callable[..., RedisServer], tmp_path: Path
) -> None:
    server = server_factory()
    harness = harness_on(server.url)
    rules, password = role_grants(["worker"]).rules(), tmp_path / "password"

    def rotate(new: str) -> None:
        wait_until(lambda: connections() >= 2, 60, "connections with the old password")
        password.write_text(new)
        harness.redis.execute_command("ACL SETUSER", "worker", "reset", "on", f">{new}", *rules)
        assert harness.redis.client_kill_filter(user="worker") >= 1

    def connections() -> int:
        return sum(client["user"] == "worker" for client in harness.redis.client_list())

    password.write_text("first")
    harness.redis.execute_command("ACL SETUSER", "worker", "on", ">first", *rules)
    settings = {
        "broker_url": f"redis://worker@127.0.0.1:{server.port}/0",
        "broker_credential_provider": f"file://{password}",
    }
    worker = harness.worker(children=2, settings=settings)
    harness.wait_until_idle(2)
    held = harness.hold()
    harness.wait_for_start(held)
    results = [held]
    for number in range(3):
        results += [harness.app.send_task("quick") for _ in range(20)]
        rotate(f"password-{number}")
    worker.wait_for_line("Redis reconnected", count=2)
    harness.open_gate()
    for result in results:
        result.get(timeout=60)
    assert harness.start_count(held) == 1
    assert worker.stop() == 0
    assert "password-" not in worker.log
