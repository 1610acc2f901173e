"""A Redis Cluster of real servers on this machine, and migrations of its slots."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import redis

from bulltask.embedded.server import Flavor, pick_port
from bulltask.testing import worker as testing_server
from bulltask.testing.worker import RedisServer, wait_until
from tests.support.certificates import Certificates

__all__ = ["Cluster"]

_SLOTS = 16_384


class Cluster:
    """Three primaries, each with a third of the slots, optionally with replicas; see `Cluster.started`.

    Args:
        servers: The nodes, primaries first.
        primaries: The number of primaries.
        tls_ports: The TLS ports of the nodes; empty without TLS.

    Attributes:
        servers: The nodes.
        clients: A connection to each node.
        tls_ports: The TLS ports of the nodes.
    """

    def __init__(self, servers: Sequence[RedisServer], primaries: int, tls_ports: Sequence[int] = ()) -> None:
        self.servers, self._primaries, self.tls_ports = list(servers), primaries, tls_ports
        self.clients = [redis.Redis(port=server.port, decode_responses=True) for server in servers]
        self.ids = [self._ask(number, "MYID") for number in range(len(servers))]

    @classmethod
    @contextmanager
    def started(
        cls,
        directory: Path,
        flavor: Flavor,
        *,
        replicas: int = 0,
        node_timeout_ms: int = 60_000,
        certificates: Certificates | None = None,
    ) -> Iterator[Self]:
        """Start a cluster, and stop it at the end.

        Args:
            directory: The directory for the nodes' files.
            flavor: Redis or Valkey.
            replicas: The number of replicas of each primary.
            node_timeout_ms: After this time without a reply, a node counts as failed; long, for busy machines.
            certificates: Enables TLS, including between the nodes.
        """
        with ExitStack() as stack:
            servers, tls_ports = [], list[int]()
            for number in range(3 * (1 + replicas)):
                settings = {"enabled": "yes", "node-timeout": str(node_timeout_ms)}
                # Before Redis 7.0, the port for other nodes is 10,000 more than the port for clients.
                program = testing_server.find_binary(flavor)  # type: ignore[attr-defined]
                if program.version >= (7, 0, 0):
                    settings["port"] = str(pick_port())
                own = [arg for name, value in settings.items() for arg in (f"--cluster-{name}", value)]
                if certificates is not None:
                    tls_ports.append(pick_port())
                    own += [*certificates.arguments(tls_ports[-1]), "--tls-cluster", "yes"]
                server = RedisServer.start(directory / f"node-{number}", flavor=flavor, extra=own)
                servers.append(stack.enter_context(server))
            cluster = cls(servers, 3, tls_ports)
            stack.callback(cluster.close)
            cluster._join()
            yield cluster

    @contextmanager
    def one_more(self, directory: Path, flavor: Flavor) -> Iterator[int]:
        """Add a primary without slots; yield its number. At the end, when it has no slots, remove it."""
        port = str(pick_port())
        settings = ["--cluster-enabled", "yes", "--cluster-port", port, "--cluster-node-timeout", "60000"]
        settings += ["--cluster-allow-replica-migration", "no"]  # otherwise, it becomes a replica when it has no slots
        with RedisServer.start(directory, flavor=flavor, extra=settings) as server:
            number = len(self.servers)
            self.servers.append(server)
            self.clients.append(redis.Redis(port=server.port, decode_responses=True))
            self.ids.append(self._ask(number, "MYID"))
            self._ask(0, "MEET", "127.0.0.1", server.port, port)
            wait_until(lambda: self._all_know_all() and self._ready(), 30, "a cluster with one more node")
            try:
                yield number
            finally:
                self.servers.pop()
                self.clients.pop().close()
                for other in range(number):
                    self._ask(other, "FORGET", self.ids[number])
                self.ids.pop()

    @property
    def url(self) -> str:
        """The URL of one node."""
        return self.servers[0].url

    @property
    def broker_url(self) -> str:
        """The broker URL, which names all nodes."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    @property
    def moves_atomically(self) -> bool:
        """Whether `move_atomically` can be used: Valkey 9 and newer."""
        info: Any = self.clients[0].info("server")
        return int(info.get("valkey_version", "0").partition(".")[0]) >= 9

    def owner(self, slot: int) -> int:
        """Return the number of the primary that owns a slot, according to the first node that replies."""
        return self._owners(slot)[0]

    def client_of(self, queue: str) -> redis.Redis:
        """Return a connection to the node that owns a queue."""
        return self.clients[self.owner(self.slot(queue))]

    def url_of(self, queue: str) -> str:
        """Return the URL of the node that owns a queue, for clients without cluster support."""
        return self.servers[self.owner(self.slot(queue))].url

    def slot(self, queue: str) -> int:
        """Return the slot of a queue."""
        return int(self._ask(0, "KEYSLOT", f"{{{queue}}}"))

    def queues(self, each: int = 1) -> list[str]:
        """Return queue names, ``each`` of them on every node."""
        found: dict[int, list[str]] = {}
        for number in range(1_000):
            name = f"q{number}"
            found.setdefault(self.owner(self.slot(name)), []).append(name)
            if len(found) == 3 and all(len(names) >= each for names in found.values()):
                break
        return sorted(name for names in found.values() for name in names[:each])

    def begin_move(self, slot: int, to: int) -> None:
        """Start migrating a slot: commands for missing keys are redirected to the new node.

        First wait until all nodes know the source's last move. Otherwise, a node that takes the slot back may not
        increase its configuration epoch, so that the other nodes do not accept the move, and the slot's keys are lost.
        """
        source = self.owner(slot)
        wait_until(lambda: len(self._epochs_of(source)) == 1, 30, f"nodes that know the last move of slot {slot}")
        self._ask(to, "SETSLOT", slot, "IMPORTING", self.ids[source])
        self._ask(source, "SETSLOT", slot, "MIGRATING", self.ids[to])

    def move_keys(self, slot: int, to: int, count: int = 1_000_000) -> int:
        """Move up to ``count`` keys of a migrating slot; return the number of moved keys."""
        source = self.clients[self.owner(slot)]
        keys: Any = source.execute_command("CLUSTER", "GETKEYSINSLOT", slot, count)
        if keys:
            source.execute_command("MIGRATE", "127.0.0.1", self._ports[to], "", 0, 10_000, "KEYS", *keys)
        return len(keys)

    def end_move(self, slot: int, to: int) -> None:
        """Assign the slot to the new node; the cluster tells the third node later."""
        source = self.owner(slot)
        for number in (to, source):
            self._ask(number, "SETSLOT", slot, "NODE", self.ids[to])

    def wait_for_owner(self, slot: int, owner: int) -> None:
        """Wait until all nodes know the owner of a slot."""
        wait_until(lambda: set(self._owners(slot)) == {owner}, 30, f"slot {slot} on node {owner}")

    def move_atomically(self, slot: int, to: int) -> None:
        """Move a slot with all its keys in one step, and wait until all nodes know: no command is redirected by ASK."""
        self._ask(self.owner(slot), "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", self.ids[to])
        self.wait_for_owner(slot, to)

    def fail_over(self, primary: int) -> int:
        """Replace a running primary by one of its replicas, and wait until all nodes know; return its number."""
        replica = self.replica_of(primary)
        ranges: Any = self.clients[replica].execute_command("CLUSTER", "SLOTS")
        owned = next(first for first, _, owner, *_ in ranges if self._number(int(owner[1])) == primary)
        self._ask(replica, "FAILOVER")
        wait_until(lambda: set(self._owners(owned)) == {replica}, 30, f"the promotion of node {replica}")
        return replica

    def replica_of(self, primary: int) -> int:
        """Return the number of a replica."""
        return next(it for it in range(self._primaries, len(self.servers)) if it % self._primaries == primary)

    @contextmanager
    def stopped(self, number: int) -> Iterator[None]:
        """Stop a node inside the ``with`` block, so that it does not reply (``SIGSTOP``)."""
        os.kill(self.servers[number].pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.servers[number].pid, signal.SIGCONT)

    def flush(self) -> None:
        """Delete all keys."""
        for client in self.clients[: self._primaries]:
            client.flushall()

    def close(self) -> None:
        """Close the connections."""
        for client in self.clients:
            client.close()

    def _join(self) -> None:
        bounds = [_SLOTS * number // self._primaries for number in range(self._primaries + 1)]
        for number in range(len(self.servers)):
            self._ask(number, "SET-CONFIG-EPOCH", number + 1)
            if number < self._primaries:
                self._ask(number, "ADDSLOTS", *range(bounds[number], bounds[number + 1]))
        for number in range(1, len(self.servers)):
            bus: Any = self.clients[number].config_get("cluster-port")
            self._ask(0, "MEET", "127.0.0.1", self._ports[number], *bus.values())  # none before Redis 7.0
        wait_until(self._all_know_all, 30, "nodes that know each other")
        for number in range(self._primaries, len(self.servers)):
            self._ask(number, "REPLICATE", self.ids[number % self._primaries])
        wait_until(self._ready, 30, "a cluster that is ready")

    def _owners(self, slot: int) -> list[int]:
        """Return the primary that owns a slot, according to each node that replies."""
        return [
            next(self._number(int(row[2][1])) for row in ranges if row[0] <= slot <= row[1])
            for ranges in self._replies("CLUSTER", "SLOTS")
        ]

    def _epochs_of(self, number: int) -> set[str]:
        """Return the configuration epochs of a primary, according to the nodes that reply."""
        return {
            node["epoch"]
            for nodes in self._replies("CLUSTER NODES")
            for node in nodes.values()
            if node["node_id"] == self.ids[number]
        }

    def _replies(self, *command: str) -> Iterator[Any]:
        """Send a command to each node; yield the replies of those that reply."""
        for client in self.clients:
            with suppress(redis.ConnectionError):
                yield client.execute_command(*command)

    @property
    def _ports(self) -> Sequence[int]:
        """The ports that the nodes use for each other."""
        return self.tls_ports or [server.port for server in self.servers]

    def _all_know_all(self) -> bool:
        return all(
            len(self._ask(number, "NODES").splitlines()) == len(self.servers) for number in range(len(self.servers))
        ) and not any("handshake" in self._ask(number, "NODES") for number in range(len(self.servers)))

    def _ready(self) -> bool:
        states = [self._ask(number, "INFO") for number in range(len(self.servers))]
        links: Any = [client.info("replication") for client in self.clients]
        up = all(link["role"] == "master" or link["master_link_status"] == "up" for link in links)
        return up and all("cluster_state:ok" in state for state in states)

    def _number(self, port: int) -> int:
        return next(number for number, server in enumerate(self.servers) if server.port == port)

    def _ask(self, number: int, *args: Any) -> str:
        return _text(self.clients[number].execute_command("CLUSTER " + str(args[0]), *args[1:]))


def _text(reply: Any) -> str:
    if isinstance(reply, dict):  # redis-py parses INFO and NODES
        return "\n".join(f"{name}:{value}" for name, value in reply.items())
    return str(reply)
