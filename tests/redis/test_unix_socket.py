"""``unix://``, and the protocol's versions."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import redis

from bulltask import App
from bulltask.testing.worker import RedisServer
from tests.conftest import FLAVOR

pytestmark = pytest.mark.redis


async def use(url: str) -> None:
    """Send a job with each client, complete it, and wait for its result."""
    app = App("shop", url, task_default_queue="mail")
    queue, aqueue = app.queue("mail"), app.aqueue("mail")
    first = app.send_task("add")
    job = queue.get_next_job("token")
    assert job is not None
    job.move_to_completed(1.5, "token")
    second = await app.asend_task("add")
    ajob = await aqueue.get_next_job("token")
    assert ajob is not None
    await ajob.move_to_completed({"sum": 2}, "token")
    assert (first.get(timeout=10), await second.aget(timeout=10)) == (1.5, {"sum": 2})
    assert queue.get_job_counts() == {**dict.fromkeys(queue.get_job_counts(), 0), "completed": 2}
    await app.aclose()
    app.close()


async def test_a_unix_socket_works_with_a_user_and_a_database() -> None:
    with TemporaryDirectory(prefix="socket-") as directory:  # a short path: the name of a socket has 108 bytes
        socket = Path(directory, "redis.sock")
        server = RedisServer.start(Path(directory, "data"), flavor=FLAVOR, extra=["--unixsocket", str(socket)])
        with server, redis.Redis.from_url(server.url) as client:
            client.execute_command("ACL SETUSER", "worker", "on", ">secret", "~*", "+@all")
            await use(f"unix://{socket}")
            await use(f"unix://worker:secret@{socket}?db=3")
            assert client.info("keyspace").keys() == {"db0", "db3"}


@pytest.mark.parametrize("version", [2, 3])
async def test_the_url_of_another_client_may_choose_a_version_of_the_protocol(broker_url: str, version: int) -> None:
    await use(f"{broker_url}{'&' if '?' in broker_url else '?'}protocol={version}")
