"""The connection of a reader, with retries; and the queues of a read: the given queues, or all under the prefix.

Spark creates readers in one process and uses copies of them in other processes, so no reader keeps a connection. All
calls only read, so a call whose reply was lost can be sent again. The server reports whether it is a node of a cluster;
if so, every call goes to the node that has the call's keys.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from socket import IPPROTO_TCP, socket
from typing import Any, Final, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

from bulltask import embedded
from bulltask.config.config import Config
from bulltask.config.urls import SecretUrl
from bulltask.jobs.backoff import reconnect_delay_ms
from bulltask.jobs.clock import mono_ms
from bulltask.jobs.errors import (
    BrokerAuthError,
    BrokerConfigError,
    BrokerError,
    BrokerNotReadyError,
    BrokerUnavailableError,
    ConfigError,
    InvalidNameError,
)
from bulltask.jobs.names import check_queue_name
from bulltask.lake.status import SkippedQueue
from bulltask.spark.source.options import ReadOptions
from bulltask.transport.broker import Broker, RollingScan, ScanStep, scan_all
from bulltask.transport.call import Call, QueueKeys, SyncClient
from bulltask.transport.client import Client
from bulltask.transport.cluster import ClusterClient
from bulltask.transport.discovery import HELLO, UNKNOWN_SERVER, ServerInfo
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.operation import atomic
from bulltask.transport.scripts.queue import scan_queues
from bulltask.transport.streams import READ_ONLY_SCRIPTS

if sys.platform == "linux":
    from socket import TCP_QUICKACK

R = TypeVar("R")

CLUSTER_OUTAGE_TIMEOUT_MS: Final = 60_000
"""How long a cluster may take to replace a node with a replica; with Redis' defaults it takes about 20 seconds."""

_MAX_ATTEMPTS: Final = 4
_MAX_PAUSE_MS: Final = 1_000


