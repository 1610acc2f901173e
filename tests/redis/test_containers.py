"""Tests of servers in containers: testcontainers, a container engine, and Redis and Valkey images.

If no engine responds, these tests start podman with images of this machine's servers, so they need no registry. podman
runs in separate mount and process namespaces, so it sees no cgroups that crun rejects, and all its processes exit with
it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import docker
import pytest
import redis

from bulltask.embedded.server import Flavor, find_binary
from bulltask.testing.worker import wait_until
from tests.redis import test_queue_basics
from tests.support.containers import IMAGES, ContainerServer, container_server, has_container_engine
from tests.support.processes import SESSION_VARIABLE
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.redis, pytest.mark.slow]

MISSING = [program for program in ("podman", "crun", "unshare", "ldd") if shutil.which(program) is None]
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
FLAVORS: tuple[Flavor, ...] = ("valkey", "redis")

# Without CAP_SYS_RESOURCE crun cannot raise limits, and without a separate cgroup it cannot create any.
CONFIG = """
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]
cgroups = "disabled"
netns = "host"
"""
SERVICE = """
umount /sys/fs/cgroup/unified 2>/dev/null
podman="podman --root $1/root --runroot $1/run --storage-driver vfs --cgroup-manager cgroupfs --runtime crun"
for flavor in valkey redis; do
    $podman import --quiet --change 'ENTRYPOINT ["/bin/server"]' $1/$flavor.tar localhost/$flavor:test || exit 1
done
exec $podman system service --time 0 unix://$1/socket
"""


def pack(binary: Path, file: Path) -> None:
    """Write an image: the program, and the libraries that it is linked with."""
    listed = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
    with tarfile.open(file, "w", dereference=True) as image:
        image.add(binary, "bin/server")
        for library in {word for word in listed.split() if word.startswith("/")}:
            image.add(library, library.lstrip("/"))


@contextmanager
def podman(directory: Path, session_processes: set[int]) -> Iterator[str]:
    """Serve Docker's API; yield its address."""
    for flavor in FLAVORS:
        pack(find_binary(flavor).path, directory / f"{flavor}.tar")
    (directory / "containers.conf").write_text(CONFIG)
    service = subprocess.Popen(
        [*NAMESPACES, "sh", "-c", SERVICE, "sh", directory],
        env={name: text for name, text in os.environ.items() if name != SESSION_VARIABLE}
        | {"CONTAINERS_CONF": str(directory / "containers.conf")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    session_processes.add(service.pid)
    try:
        socket = directory / "socket"
        wait_until(lambda: socket.exists() or service.poll() is not None, 60.0, "podman's service")
        if service.poll() is not None and service.stdout is not None:
            raise RuntimeError(service.stdout.read().decode(errors="replace"))
        yield f"unix://{socket}"
    finally:
        service.kill()
        service.communicate()


@pytest.fixture(scope="module")
def images(session_processes: set[int]) -> Iterator[dict[Flavor, str]]:
    """The names of the servers' images, which a running container engine has."""
    if has_container_engine():
        yield IMAGES
        return
    if MISSING or subprocess.run([*NAMESPACES, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip(f"no container engine: {' and '.join(MISSING) or 'a namespace for podman'} is missing")
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(
            prefix="podman-"
        ) as directory,  # processes that still use pytest's directory fail the test run
        podman(Path(directory), session_processes) as address,
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
