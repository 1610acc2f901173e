"""The test session's server: a container if a container engine is available, else a local process."""

from __future__ import annotations

import os
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

__all__ = ["IMAGES", "ContainerServer", "container_server", "has_container_engine", "session_server"]

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
