"""Tests of servers in containers: testcontainers, a container engine, and Redis and Valkey images.

If no engine responds, these tests start podman with images of this machine's servers, so they need no registry.
"""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import docker
import pytest
import redis

from bulltask.embedded.server import Flavor, find_binary
from tests.redis import test_queue_basics
from tests.support.containers import (
    IMAGES,
    ContainerServer,
    container_server,
    has_container_engine,
    missing_for_podman,
    podman,
)
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.redis, pytest.mark.slow]

FLAVORS: tuple[Flavor, ...] = ("valkey", "redis")

IMPORT = "$podman import --quiet --change 'ENTRYPOINT [\"/bin/server\"]' $1/{0}.tar localhost/{0}:test || exit 1"


def pack(binary: Path, file: Path) -> None:
    """Write an image: the program, and the libraries that it is linked with."""
    listed = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
    with tarfile.open(file, "w", dereference=True) as image:
        image.add(binary, "bin/server")
        for library in {word for word in listed.split() if word.startswith("/")}:
            image.add(library, library.lstrip("/"))


def server_images(directory: Path) -> str:
    """Write an image of each server; return the commands that import them."""
    for flavor in FLAVORS:
        pack(find_binary(flavor).path, directory / f"{flavor}.tar")
    return "\n".join(IMPORT.format(flavor) for flavor in FLAVORS)


@pytest.fixture(scope="module")
def images(session_processes: set[int]) -> Iterator[dict[Flavor, str]]:
    """The names of the servers' images, which a running container engine has."""
    if has_container_engine():
        yield IMAGES
        return
    if missing := missing_for_podman():
        pytest.skip(f"no container engine: {missing} is missing")
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(
            prefix="podman-"
        ) as directory,  # processes that still use pytest's directory fail the test run
        podman(server_images(Path(directory)), Path(directory), session_processes) as address,
    ):
        patch.setenv("DOCKER_HOST", address)
        patch.setenv(
            "TESTCONTAINERS_RYUK_DISABLED", "true"
        )  # Ryuk's image is in a registry; the namespace cleans up as well
        has_container_engine.cache_clear()
        assert has_container_engine()
        yield {flavor: f"localhost/{flavor}:test" for flavor in FLAVORS}
    has_container_engine.cache_clear()


@pytest.fixture
def harness(broker_url: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> Iterator[WorkerHarness]:
    with closing(WorkerHarness(broker_url, tmp_path, record_property)) as harness:
        yield harness


@pytest.fixture(scope="module", params=FLAVORS)
def redis_server(request: pytest.FixtureRequest, images: dict[Flavor, str]) -> Iterator[ContainerServer]:
    """A server in a container, which replaces the session's server."""
    image = images[request.param]
    with container_server(image, host_network=image.startswith("localhost/")) as server:
        yield server


@pytest.fixture
def broker_url(redis_server: ContainerServer, broker_url: str) -> str:
    """The URL of that server; each test that uses it runs on both servers."""
    return broker_url


# Tests of the queue through both of its classes, with manual processing.
test_a_job_is_added_and_read_back = test_queue_basics.test_a_job_is_added_and_read_back
test_jobs_are_counted_by_state = test_queue_basics.test_jobs_are_counted_by_state
test_obliterate_removes_all_keys = test_queue_basics.test_obliterate_removes_all_keys


def test_the_server_has_the_requested_flavor_and_runs_in_a_container(
    request: pytest.FixtureRequest, redis_server: ContainerServer, redis_client: redis.Redis
) -> None:
    flavor = request.node.callspec.params["redis_server"]
    assert ("valkey_version" in redis_client.info("server")) == (flavor == "valkey")
    with closing(docker.from_env()) as engine:
        assert [redis_server.image] in [container.image.tags for container in engine.containers.list()]


@pytest.mark.process
def test_a_worker_runs_jobs_from_a_server_in_a_container(harness: WorkerHarness) -> None:
    harness.worker(children=1)
    assert harness.app.send_task("quick", countdown=0.1).get(timeout=60) is None
    assert len(harness.journal.wait_for(1, what="start")) == 1