class Connection:
    """Runs calls on one server or cluster, with retries.

    ``outage_timeout_ms`` is how long to wait for a server that is down, or for a cluster to replace a node. ``None``:
    make four attempts, but only one if the connection is refused.
    """

    def __init__(self, config: Config, *, outage_timeout_ms: int | None = None) -> None:
        self._config = config
        self._endpoint = Endpoint.from_config(config, config.broker_url).for_cluster()
        self._outage_timeout_ms = outage_timeout_ms
        self._cluster = ClusterClient(self._endpoint, None) if self._endpoint.kind == "cluster" else None
        self._client = self._cluster or Client(self._endpoint, None)
        self._server: ServerInfo | None = None
        if "pyspark.worker" in sys.modules:  # this process runs Spark's tasks
            _freeze_modules()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        if self._cluster is not None:
            self._cluster.close()

    def run(self, call: Call[R]) -> R:
        """Run one call; raises the same errors as ``Client.run``."""
        return self._retry(lambda client: client.run(self._adapt(call)))

    def run_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Run several calls, in one round trip to each node."""
        return self._retry(lambda client: client.run_many(list(map(self._adapt, calls)))) if calls else []

    def try_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Like :meth:`run_many`, but return a call's exception in place of its result."""
        return self._retry(lambda client: client.try_many(list(map(self._adapt, calls)))) if calls else []

    def try_atomically(self, transactions: Sequence[Sequence[Call[Any]]]) -> list[list[Any]]:
        """Run several transactions in one round trip; return a call's exception in place of its result."""

        def request(client: SyncClient) -> list[list[Any]]:
            parts = [atomic(list(map(self._adapt, calls)), self._endpoint.safe_url) for calls in transactions]
            results = client.run_many([call for part in parts for call in part])
            return [results[end - 1] for end in accumulate(map(len, parts))]

        return self._retry(request)

    def run_atomically(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Run several calls in one transaction."""
        (results,) = self.try_atomically([calls])
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def scan_all(self, step: ScanStep) -> set[str]:
        """Scan all nodes and return the results, as :func:`bulltask.transport.broker.scan_all` does."""
        return self._retry(lambda client: scan_all(client, step))

    def advance(self, scan: RollingScan, max_steps: int) -> tuple[set[str], int]:
        """Continue a scan, as :meth:`bulltask.transport.broker.RollingScan.advance` does."""
        return self._retry(lambda client: scan.advance(client, max_steps))

    def server_info(self) -> ServerInfo:
        """Return what the server reports about itself."""
        return self._retry(lambda _: self._ensure_server_info())

    def _adapt(self, call: Call[R]) -> Call[R]:
        """Return the call in a form that the server supports and the user may send."""
        if (
            call.script is None
            or call.script.name not in READ_ONLY_SCRIPTS
            or not self._ensure_server_info().has_read_only_scripts
        ):
            return call
        return replace(call, script=call.script.read_only())

    def _ensure_server_info(self) -> ServerInfo:
        if self._server is None:
            try:
                self._server = self._client.run(HELLO)
            except (BrokerUnavailableError, BrokerNotReadyError, BrokerAuthError, BrokerConfigError):
                raise
            except BrokerError:
                self._server = UNKNOWN_SERVER
            if self._server.clustered and self._cluster is None:
                self._cluster = ClusterClient(self._endpoint, None)
        return self._server

    def _retry(self, request: Callable[[SyncClient], R]) -> R:
        failures, start_ms = 0, mono_ms()
        while True:
            try:
                self._ensure_server_info()
                with gc_paused():
                    return request(self._cluster or self._client)
            except (BrokerUnavailableError, BrokerNotReadyError) as exc:
                failures += 1
                if self._gives_up(failures, mono_ms() - start_ms, refused=getattr(exc, "refused", False)):
                    raise
                self._pause(failures)

    def _gives_up(self, failures: int, waited_ms: int, *, refused: bool) -> bool:
        if self._outage_timeout_ms is not None:
            return waited_ms >= self._outage_timeout_ms
        return refused or (
            failures >= _MAX_ATTEMPTS if self._cluster is None else waited_ms >= CLUSTER_OUTAGE_TIMEOUT_MS
        )

    def _pause(self, failures: int) -> None:
        max_pause_ms = self._config.reconnect_delay_max_ms
        if self._cluster is not None or self._outage_timeout_ms is not None:
            max_pause_ms = min(max_pause_ms, _MAX_PAUSE_MS)
        pause_ms = reconnect_delay_ms(failures, first_ms=self._config.reconnect_delay_ms, cap_ms=max_pause_ms)
        threading.Event().wait(pause_ms / 1000)


def broker_of(config: Config) -> Broker:
    """Return a broker for the server or cluster of ``config``; in a cluster it retries long enough for a failover."""
    url = embedded.resolve_url(config.broker_url)
    with Connection(replace(config, broker_url=url)) as connection:
        is_cluster = connection.server_info().clustered
    if is_cluster:
        limit_ms = config.publish_timeout_ms
        config = replace(
            config,
            publish_retries=100,
            publish_timeout_ms=None if limit_ms is None else max(limit_ms, CLUSTER_OUTAGE_TIMEOUT_MS),
            reconnect_delay_max_ms=min(config.reconnect_delay_max_ms, _MAX_PAUSE_MS),
        )
    return Broker(config, _cluster_url(url) if is_cluster and url.kind == "single" else url)


def _cluster_url(url: SecretUrl) -> SecretUrl:
    """Return the URL for a server that reports that it is a node of a cluster."""
    parts = urlsplit(url.get_secret_value())
    return SecretUrl(parts._replace(scheme=f"{parts.scheme}+cluster", path="").geturl())


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's cyclic garbage collector.

    A page of replies consists of tens of thousands of lists without cycles. They trigger the collector many times,
    which would take two thirds of the time for reading a page of events. Unused objects are still freed, by
    reference counting. With several threads, the first one that finishes turns the collector on again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def _freeze_modules() -> None:
    """Exempt what this process has imported from garbage collection.

    Spark collects garbage after each task. With all modules, that would take as much CPU time as reading 20,000 events.
    """
    gc.freeze()


class SentToTasks:
    """The base class of what Spark sends to its Python processes to run in tasks: the tasks start 40 ms earlier.

    Spark sends a task in two parts. TCP (Nagle's algorithm) withholds the second until the first has been acknowledged,
    which Linux delays. Spark cannot turn this off, so these objects acknowledge the first part when they are unpickled.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _acknowledge()


def _acknowledge() -> None:
    """Acknowledge what the sockets of this process have received; one of them is Spark's."""
    if sys.platform != "linux":
        return
    for file in Path("/proc/self/fd").glob("*"):  # none if /proc is not mounted
        if file.is_socket():
            with suppress(OSError), socket(fileno=os.dup(int(file.name))) as opened:  # it may use another protocol
                opened.setsockopt(IPPROTO_TCP, TCP_QUICKACK, 1)


# Other programs may also have queues under the prefix, with any name. A queue that a lake cannot record is skipped with
# a reason, so that it does not block the others.


_log = logging.getLogger(__name__)  # without a handler, it writes to the driver's stderr


class QueueSelection(NamedTuple):
    """The keys of the queues of a read, sorted by name, and why queues are skipped, by BullMQ's name."""

    queues: list[QueueKeys]
    skipped: dict[str, str]


def select_queues(connection: Connection, options: ReadOptions) -> list[QueueKeys]:
    """Return the keys of the queues to read, and log skipped queues."""
    selection = discover_queues(connection, options)
    log_skipped(selection.skipped)
    return selection.queues


def discover_queues(connection: Connection, options: ReadOptions, names: Iterable[str] | None = None) -> QueueSelection:
    """Return the keys of the queues to read, and the reasons why queues are skipped.

    With ``*``, ``names`` are BullMQ's names of the queues under the prefix; default: a scan of all keys finds them. Two
    queues with the same name in bulltask raise ``ConfigError`` if ``skipUnsupportedQueues`` is off.
    """
    prefix = options.config.prefix
    if options.every:
        if names is None:
            names = connection.scan_all(partial(scan_queues, prefix))
        candidates = list(map(options.stored_keys, sorted(names)))
    else:
        candidates = [options.keys(queue) for queue in options.queues]
    selected, skipped = dict[str, QueueKeys](), dict[str, str]()
    # Of two queues with the same name in bulltask, the one that bulltask itself uses by that name comes first.
    for keys in sorted(candidates, key=lambda keys: (keys.queue, options.bullmq_name(keys.queue) != keys.name)):
        if keys.queue in selected and not options.skip_unsupported:
            raise ConfigError(
                f"under the prefix {prefix!r} there are queues {selected[keys.queue].name!r} and {keys.name!r}, and "
                f"both would have the name {keys.queue!r}; set queueHashTag=false to use BullMQ's names"
            )
        if reason := _problem(keys, selected.get(keys.queue), options) if options.skip_unsupported else None:
            skipped[keys.name] = reason
        else:
            selected[keys.queue] = keys
    return QueueSelection([selected[queue] for queue in sorted(selected)], skipped)


def not_a_stream_reason(keys: QueueKeys) -> str:
    """Return the reason for skipping a queue whose events key is not a stream."""
    return f"the key {_printable(keys.events)} is not a stream; rename or delete it"


def skipped_queues(skipped: Mapping[str, str]) -> list[SkippedQueue]:
    """Return skipped queues with printable names, given their reasons by BullMQ's name."""
    return [SkippedQueue(_printable(queue), reason) for queue, reason in sorted(skipped.items())]


def log_skipped(skipped: Mapping[str, str]) -> None:
    """Log queues that are skipped."""
    for queue in skipped_queues(skipped):
        _log.warning("[BULLTASK_QUEUE_SKIPPED] queue %s is not recorded: %s", queue.queue, queue.reason)


def _problem(keys: QueueKeys, other: QueueKeys | None, options: ReadOptions) -> str | None:
    """Return why a lake cannot record a queue; ``other`` has the same name in bulltask."""
    if other is not None:
        return (
            f"{_printable(other.name)} has the name {_printable(keys.queue)!r} in the lake; use --no-queue-hash-tag "
            "and another --lake to record queues under BullMQ's names"
        )
    try:
        check_queue_name(keys.queue.removeprefix(options.queue_prefix))
    except InvalidNameError as exc:
        return str(exc)
    return None


def _printable(name: str) -> str:
    """Return a name with unprintable characters escaped; long names are shortened."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
