"""The test session's server: a container if a container engine is available, else a local process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import redis

from bulltask.embedded.server import Flavor, pick_port
from bulltask.testing.worker import RedisServer, wait_until
from tests.support.processes import SESSION_VARIABLE

__all__ = [
    "IMAGES",
    "ContainerServer",
    "container_server",
    "has_container_engine",
    "missing_for_podman",
    "podman",
    "session_server",
]

IMAGES: dict[Flavor, str] = {"valkey": "valkey/valkey:8", "redis": "redis:7"}
PORT = 6379


@dataclass(frozen=True, slots=True)
class ContainerServer:
    """A server in a container.

    Attributes:
        port: The TCP port on 127.0.0.1.
        image: The container's image.
    """

    port: int
    image: str

    @property
    def url(self) -> str:
        """The URL ``redis://127.0.0.1:PORT/0``."""
        return f"redis://127.0.0.1:{self.port}/0"


@cache
def has_container_engine() -> bool:
    """Return whether a container engine responds at Docker's default address. The result is cached."""
    address = urlsplit(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock"))
    if address.scheme == "unix" and not Path(address.path).is_socket():
        return False
    import docker  # noqa: PLC0415  # takes half a second to import
    from docker.errors import DockerException  # noqa: PLC0415

    try:
        client = docker.from_env(timeout=5)
        client.ping()
    except DockerException:
        return False
    client.close()
    return True


@contextmanager
def container_server(image: str, *, host_network: bool = False) -> Iterator[ContainerServer]:
    """Run a server in a container.

    Args:
        image: An image of Redis or Valkey whose entry point takes the server's arguments.
        host_network: Use the host's network and a free port on this machine.
    """
    from testcontainers.core.container import DockerContainer  # noqa: PLC0415  # as above

    port = pick_port() if host_network else PORT
    access = ["--bind", "127.0.0.1"] if host_network else ["--protected-mode", "no"]
    container = DockerContainer(image).with_command(["--port", str(port), "--save", "", *access])
    if host_network:
        container.with_kwargs(network_mode="host")
    else:
        container.with_exposed_ports(port)
    with container:
        server = ContainerServer(port if host_network else int(container.get_exposed_port(port)), image)
        with redis.Redis(port=server.port) as client:
            wait_until(lambda: _serves(client), 30.0, f"the server in {image}")
        yield server


def _serves(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


@contextmanager
def session_server(directory: Path, flavor: Flavor) -> Iterator[RedisServer | ContainerServer]:
    """Run the server of a test session."""
    with ExitStack() as stack:
        if has_container_engine():
            from docker.errors import DockerException  # noqa: PLC0415  # as above

            try:
                server = stack.enter_context(container_server(IMAGES[flavor]))
            except DockerException as exc:  # the engine has no such image and cannot pull it
                sys.stderr.write(f"no server in a container, so a local process is used: {exc}\n")
            else:
                yield server
                return
        yield stack.enter_context(RedisServer.start(directory, flavor=flavor))


# ---- podman, where no engine responds --------------------------------------------------------------------------------

_MISSING = [program for program in ("podman", "crun", "unshare", "ldd") if shutil.which(program) is None]
_NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
# Without CAP_SYS_RESOURCE crun cannot raise limits, and without a separate cgroup it cannot create any.
_CONFIG = """
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]
cgroups = "disabled"
netns = "host"
"""
_PODMAN = "podman --root $1/root --runroot $1/run --storage-driver vfs --cgroup-manager cgroupfs --runtime crun"
_SCRIPT = f"""
umount /sys/fs/cgroup/unified 2>/dev/null
podman="{_PODMAN}"
%s
exec $podman system service --time 0 unix://$1/socket
"""


def missing_for_podman() -> str:
    """Return what :func:`podman` needs and this machine does not have."""
    if not _MISSING and subprocess.run([*_NAMESPACES, "true"], check=False, capture_output=True).returncode != 0:
        return "a namespace for podman"
    return " and ".join(_MISSING)


@contextmanager
def podman(prepare: str, directory: Path, session_processes: set[int]) -> Iterator[str]:
    """Run a shell script with ``$podman`` and the directory ``$1``, then serve Docker's API; yield its address.

    podman runs in separate mount and process namespaces, so it sees no cgroups that crun rejects, and all its processes
    exit with it. The directory must not be pytest's: processes that still use that one fail the test run.
    """
    (directory / "containers.conf").write_text(_CONFIG)
    service = subprocess.Popen(
        [*_NAMESPACES, "sh", "-c", _SCRIPT % prepare, "sh", directory],
        env={name: text for name, text in os.environ.items() if name != SESSION_VARIABLE}
        | {"CONTAINERS_CONF": str(directory / "containers.conf")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    session_processes.add(service.pid)
    try:
        socket = directory / "socket"
        wait_until(lambda: socket.exists() or service.poll() is not None, 120.0, "podman's service")
        if service.poll() is not None and service.stdout is not None:
            raise RuntimeError(service.stdout.read().decode(errors="replace"))
        yield f"unix://{socket}"
    finally:
        service.kill()
        service.communicate()
