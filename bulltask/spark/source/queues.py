"""Which queues a read is of: those that were named, or all under the prefix.

Others may have queues under the prefix too, of any name. A lake takes those that it can hold. One that it cannot is set
aside with a reason, so that it does not keep the others out.
"""

from __future__ import annotations

import locale
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bulltask.errors import ConfigError, InvalidNameError
from bulltask.jobs.names import check_queue_name
from bulltask.lake.layout import partition_name
from bulltask.lake.status import SkippedQueue
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.options import ReadOptions
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.queue import scan_queues

if TYPE_CHECKING:
    from bulltask.spark.source.pushdown import PushedFilters  # imports pyspark, which a look at queues does not need

__all__ = ["QueueSelection", "discover_queues", "log_skipped", "not_a_stream", "select_queues", "skipped_queues"]

_LONGEST: Final = 255
"""Bytes that a directory's name may have."""

_log = logging.getLogger(__name__)  # without a handler it writes to stderr, which is the driver's


@dataclass(frozen=True, slots=True)
class QueueSelection:
    """What a read is of.

    Attributes:
        queues: their keys, sorted by name.
        aside: why others are set aside, by BullMQ's spelling.
    """

    queues: list[QueueKeys]
    skipped: dict[str, str]


def select_queues(
    connection: Connection, options: ReadOptions, filters: PushedFilters | None = None
) -> list[QueueKeys]:
    """Return the keys of the queues to read, sorted by name; those that are set aside are named in the log.

    Args:
        connection: to the server; it is asked only when all queues are read.
        options: which queues, and how they are spelled.
        narrowing: filters that may leave fewer of them, none if left out.

    Raises:
        ConfigError: ``*`` found two queues that the user would spell alike, and ``skipForeignQueues`` is off.
    """
    found = discover_queues(connection, options)
    log_skipped(found.skipped)
    return [keys for keys in found.queues if filters is None or filters.allows_queue(keys.queue)]


def discover_queues(connection: Connection, options: ReadOptions) -> QueueSelection:
    """Return the keys of the queues to read, and why others are set aside; see :func:`select_queues`.

    Raises:
        ConfigError: as there.
    """
    prefix, wire_names = options.config.prefix, list[str]()
    if options.every:
        wire_names = sorted(connection.walk(lambda cursor: scan_queues(prefix, cursor)))
        every = [QueueKeys(prefix, wire, options.user_name(wire) or wire) for wire in wire_names]
    else:
        every = [options.keys(queue) for queue in options.queues]
    found, skipped = dict[str, QueueKeys](), dict[str, str]()
    # Of two that are called alike, that one comes first which the name leads to.
    for keys in sorted(every, key=lambda keys: (keys.queue, options.wire_name(keys.queue) != keys.name)):
        if keys.queue in found and not options.skip_foreign:
            raise ConfigError(
                f"under the prefix {prefix!r} there are the queues {found[keys.queue].name!r} and {keys.name!r}, and "
                f"both would be called {keys.queue!r}; set queueHashTag=false, so that queues are called as BullMQ "
                "calls them"
            )
        if reason := _problem(keys, found.get(keys.queue)) if options.skip_foreign else None:
            skipped[keys.name] = reason
        else:
            found[keys.queue] = keys
    return QueueSelection([found[queue] for queue in sorted(found)], skipped)


def not_a_stream(keys: QueueKeys) -> str:
    """Why a queue is set aside whose events are not in a stream."""
    return f"the key {_printable(keys.events)} is not a stream; rename or delete it"


def skipped_queues(skipped: Mapping[str, str]) -> list[SkippedQueue]:
    """Return queues that are set aside as people can read them; given why, by BullMQ's spelling."""
    return [SkippedQueue(_printable(queue), reason) for queue, reason in sorted(skipped.items())]


def log_skipped(skipped: Mapping[str, str]) -> None:
    """Log queues that are set aside."""
    for one in skipped_queues(skipped):
        _log.warning("[BULLTASK_QUEUE_SET_ASIDE] queue %s is not recorded: %s", one.queue, one.reason)


def _problem(keys: QueueKeys, other: QueueKeys | None) -> str | None:
    """Why a lake cannot hold a queue; ``None`` when it can."""
    if other is not None:
        return (
            f"{_printable(other.name)} has the name {_printable(keys.queue)!r} in the lake; use --no-queue-hash-tag "
            "and another --root to record queues under BullMQ's names"
        )
    try:
        check_queue_name(keys.queue)
    except InvalidNameError as exc:
        return str(exc)
    if (size := len(partition_name("queue", keys.queue).encode())) > _LONGEST:
        return f"its directory's name would have {size} bytes, and {_LONGEST} are possible"
    try:
        keys.queue.encode(locale.getencoding())
    except UnicodeEncodeError:
        return "Java cannot write its name in this locale: set LC_ALL=C.UTF-8"
    return None


def _printable(name: str) -> str:
    """A name as people can read it, whatever is in it; long ones in part."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
