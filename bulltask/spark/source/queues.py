"""The queues of a read: the given queues, or all queues under the prefix.

Other programs may also have queues under the prefix, with any name. A queue that a lake cannot record is skipped with a
reason, so that it does not block the others.
"""

from __future__ import annotations

import locale
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bulltask.jobs.errors import ConfigError, InvalidNameError
from bulltask.jobs.names import check_queue_name
from bulltask.lake.layout import partition_name
from bulltask.lake.status import SkippedQueue
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.options import ReadOptions
from bulltask.transport.call import QueueKeys
from bulltask.transport.scripts.queue import scan_queues

if TYPE_CHECKING:
    from bulltask.spark.source.pushdown import PushedFilters  # imports pyspark, which is not needed to list queues

__all__ = ["QueueSelection", "discover_queues", "log_skipped", "not_a_stream_reason", "select_queues", "skipped_queues"]

_MAX_NAME_BYTES: Final = 255
"""The maximum number of bytes in a directory name."""

_log = logging.getLogger(__name__)  # without a handler, it writes to the driver's stderr


@dataclass(frozen=True, slots=True)
class QueueSelection:
    """The queues of a read.

    Attributes:
        queues: Their keys, sorted by name.
        skipped: The reasons why queues are skipped, by BullMQ's name.
    """

    queues: list[QueueKeys]
    skipped: dict[str, str]


def select_queues(
    connection: Connection, options: ReadOptions, filters: PushedFilters | None = None
) -> list[QueueKeys]:
    """Return the keys of the queues to read, sorted by name, and log skipped queues.

    Args:
        connection: The connection to the server; used only if all queues are read.
        options: The queues, and the settings for queue names.
        filters: Filters on queues; default: no filters.

    Raises:
        ConfigError: With ``*``, two queues have the same name in bulltask, and ``skipUnsupportedQueues`` is off.
    """
    selection = discover_queues(connection, options)
    log_skipped(selection.skipped)
    return [keys for keys in selection.queues if filters is None or filters.allows_queue(keys.queue)]


def discover_queues(connection: Connection, options: ReadOptions) -> QueueSelection:
    """Return the keys of the queues to read, and the reasons why queues are skipped.

    Raises:
        ConfigError: As for :func:`select_queues`.
    """
    prefix, bullmq_names = options.config.prefix, list[str]()
    if options.every:
        bullmq_names = sorted(connection.scan_all(lambda cursor: scan_queues(prefix, cursor)))
        candidates = [QueueKeys(prefix, name, options.app_name(name) or name) for name in bullmq_names]
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
        if reason := _problem(keys, selected.get(keys.queue)) if options.skip_unsupported else None:
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


def _problem(keys: QueueKeys, other: QueueKeys | None) -> str | None:
    """Return why a lake cannot record a queue; ``None`` if it can."""
    if other is not None:
        return (
            f"{_printable(other.name)} has the name {_printable(keys.queue)!r} in the lake; use --no-queue-hash-tag "
            "and another --lake to record queues under BullMQ's names"
        )
    try:
        check_queue_name(keys.queue)
    except InvalidNameError as exc:
        return str(exc)
    if (size := len(partition_name("queue", keys.queue).encode())) > _MAX_NAME_BYTES:
        return f"its directory name would have {size} bytes; the maximum is {_MAX_NAME_BYTES}"
    try:
        keys.queue.encode(locale.getencoding())
    except UnicodeEncodeError:
        return "Java cannot write its name in this locale: set LC_ALL=C.UTF-8"
    return None


def _printable(name: str) -> str:
    """Return a name with unprintable characters escaped; long names are shortened."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
