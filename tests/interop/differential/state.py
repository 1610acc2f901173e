"""Read everything that Redis stores for one queue, in a form that is equal for queues with the same history."""

from __future__ import annotations

import difflib
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import redis

__all__ = ["TTL_UNIT_MS", "difference", "dump"]

TTL_UNIT_MS = 100_000
"""TTLs are rounded up to a multiple of this; the tests use only such multiples, so slowness does not matter."""

_ID_FIELDS = {"jobId", "deduplicatedJobId"}  # of events

State = dict[str, Any]
"""Key without its prefix, ids replaced, to ``{"type": …, "ttl": …, "value": …}``."""


def dump(client: redis.Redis, base: str, ids: Sequence[str]) -> State:
    """Read all keys that begin with ``base``.

    Ids become ``#1``, ``#2`` … in the order of ``ids`` (those that no job ever had: ``#?``), the queue's name ``Q``.
    Clock values stay, because both sides use the same clock. Ids of stream entries are omitted.

    Args:
        client: A client that decodes replies.
        base: The queue's prefix with its trailing colon.
        ids: The ids of all jobs, in the order in which they were added.
    """
    names = _Names(base, ids)
    keys = sorted(client.scan_iter(match=f"{base}*", count=1000))
    with client.pipeline(transaction=False) as pipeline:  # one by one, they would take half of a test's time
        for key in keys:
            pipeline.type(key)
        kinds = [str(kind) for kind in pipeline.execute()]
        for key, kind in zip(keys, kinds, strict=True):
            pipeline.pttl(key)
            _READERS[kind](pipeline, key)
        answers = pipeline.execute()
    return {
        names.key(key): {
            "type": kind,
            "ttl": None if ttl_ms < 0 else math.ceil(ttl_ms / TTL_UNIT_MS) * TTL_UNIT_MS,
            "value": _NORMALIZERS[kind](value, key, names),
        }
        for key, kind, ttl_ms, value in zip(keys, kinds, answers[::2], answers[1::2], strict=True)
    }


def difference(node_state: State, bulltask_state: State) -> str:
    """Return the differences (``-`` Node, ``+`` bulltask), ``""`` if there are none."""
    lines: list[str] = []
    for key in sorted({*node_state, *bulltask_state}):
        if (a := node_state.get(key)) != (b := bulltask_state.get(key)):
            lines.append(f"key {key}")
            lines += [f"  {line}" for line in difflib.ndiff(_lines(a), _lines(b)) if not line.startswith("?")]
    return "\n".join(lines)


def _lines(entry: Any) -> list[str]:
    if entry is None:
        return ["(no such key)"]
    return json.dumps(entry, indent=1, sort_keys=True, ensure_ascii=False).splitlines()


class _Names:
    """Replaces the ids and the name of one queue."""

    def __init__(self, base: str, ids: Sequence[str]) -> None:
        self._base, self._queue = base, base[:-1]
        self._ids = {job_id: f"#{place}" for place, job_id in enumerate(ids, 1)}
        self._key = re.compile(re.escape(base) + r"([^\s:\"',]+)")

    def id(self, text: str) -> str:
        """An id, or the full key of a job, or something else that stays."""
        if text in self._ids:
            return self._ids[text]
        return self.text(text)

    def only_id(self, text: str) -> str:
        return self._ids.get(text, "#?")

    def key(self, key: str) -> str:
        suffix = key.removeprefix(self._base)
        if suffix in self._ids:  # "repeat:<scheduler>:<ms>" is an id too
            return self._ids[suffix]
        first, colon, rest = suffix.partition(":")
        return self._ids.get(first, first) + colon + rest

    def text(self, text: str) -> str:
        """Any text: full keys of jobs and the queue's name in it are replaced."""
        text = self._key.sub(lambda match: f"Q:{self._ids.get(match[1], match[1])}", text)
        return text.replace(self._queue, "Q")


def _hash(fields: dict[str, str], _: str, names: _Names) -> Any:
    normalized: dict[str, Any] = {names.id(name): names.text(value) for name, value in fields.items()}
    if "opts" in fields:  # a job, or the template of a scheduler
        normalized["opts"] = _options(json.loads(fields["opts"]), names)
    if "parent" in fields:
        parent = json.loads(fields["parent"])
        normalized["parent"] = {**parent, "id": names.id(parent["id"]), "queueKey": names.text(parent["queueKey"])}
    return normalized


def _options(opts: dict[str, Any], names: _Names) -> dict[str, Any]:
    if "jobId" in opts:
        opts["jobId"] = names.id(str(opts["jobId"]))
    if "parent" in opts:
        opts["parent"] = {"id": names.id(opts["parent"]["id"]), "queue": names.text(opts["parent"]["queue"])}
    return opts


def _stream(entries: list[tuple[str, dict[str, str]]], _: str, names: _Names) -> Any:
    events = [
        {name: names.only_id(value) if name in _ID_FIELDS else names.text(value) for name, value in fields.items()}
        for _, fields in entries
    ]
    # Children are removed in the order of a set in Redis, which before 7.2 depends on their ids.
    runs = itertools.groupby(events, lambda event: event.get("event") == "removed")
    return [event for removed, run in runs for event in (sorted(run, key=str) if removed else run)]


def _sorted_set(members: list[tuple[str, float]], key: str, names: _Names) -> Any:
    marker = key.endswith(":marker")  # its members "0" and "1" are not ids
    # Redis sorts members with the same score by their ids, whose order differs between the clients.
    return sorted(
        ([member if marker else names.id(member), score] for member, score in members), key=lambda x: (x[1], x[0])
    )


def _list(items: list[str], key: str, names: _Names) -> Any:
    return [names.text(item) if key.endswith(":logs") else names.id(item) for item in items]


def _set(members: set[str], _: str, names: _Names) -> Any:
    return sorted(names.id(member) for member in members)


def _string(value: str, key: str, names: _Names) -> Any:
    return names.id(value) if ":de:" in key else value


_READERS: dict[str, Callable[[redis.Redis, str], object]] = {
    "hash": lambda client, key: client.hgetall(key),
    "list": lambda client, key: client.lrange(key, 0, -1),
    "set": lambda client, key: client.smembers(key),
    "stream": lambda client, key: client.xrange(key),
    "string": lambda client, key: client.get(key),
    "zset": lambda client, key: client.zrange(key, 0, -1, withscores=True),
}
_NORMALIZERS: dict[str, Callable[[Any, str, _Names], Any]] = {
    "hash": _hash,
    "list": _list,
    "set": _set,
    "stream": _stream,
    "string": _string,
    "zset": _sorted_set,
}
