"""What is wrong with a server and its queues: what ``bulltask doctor`` finds, proves and mends.

:data:`CHECKS` has every check with its code. A check is a function that judges what was read: of the server
(:class:`_Server`), or of a queue (:class:`_Queue`). The others are those reasons of :mod:`bulltask.queue.reasons` that
are sicknesses, and what a scan of the keys finds (:class:`_Keys`). :func:`examine` reads for a limited time: server and
queues first, then the keys, in the order of ``SCAN``, which is a random one. It says what it has not looked at.
:func:`examine_streams` has those of the checks that matter to ``bulltask pipeline``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import Any, Final, Literal

from bulltask.config.urls import redact_secrets
from bulltask.jobs import codec
from bulltask.jobs.clock import mono_s, wall_ms
from bulltask.jobs.errors import (
    BrokerAuthError,
    BrokerError,
    BrokerNotReadyError,
    BrokerUnavailableError,
    BulltaskError,
)
from bulltask.jobs.names import address_of, bullmq_name, is_queue_key
from bulltask.queue.context import QueueContext
from bulltask.queue.fields import set_paused
from bulltask.queue.manual import check_stalled
from bulltask.queue.overview import QueueOverview, read_overview
from bulltask.queue.reasons import (
    REASONS,
    Certainty,
    Explanation,
    Reason,
    counted,
    explain_job,
    explain_queue,
    unreachable,
)
from bulltask.transport.broker import MIN_REDIS_VERSION, Broker
from bulltask.transport.call import Call, QueueKeys, SyncClient, command, info_by_name, text, texts
from bulltask.transport.cluster import ClusterClient
from bulltask.transport.discovery import TIME
from bulltask.transport.operation import Operation, run_sync
from bulltask.transport.permissions import NEEDED_BY_JOBS, role_grants
from bulltask.transport.produce import PROTOCOL_VERSION
from bulltask.transport.scripts.move import CRASHES
from bulltask.transport.scripts.queue import LISTS, SETS, QueueFigures, list_clients, queue_of_connection
from bulltask.transport.streams import (
    DEFAULT_LENGTH,
    RetentionNeed,
    StreamInfo,
    StreamRetention,
    busiest_rate,
    id_parts,
    read_back,
    stream_info,
)

__all__ = ["CHECKS", "SEVERITIES", "Check", "Diagnosis", "Finding", "Fix", "Severity", "examine", "examine_streams"]

Severity = Literal["broken", "warning", "notice"]
SEVERITIES: Final[tuple[Severity, ...]] = ("broken", "warning", "notice")
"""Jobs are lost, or do not run; they may, soon or after a restart; it is worth knowing."""

_HOUR_S: Final = 3_600
_CLOCK_MS: Final = 5_000
_SLOW_MS: Final = 100
"""A command that takes longer than this delays all clients noticeably."""

_FULL: Final = 0.9
"""The share of memory, or of connections, that leaves too little for a peak."""

_NEED: Final = RetentionNeed(trigger_s=10, batch_s=5)
"""How long a stream should keep events: a reader reconnects meanwhile, and the pipeline writes two batches."""

_QUEUES_SHARE: Final = 0.6
"""The part of the time in which queues are explained; the rest is for the keys."""

_SAMPLE: Final = 50
"""How many jobs are looked at on both ends of each state."""

_PER_PAGE: Final = 250
"""How many keys one page of the scan looks at: Redis answers its calls within a millisecond or two."""

_MAX_LISTED: Final = 20_000
"""A queue with more jobs in its lists is not searched for lost jobs."""

_MAX_CANDIDATES: Final = 1_000
_SHOWN: Final = 5
_EVENTS: Final = 100
_BULLMQ: Final = re.compile(r"bullmq:(\d+)\.")  # not the Pro edition, whose versions are numbered differently
_JOB_PARTS: Final = (":logs", ":dependencies", ":processed", ":failed", ":unsuccessful")
_CRASH_FIELDS: Final = (CRASHES, "bulltask:crashTokens")


@dataclass(frozen=True, slots=True)
class Fix:
    """A change that loses nothing and that another client cannot trip over.

    Attributes:
        what: What it will do.
        apply: Does it, and returns what was done.
    """

    what: str
    apply: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Finding:
    """A sickness that was found.

    Attributes:
        severity: ``broken``, ``warning`` or ``notice``.
        queue: The queue's name in the app; ``None`` for the server.
        reason: Its code, evidence, and the command that mends it.
        fix: What ``--fix`` does about it, ``None`` if that needs a decision.
    """

    severity: Severity
    queue: str | None
    reason: Reason
    fix: Fix | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        fix = None if self.fix is None else self.fix.what
        return {"severity": self.severity, "queue": self.queue, **self.reason.to_json(), "fix": fix}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What an examination has found.

    Attributes:
        findings: What is sick: the worst first, the server before its queues.
        not_examined: What was not looked at, and why.
        queues: How many queues there are.
        keys: How many keys were looked at.
        seconds: How long it took.
    """

    findings: Sequence[Finding]
    not_examined: Sequence[str]
    queues: int
    keys: int
    seconds: float

    @property
    def worst(self) -> Severity | None:
        """The severity of the worst finding."""
        return self.findings[0].severity if self.findings else None


@dataclass(frozen=True, slots=True)
class Check:
    """A check.

    Attributes:
        code: Its name, that of its findings.
        severity: How bad it usually is.
        meaning: What it finds.
    """

    code: str
    severity: Severity
    meaning: str


_Symptom = tuple[Reason, Severity | None, Fix | None]
"""What a check yields; a severity other than the check's, if it has one."""


def _symptom(  # noqa: PLR0913 - each is a part of the finding
    code: str,
    sentence: str,
    evidence: Mapping[str, Any],
    command_line: str | None = None,
    *,
    certainty: Certainty = "proved",
    severity: Severity | None = None,
    fix: Fix | None = None,
) -> _Symptom:
    reason = Reason(code=code, sentence=sentence, evidence=evidence, command=command_line, certainty=certainty)
    return reason, severity, fix


# ---- the server ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Server:
    """What was read about the server, or about each node of a cluster; what it refused is ``None``."""

    broker: Broker
    client: SyncClient
    nodes: Sequence[Mapping[str, str]] = ()
    now_ms: int = 0
    machine_ahead_ms: int = 0
    saves: Sequence[str] | None = None
    slow: Sequence[tuple[int, float, str]] | None = None
    denied: Sequence[Mapping[str, str]] | None = None

    def read(self, refuse: Callable[[str, BulltaskError], None]) -> None:
        """Read everything; ``refuse`` is called with what may not be read."""
        begun_ms = wall_ms()
        self.now_ms = int(self.client.run(TIME))
        self.machine_ahead_ms = (begun_ms + wall_ms()) // 2 - self.now_ms

        def each(what: str, *words: str | int, parse: Callable[[Any], Any]) -> list[Any] | None:
            try:
                return self.client.run_on_all_nodes(command(*words, parse_reply=parse))
            except (BrokerUnavailableError, BrokerNotReadyError):
                raise
            except BulltaskError as exc:
                refuse(what, exc)
                return None

        self.nodes = each("the server's state (INFO)", "INFO", parse=info_by_name) or ()
        if any(node.get("aof_enabled") == "0" for node in self.nodes):
            self.saves = each("persistence (CONFIG GET save)", "CONFIG", "GET", "save", parse=_last)
        slow = each("the slow log (SLOWLOG GET)", "SLOWLOG", "GET", 128, parse=_slow_commands)
        self.slow = None if slow is None else [entry for part in slow for entry in part]
        denied = each("refused calls (ACL LOG)", "ACL", "LOG", 100, parse=_denials)
        self.denied = None if denied is None else [entry for part in denied for entry in part]

    @property
    def url(self) -> str:
        """Its URL, without the password."""
        return self.broker.endpoint.safe_url

    @property
    def prefix(self) -> str:
        """The prefix of the queues."""
        return self.broker.config.prefix

    def number(self, node: Mapping[str, str], name: str) -> int:
        """Return a figure of a node, 0 if it is missing."""
        value = node.get(name, "")
        return int(value) if value.isdecimal() else 0


def _last(reply: Any) -> str:
    return text(reply[-1]) if reply else ""


def _slow_commands(reply: Any) -> list[tuple[int, float, str]]:
    """Return when each slow command ran (epoch seconds), its milliseconds, and its name and first key, but no data."""
    found = []
    for _, at_s, micros, words, *_ in reply:
        name, *more = [codec.decode_text(word) for word in words[:4]]
        is_script = name.upper().startswith(("EVAL", "FCALL"))
        keys = more[2:3] if is_script and more[1:2] != ["0"] else [] if is_script else more[:1]
        found.append((int(at_s), int(micros) / 1000, redact_secrets(" ".join([name.upper(), *keys]))[:80]))
    return found


def _denials(reply: Any) -> list[dict[str, str]]:
    return [{text(name): text(value) for name, value in zip(it[::2], it[1::2], strict=False)} for it in reply]


def _eviction(it: _Server) -> Iterator[_Symptom]:
    evicting = [node for node in it.nodes if node.get("maxmemory_policy", "noeviction") != "noeviction"]
    if not evicting:
        return
    policy, limit = evicting[0]["maxmemory_policy"], it.number(evicting[0], "maxmemory")
    evicted = sum(it.number(node, "evicted_keys") for node in evicting)
    is_full = any(it.number(node, "used_memory") >= _FULL * it.number(node, "maxmemory") > 0 for node in evicting)
    line = ("CONFIG", "SET", "maxmemory-policy", "noeviction")

    def apply() -> str:
        with it.broker.pool.client() as client:
            client.run_on_all_nodes(command(*line))
        return "maxmemory-policy is noeviction until Redis restarts: set it in redis.conf, too"

    what = f"Redis at {it.url} deletes keys when it is full, also jobs: maxmemory-policy is {policy}"
    what += f", and it has deleted {evicted:,}" if evicted else ""
    # Then this would stop all that writes, also other programs: somebody must decide what to remove, or add memory.
    what += ". Give it more memory first: with noeviction, it rejects writes when it is full" if is_full else ""
    yield _symptom(
        "eviction",
        what if limit else f"{what}. There is no limit now (maxmemory is 0)",
        {"maxmemory_policy": policy, "maxmemory": limit, "evicted_keys": evicted},
        f"redis-cli {' '.join(line)}",
        severity=None if limit or evicted else "warning",
        fix=None if is_full else Fix(f"set maxmemory-policy to noeviction (it is {policy})", apply),
    )


def _persistence(it: _Server) -> Iterator[_Symptom]:
    for index, node in enumerate(it.nodes):
        if node.get("aof_enabled") == "1" and node.get("aof_last_write_status", "ok") != "ok":
            yield _symptom(
                "no-persistence",
                f"Redis at {it.url} cannot write its append-only file: look at its log, and at the free space",
                {"aof_last_write_status": node["aof_last_write_status"]},
                "redis-cli INFO persistence",
                severity="broken",
            )
        if node.get("aof_enabled") == "0" and node.get("rdb_last_bgsave_status", "ok") != "ok":
            yield _symptom(
                "no-persistence",
                f"Redis at {it.url} could not save its data (RDB): look at its log, and at the free space and memory",
                {"rdb_last_bgsave_status": node["rdb_last_bgsave_status"]},
                "redis-cli INFO persistence",
                severity="broken",
            )
            return
        if node.get("aof_enabled") == "0" and it.saves is not None and not it.saves[index].strip():
            yield _symptom(
                "no-persistence",
                f"Redis at {it.url} stores nothing on disk: a restart loses all jobs, schedules and results",
                {"aof_enabled": 0, "save": ""},
                "redis-cli CONFIG SET appendonly yes",
            )
            return


def _version(it: _Server) -> Iterator[_Symptom]:
    for node in it.nodes:
        version = node.get("redis_version", "")
        numbers = tuple(int(part) for part in version.split(".") if part.isdecimal())
        if numbers and numbers < MIN_REDIS_VERSION:
            needed = ".".join(map(str, MIN_REDIS_VERSION))
            sentence = f"Redis at {it.url} is {version}, and bulltask needs {needed} or newer: upgrade it"
            yield _symptom("old-redis", sentence, {"redis_version": version, "needed": needed}, "redis-cli INFO server")
            return


def _clocks(it: _Server) -> Iterator[_Symptom]:
    ahead_ms = it.machine_ahead_ms
    if abs(ahead_ms) > _CLOCK_MS:
        yield _symptom(
            "clocks-apart",
            f"This machine's clock is {abs(ahead_ms) / 1000:,.1f} s {'ahead of' if ahead_ms > 0 else 'behind'} that of "
            f"Redis at {it.url}: senders in Node.js count delays by their machine's, workers by Redis'",
            {"machine_ahead_ms": ahead_ms},
            "redis-cli TIME",
        )


def _memory(it: _Server) -> Iterator[_Symptom]:
    for node in it.nodes:
        used, limit = it.number(node, "used_memory"), it.number(node, "maxmemory")
        name = "maxmemory" if limit else "total_system_memory"
        limit = limit or it.number(node, name)
        is_full = used >= limit and name == "maxmemory" and node.get("maxmemory_policy") == "noeviction"
        if limit and used >= _FULL * limit and not is_full:  # that is the reason redis-full
            yield _symptom(
                "memory",
                f"Redis at {it.url} uses {used:,} of {limit:,} bytes ({name}), and rejects jobs when full: remove "
                "old finished jobs, keep fewer, or give it more memory",
                {"used_memory": used, name: limit},
                "redis-cli INFO memory",
            )


def _connections(it: _Server) -> Iterator[_Symptom]:
    for node in it.nodes:
        connected, limit = it.number(node, "connected_clients"), it.number(node, "maxclients")
        if limit and connected >= _FULL * limit:
            sentence = (
                f"Redis at {it.url} has {connected:,} of {limit:,} connections (maxclients): then it accepts none"
            )
            evidence = {"connected_clients": connected, "maxclients": limit}
            yield _symptom("connections", sentence, evidence, "redis-cli CLIENT LIST")


def _slow(it: _Server) -> Iterator[_Symptom]:
    since_s = it.now_ms / 1000 - _HOUR_S
    if slow := [entry for entry in it.slow or () if entry[0] >= since_s and entry[1] >= _SLOW_MS]:
        _, worst_ms, name = max(slow, key=lambda entry: entry[1])
        many = f"{len(slow)} commands" if len(slow) > 1 else "A command"
        yield _symptom(
            "slow-commands",
            f"{many} kept all clients of Redis at {it.url} waiting for {_SLOW_MS} ms or more in the last hour, the "
            f"slowest for {worst_ms:,.0f} ms: {name}",
            {"commands": len(slow), "slowest_ms": round(worst_ms, 1), "command": name},
            "redis-cli SLOWLOG GET",
        )


def _acl(it: _Server) -> Iterator[_Symptom]:
    recent = [entry for entry in it.denied or () if float(entry.get("age-seconds", 0)) <= _HOUR_S]
    again = "After a correction, redis-cli ACL LOG RESET forgets it"
    for (user, why), entries in _by_user(recent).items():
        names = sorted({_refused_name(it, why, entry.get("object", "")) for entry in entries} - {""})
        if why == "command" and names:
            what = f"the commands {' '.join(names)}, which bulltask needs, directly or in scripts"
            line = f"redis-cli ACL SETUSER {quote(user)} {' '.join(f'+{name}' for name in names)}"
        elif why == "key" and names:
            what = f"{counted(len(names), 'key')} of queues, such as {names[0]}"
            line = f"bulltask acl worker --user {quote(user)}"
        elif why == "auth":
            times = sum(int(entry.get("count", 1)) for entry in entries)
            sentence = f"Redis at {it.url} has rejected a password of user {user} {counted(times, 'time')}. {again}"
            yield _symptom("acl", sentence, {"user": user, "rejected": times}, "redis-cli ACL LOG", severity="warning")
            continue
        else:
            continue
        sentence = f"Redis at {it.url} has refused user {user} {what}. {again}"
        yield _symptom("acl", sentence, {"user": user, f"{why}s": names[:_SHOWN]}, line)


def _by_user(entries: Sequence[Mapping[str, str]]) -> Mapping[tuple[str, str], list[Mapping[str, str]]]:
    found: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for entry in entries:
        found.setdefault((entry.get("username", ""), entry.get("reason", "")), []).append(entry)
    return found


def _refused_name(it: _Server, why: str, what: str) -> str:
    """Return a refused command or key, ``""`` if bulltask does not need it."""
    if why == "command":
        return what.lower() if what.lower() in role_grants(NEEDED_BY_JOBS).commands else ""
    return what if what.startswith((f"{it.prefix}:", "bulltask:")) else ""


_OF_SERVER: Final[Sequence[tuple[Check, Callable[[_Server], Iterator[_Symptom]]]]] = (
    (Check("eviction", "broken", "Redis may delete jobs: `maxmemory-policy` is not `noeviction`"), _eviction),
    (
        Check("no-persistence", "warning", "Redis stores nothing on disk, or cannot: a restart loses all jobs"),
        _persistence,
    ),
    (Check("old-redis", "warning", "Redis is older than 6.2"), _version),
    (Check("clocks-apart", "warning", REASONS["clocks-apart"]), _clocks),
    (Check("memory", "warning", "Redis' memory is nearly full"), _memory),
    (Check("connections", "warning", "Redis has nearly as many connections as it allows"), _connections),
    (Check("slow-commands", "warning", "slow commands have kept all clients waiting in the last hour"), _slow),
    (
        Check("acl", "broken", "Redis has refused calls that bulltask or BullMQ need, or a password, in the last hour"),
        _acl,
    ),
)


# ---- a queue ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Queue:
    """What was read about a queue."""

    keys: QueueKeys
    context: QueueContext
    figures: QueueFigures
    workers: int | None
    readers: int = 0
    version: str = ""
    stream: StreamRetention | None = None
    schedulers: int = 0
    debounced: int = 0
    deduplicated: int = 0
    has_twin: bool = False

    @property
    def name(self) -> str:
        """The queue's name in the app."""
        return self.keys.queue

    @property
    def is_blank(self) -> bool:
        """Whether there is nothing whose state could be sick."""
        return not (any(self.figures.jobs.values()) or self.figures.is_paused or self.schedulers or self.has_twin)

    @property
    def may_be_held(self) -> bool:
        """Whether there is something that a reason could hold."""
        finished = self.figures.completed + self.figures.failed
        has_open = sum(self.figures.jobs.values()) > finished
        return has_open or self.figures.is_paused or self.schedulers > 0 or self.has_twin

    @property
    def has_work(self) -> bool:
        """Whether a job needs a worker, other than the next ones of schedulers."""
        figures = self.figures
        return bool(figures.waiting or figures.active or figures.delayed > self.schedulers)

    def major(self) -> int | None:
        """The major version of the client that has written the queue's metadata last."""
        match = _BULLMQ.match(self.version)
        return int(match[1]) if match else None

    def calls(self) -> list[Call[Any]]:
        """Return the calls of :meth:`take`."""
        return [
            command("HMGET", self.keys.meta, "version", "opts.maxLenEvents", parse_reply=_decoded),
            command("ZCARD", self.keys.repeat),
            stream_info(self.keys),
            read_back(self.keys, "+", "-", _EVENTS),
        ]

    def take(self, meta: Any, schedulers: Any, stream: Any, events: Any) -> None:
        """Take the replies; a reply may be an error, as that of a stream that does not exist."""
        if not isinstance(meta, BulltaskError):
            self.version = meta[0]
            limit = int(meta[1]) if meta[1].isdecimal() else DEFAULT_LENGTH
            self.stream = None if isinstance(stream, BulltaskError) else _retention(self.name, stream, limit)
        self.schedulers = schedulers if isinstance(schedulers, int) else 0
        names = Counter(() if isinstance(events, BulltaskError) else (fields.get(b"event") for _, fields in events))
        self.debounced = names[b"debounced"]
        self.deduplicated = names[b"deduplicated"]


def _retention(queue: str, stream: StreamInfo, limit: int) -> StreamRetention | None:
    """Return how long a stream keeps events, at the mean rate of those in it; ``None`` if it is not full yet."""
    if not stream.first or stream.length < limit:
        return None
    span_ms = id_parts(stream.last)[0] - id_parts(stream.first)[0]
    return StreamRetention(queue, stream.length, limit, busiest_rate([(stream.length, span_ms)]))


def _decoded(reply: Any) -> list[str]:
    return [codec.decode_text(value or b"") for value in reply]


def _schedules(it: _Queue) -> Iterator[_Symptom]:
    if it.schedulers and it.workers == 0:
        many = counted(it.schedulers, "job scheduler")
        sentence = f"Queue {it.name} has {many}, and no worker, so the next run will be late, and no other follows"
        yield _symptom(
            "schedule-without-worker",
            sentence,
            {"schedulers": it.schedulers, "workers": 0},
            f"bulltask worker -A APP -Q {quote(it.name)}",
        )


def _mixed_versions(it: _Queue) -> Iterator[_Symptom]:
    major = it.major()
    six = {
        "meta.version": major is not None and major > 5,
        "a paused queue with jobs in `wait`": it.figures.is_paused and it.figures.wait > 0,
        "deduplicated jobs without `debounced` events": it.deduplicated > it.debounced,
    }
    five = {
        "meta.version": major == 5,
        "jobs in `paused`": it.figures.paused > 0,
        "`debounced` events": it.debounced > 0,
        "workers of bulltask": bool(it.figures.workers),
    }
    if not (any(six.values()) and any(five.values())):
        return
    # bulltask itself has the protocol of BullMQ 5, but resumes without a loss.
    is_node = major == 5 and it.version != PROTOCOL_VERSION
    only_bulltask = bool(it.figures.workers) and not is_node
    who = "bulltask, which has the protocol of BullMQ 5," if only_bulltask else "clients of BullMQ 5"
    yield _symptom(
        "mixed-bullmq",
        f"Clients of BullMQ 6, and {who} use queue {it.name}: pause and resume it only with bulltask or BullMQ 6, "
        "because BullMQ 5 would lose jobs",
        {
            "meta.version": it.version,
            "BullMQ 6": [what for what, is_true in six.items() if is_true],
            "BullMQ 5": [what for what, is_true in five.items() if is_true],
        },
        f"bulltask queue resume {quote(it.name)}" if it.figures.is_paused else None,
        severity="notice" if only_bulltask else None,
    )


def _old_version(it: _Queue) -> Iterator[_Symptom]:
    if (major := it.major()) is not None and major < 5:
        sentence = f"A client of {it.version} uses queue {it.name}: it does not see all jobs of BullMQ 5, so upgrade it"
        yield _symptom("old-bullmq", sentence, {"meta.version": it.version}, "redis-cli CLIENT LIST")


def _stream(it: _Queue) -> Iterator[_Symptom]:
    if it.stream is not None and it.readers:
        what = f"its {counted(it.readers, 'reader')} would miss events while they reconnect"
        yield from _too_short(it.stream, _NEED, what, {"readers": it.readers})


def _too_short(
    stream: StreamRetention, need: RetentionNeed, then: str, evidence: Mapping[str, Any]
) -> Iterator[_Symptom]:
    """Judge the stream of a queue that somebody reads; ``then`` is what happens if it is too short."""
    if stream.is_enough(need) is False and stream.retention_s is not None:
        yield _symptom(
            "stream-too-short",
            f"The event stream of queue {stream.queue} keeps {stream.limit:,} events, those of "
            f"{stream.retention_s:,.1f} s: {then}. Set max_events, which workers write when they start, and "
            "streams.events.maxLen in Node.js",
            {
                "length": stream.length,
                "maxLenEvents": stream.limit,
                "keeps_s": round(stream.retention_s, 3),
                "needs_s": need.seconds,
                **evidence,
            },
            f"app.queue({stream.queue!r}).set_meta({{'opts.maxLenEvents': {stream.recommended_limit(need)}}})",
        )


_OF_QUEUE: Final[Sequence[tuple[Check, Callable[[_Queue], Iterator[_Symptom]]]]] = (
    (
        Check("schedule-without-worker", "broken", "a queue has job schedulers, but no worker that runs their jobs"),
        _schedules,
    ),
    (
        Check("mixed-bullmq", "warning", "clients of BullMQ 5 and of BullMQ 6 use a queue: pausing it may lose jobs"),
        _mixed_versions,
    ),
    (Check("old-bullmq", "broken", "a client older than BullMQ 5 uses a queue, whose keys differ"), _old_version),
    (
        Check("stream-too-short", "warning", "a queue's event stream drops events before its readers can read them"),
        _stream,
    ),
)

_SICK: Final[Mapping[str, Severity]] = {
    **dict.fromkeys(("redis-unreachable", "redis-loading", "redis-full", "redis-read-only"), "broken"),
    **dict.fromkeys(
        ("hash-gone", "lost", "wrong-hash-tag", "child-failed", "child-gone", "no-stalled-check"), "broken"
    ),
    **dict.fromkeys(("child-stopped", "schedule-late", "unknown-task", "incompatible", "paused-apart"), "broken"),
    **dict.fromkeys(("no-worker", "no-children", "worker-silent", "not-acquired"), "broken"),
    **dict.fromkeys(("deduplicated", "foreign", "lock-expired", "worker-gone", "paused", "workers-closing"), "warning"),
    **dict.fromkeys(("workers-paused", "queue-cancelled", "no-permits", "clocks-apart"), "warning"),
}
"""Those reasons of :data:`bulltask.queue.reasons.REASONS` that are sicknesses; others are the normal course."""

_ONLY_SOME: Final = {"deduplicated": "a deduplication id keeps new jobs out, although its job is gone"}
_OF_REDIS: Final = frozenset({"redis-unreachable", "redis-loading", "redis-full", "redis-read-only"})
_OF_JOBS: Final = frozenset({"hash-gone", "foreign", "lost", "no-stalled-check"})
"""Reasons of single jobs."""

_OF_KEYS: Final = (
    Check("keys-without-owner", "warning", "keys of jobs, schedulers or queues that do not exist"),
    Check("crash-record-without-job", "warning", "a record of crashes whose job was removed"),
)

CHECKS: Final[Mapping[str, Check]] = {
    check.code: check
    for check in (
        *(check for check, _ in _OF_SERVER),
        *(check for check, _ in _OF_QUEUE),
        *_OF_KEYS,
        *(Check(code, severity, _ONLY_SOME.get(code, REASONS[code])) for code, severity in _SICK.items()),
    )
}
"""All checks by their codes."""


# ---- the examination -------------------------------------------------------------------------------------------------


def examine(
    broker: Broker,
    queues: Sequence[QueueKeys],
    context_of: Callable[[str], QueueContext],
    *,
    budget_s: float = 10.0,
    scanned_all: bool = True,
    chosen: bool = False,
) -> Diagnosis:
    """Examine a server and its queues, for about ``budget_s`` seconds.

    ``context_of`` returns the context of a queue by its name in the app. ``scanned_all`` is false if there may be
    further queues, and ``chosen`` is true if there are, but only these are to be examined.
    """

    def run(examination: _Examination) -> None:
        examination.run(queues, scanned_all=scanned_all, chosen=chosen)

    return _examined(broker, context_of, budget_s, len(queues), run)


def examine_streams(
    broker: Broker, streams: Sequence[StreamRetention], need: RetentionNeed, context_of: Callable[[str], QueueContext]
) -> Diagnosis:
    """Examine a server, and the event streams that a pipeline records, which should keep events for ``need``."""
    return _examined(broker, context_of, 0.0, len(streams), lambda it: it.run_for_pipeline(streams, need))


def _examined(
    broker: Broker,
    context_of: Callable[[str], QueueContext],
    budget_s: float,
    queues: int,
    run: Callable[[_Examination], None],
) -> Diagnosis:
    with broker.pool.client() as client:
        examination = _Examination(broker, client, context_of, mono_s() + budget_s)
        begun_s = mono_s()
        try:
            client.connect()
            run(examination)
        except BrokerError as exc:
            for reason in unreachable("", None, exc).reasons:  # or raises another error
                examination.add(None, (reason, None, None))
        found = sorted(examination.findings, key=lambda it: (SEVERITIES.index(it.severity), it.queue or ""))
        return Diagnosis(found, examination.not_examined, queues, examination.keys_read, mono_s() - begun_s)


class _Examination:
    """One examination; ``findings`` and ``not_examined`` grow while it runs."""

    def __init__(
        self, broker: Broker, client: SyncClient, context_of: Callable[[str], QueueContext], ends_s: float
    ) -> None:
        self.broker = broker
        self.client = client
        self.context_of = context_of
        self.ends_s = ends_s
        self.findings: list[Finding] = []
        self.not_examined: list[str] = []
        self.keys_read = 0
        self._said: set[str] = set()

    def run(self, queues: Sequence[QueueKeys], *, scanned_all: bool, chosen: bool) -> None:
        """Examine the server, its queues, and its keys."""
        server = self._examine_server()
        if not scanned_all:
            self.not_examined.append("queues that only Node.js uses: Redis has more keys than were searched for them")
        found = self._read_queues(queues, server.now_ms)
        for queue in found:
            for check, judge_queue in _OF_QUEUE:
                self._add_all(queue.name, check, judge_queue(queue))
        self._explain_all(sorted((queue for queue in found if not queue.is_blank), key=lambda it: -it.figures.waiting))
        known = None if chosen else {keys.name for keys in queues}
        _Keys(self, {queue.keys.name: queue for queue in found}, server, known).scan()

    def run_for_pipeline(self, streams: Sequence[StreamRetention], need: RetentionNeed) -> None:
        """Examine the server, and the streams that a pipeline records."""
        self._examine_server()
        self._explain_redis()
        then = f"the pipeline needs those of {need.seconds:,.0f} s, or loses events"
        for stream in streams:
            self._add_all(stream.queue, CHECKS["stream-too-short"], _too_short(stream, need, then, {}))

    def _examine_server(self) -> _Server:
        server = _Server(self.broker, self.client)
        server.read(self._refused)
        for check, judge in _OF_SERVER:
            self._add_all(None, check, judge(server))
        return server

    def _explain_redis(self) -> None:
        """Add what is wrong with Redis itself, whose state an explanation of any queue has."""
        explanation = self._run(explain_queue(self.context_of(self.broker.config.default_queue)))
        self._add_reasons(None, explanation, _OF_REDIS)

    def _add_all(self, queue: str | None, check: Check, symptoms: Iterator[_Symptom]) -> None:
        for symptom in symptoms:
            self.add(queue, symptom, check)

    def _explain_all(self, busy: Sequence[_Queue]) -> None:
        """Explain the queues that have jobs, those first in which most jobs wait."""
        until_s = mono_s() + _QUEUES_SHARE * (self.ends_s - mono_s())
        if not any(queue.may_be_held for queue in busy):  # but Redis itself may be sick
            self._explain_redis()
        for number, queue in enumerate(busy):
            if number and mono_s() > until_s:
                self.not_examined.append(f"{len(busy) - number:,} of {len(busy):,} queues with jobs: no time was left")
                break
            if queue.may_be_held:
                self._explain(queue)
            self._look_at_members(queue)

    def _run(self, operation: Operation[Explanation]) -> Explanation:
        return run_sync(self.client, operation)

    def _refused(self, what: str, exc: BulltaskError) -> None:
        self.not_examined.append(f"{what}: {exc}")

    def add(self, queue: str | None, symptom: _Symptom, check: Check | None = None) -> None:
        """Add what a check has found."""
        reason, severity, fix = symptom
        check = check or CHECKS[reason.code]
        self.findings.append(Finding(severity or check.severity, queue, reason, fix))

    def _read_queues(self, queues: Sequence[QueueKeys], now_ms: int) -> list[_Queue]:
        hash_tag, found, spelled = self.broker.config.queue_hash_tag, list[_Queue](), list[QueueOverview]()
        readers = self._readers()
        for overview in read_overview(self.client, queues, now_ms):
            keys = overview.keys
            if bullmq_name(keys.queue, hash_tag=hash_tag) != keys.name:
                spelled.append(overview)
            else:
                found += self._queue(overview, readers)
        for start in range(0, len(found), _SAMPLE):
            part = found[start : start + _SAMPLE]
            replies = self.client.try_many([call for queue in part for call in queue.calls()])
            for number, queue in enumerate(part):
                queue.take(*replies[4 * number : 4 * number + 4])
        self._judge_spelled(spelled, {queue.name: queue for queue in found})
        return found

    def _judge_spelled(self, spelled: Sequence[QueueOverview], found: Mapping[str, _Queue]) -> None:
        """Judge the queues that this app would spell in another way, with or without a hash tag."""
        option = "--no-queue-hash-tag" if self.broker.config.queue_hash_tag else "--queue-hash-tag"
        for overview in spelled:
            keys, figures = overview.keys, overview.figures
            has_jobs = not isinstance(figures, BulltaskError) and figures.waiting > 0
            if (twin := found.get(keys.queue)) is not None:
                twin.has_twin = True
            elif has_jobs and overview.workers == 0:
                evidence = {"queue": keys.name, "waiting": figures.waiting, "workers": 0}  # type: ignore[union-attr]
                sentence = (
                    f"Jobs wait in the queue {keys.name}, which has no workers, and which this app would spell "
                    f"{bullmq_name(keys.queue, hash_tag=self.broker.config.queue_hash_tag)}: queue_hash_tag must be "
                    "the same wherever jobs are sent and run"
                )
                line = f"bulltask why -Q {quote(keys.queue)} {option}"
                self.add(keys.queue, _symptom("wrong-hash-tag", sentence, evidence, line))
        if spelled:
            names = [overview.keys.name for overview in spelled]
            listed = ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
            self.not_examined.append(f"{counted(len(names), 'queue')} with another spelling ({listed}): pass {option}")

    def _queue(self, overview: QueueOverview, readers: Counter[str]) -> Iterator[_Queue]:
        keys, figures = overview.keys, overview.figures
        try:
            self.broker.keys(keys.queue)
        except BulltaskError as exc:  # a name that only other clients accept
            figures = exc
        if isinstance(figures, BulltaskError):
            self.not_examined.append(f"queue {keys.queue}: {figures}")
        else:
            yield _Queue(keys, self.context_of(keys.queue), figures, overview.workers, readers[keys.name])

    def _readers(self) -> Counter[str]:
        """Count the connections that read events, by queue."""
        prefix = self.broker.config.prefix
        try:
            rows = self.client.run(list_clients(f"{prefix}:", f"{prefix}:", database=self.client.database))
        except BulltaskError as exc:
            self._refused("workers of Node.js, and readers of events (CLIENT LIST)", exc)
            return Counter()
        named = (queue_of_connection(row.name, prefix) for row in rows)
        return Counter(queue for queue, kind in named if kind == "qe")

    def _explain(self, queue: _Queue) -> None:
        explanation = self._run(explain_queue(queue.context))
        ignored = set() if queue.has_work else {"no-worker", "workers-closing", "workers-paused", "no-children"}
        self._add_reasons(queue, explanation, _SICK.keys() - _OF_JOBS - {"deduplicated"} - ignored)
        for job_id in self._next_jobs(queue):
            of_job = self._run(explain_job(queue.context, job_id))
            self._add_reasons(queue, of_job, _SICK.keys() - {*explanation.codes, *ignored, "deduplicated"})
        for reason in explanation.reasons:
            if reason.code == "lock-expired":
                of_job = self._run(explain_job(queue.context, reason.evidence["jobs"][0]))
                self._add_reasons(queue, of_job, {"no-stalled-check"})
            elif reason.code == "cannot-see" and reason.sentence not in self._said:
                self._said.add(reason.sentence)
                self.not_examined.append(f"queue {queue.name}, in part: {reason.sentence}")

    def _next_jobs(self, queue: _Queue) -> list[str]:
        """Return the job that runs next, of which an explanation of the queue does not say everything."""
        keys = queue.keys
        next_ones = [
            command("LRANGE", keys.wait, -1, -1, parse_reply=texts),
            command("ZRANGE", keys.prioritized, 0, 0, parse_reply=texts),
        ]
        replies = self.client.try_many(next_ones)
        return [it for reply in replies if not isinstance(reply, BulltaskError) for it in reply][:1]

    def _add_reasons(self, queue: _Queue | None, explanation: Explanation, wanted: Any) -> None:
        for reason in explanation.reasons:
            if reason.code not in wanted or (reason.code == "clocks-apart" and reason.certainty == "likely"):
                continue  # this machine's clock was judged with the server
            if reason.certainty == "cannot see":
                self.not_examined.append(reason.sentence)
                continue
            if reason.code in _OF_REDIS:
                if reason.code not in self._said:
                    self._said.add(reason.code)
                    self.add(None, (reason, None, None))
                continue
            fix = None if queue is None else self._fix(queue, reason)
            self.add(None if queue is None else queue.name, (reason, None, fix))

    def _fix(self, queue: _Queue, reason: Reason) -> Fix | None:
        """Return what mends a reason without a decision."""
        context = queue.context

        def resume() -> str:
            if context.run(command("HEXISTS", context.keys.meta, "paused", parse_reply=bool)):
                return f"not done: queue {queue.name} has been paused meanwhile"
            context.run(set_paused(context, paused=False))
            return f"the lists of queue {queue.name} were merged"

        def release() -> str:
            released = context.run(check_stalled(context, None))
            if released:
                return f"{counted(len(released), 'job')} of queue {queue.name} released, to run again"
            return f"the jobs of queue {queue.name} are marked: repeat --fix after {interval_s:g} s, to release them"

        interval_s = context.broker.config.stalled_interval_ms / 1000
        if reason.code == "paused-apart" and not queue.figures.is_paused:
            return Fix(f"merge the lists `wait` and `paused` of queue {queue.name}, which is not paused", resume)
        if reason.code == "no-stalled-check" or (reason.code == "lock-expired" and queue.workers == 0):
            return Fix(f"look for stalled jobs in queue {queue.name}, as a worker does", release)
        return None

    def _look_at_members(self, queue: _Queue) -> None:
        """Find ids in the queue's states whose hash is missing or malformed, in a sample from both ends of each."""
        keys, last = queue.keys, _SAMPLE - 1
        calls: list[Call[list[str]]] = []
        for name in LISTS:
            calls += [
                command("LRANGE", keys.base + name, *ends, parse_reply=texts) for ends in ((0, last), (-last, -1))
            ]
        for name in SETS:
            calls.append(command("ZRANGE", keys.base + name, 0, last, parse_reply=texts))
            calls.append(command("ZRANGE", keys.base + name, 0, last, "REV", parse_reply=texts))
        replies = self.client.try_many(calls)
        ids = dict.fromkeys(it for reply in replies if not isinstance(reply, BulltaskError) for it in reply)
        sample = [job_id for job_id in ids if not job_id.startswith("0:")]  # not the markers of BullMQ 4
        named = self.client.try_many([command("HEXISTS", keys.job(job_id), "name") for job_id in sample])
        suspects = [
            it for it, reply in zip(sample, named, strict=True) if reply == 0 or isinstance(reply, BulltaskError)
        ]
        self.add_jobs(queue, suspects, {"hash-gone", "foreign"})

    def add_jobs(self, queue: _Queue, suspects: Sequence[str], wanted: set[str]) -> None:
        """Add what is wrong with jobs, once for each code, if an explanation confirms it."""
        found: dict[str, list[tuple[str, Reason]]] = {}
        for job_id in suspects[:_SHOWN]:
            for reason in self._run(explain_job(queue.context, job_id)).reasons:
                if reason.code in wanted and reason.evidence.get("owner exists") is not True:
                    found.setdefault(reason.code, []).append((job_id, reason))
        for jobs in found.values():
            job_id, reason = jobs[0]
            number = len(suspects) if len(jobs) == min(_SHOWN, len(suspects)) else len(jobs)
            more = f" (and {number - 1} more)" if number > 1 else ""
            evidence = {**reason.evidence, "jobs": [it for it, _ in jobs], "number": number}
            of = "" if reason.code == "deduplicated" else f"Job {job_id}{more}: "
            self.add(queue.name, (replace(reason, sentence=f"{of}{reason.sentence}", evidence=evidence), None, None))


@dataclass(slots=True)
class _Keys:
    """The scan of all keys under the prefix: what it has found so far, by queue."""

    examination: _Examination
    queues: Mapping[str, _Queue]
    server: _Server
    known: set[str] | None
    orphans: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    lost: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    records: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    dedup_ids: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    of_no_queue: dict[str, str] = field(default_factory=dict)
    _listed: dict[str, set[str] | None] = field(default_factory=dict)
    _unsearched: set[str] = field(default_factory=set)

    def scan(self) -> None:
        """Look at the keys until the time is over, and add what is confirmed at the end."""
        client, is_complete = self.examination.client, True
        addresses: Sequence[Any] = list(client.nodes()) if isinstance(client, ClusterClient) else [None]
        for address in addresses:
            try:
                is_complete &= self._scan_node(address)
            except BrokerAuthError as exc:
                self.examination.not_examined.append(f"keys (SCAN): {exc}")
        if not is_complete:
            total = sum(_keys_of(node, client.database) for node in self.server.nodes)
            of = f" of about {total:,}" if total else ""
            self.examination.not_examined.append(
                f"keys: {self.examination.keys_read:,}{of} were looked at, in random order; --budget allows more time"
            )
        if self._unsearched:
            names = ", ".join(sorted(self._unsearched)[:_SHOWN])
            self.examination.not_examined.append(
                f"lost jobs of queues with more than {_MAX_LISTED:,} waiting or active jobs: {names}"
            )
        self._confirm()

    def _scan_node(self, address: Any) -> bool:
        client, cursor = self.examination.client, "0"
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", self.server.prefix) + ":*"
        while True:
            page = command("SCAN", cursor, "MATCH", pattern, "COUNT", _PER_PAGE, parse_reply=_scanned)
            if isinstance(client, ClusterClient):
                cursor, names = client.run_at(address, page)
            else:
                cursor, names = client.run(page)
            self._look_at(names)
            self.examination.keys_read += len(names)
            if cursor == "0":
                return True
            if mono_s() > self.examination.ends_s:
                return False

    def _look_at(self, names: Sequence[str]) -> None:
        """Sort keys into those of a queue, beside a job, and of jobs, and judge them."""
        jobs, parts, ids = list[tuple[_Queue, str]](), list[tuple[_Queue, str]](), list[tuple[_Queue, str]]()
        calls = list[Call[Any]]()
        for name in names:
            _, queue_name, rest = address_of(name, self.server.prefix)
            queue = self.queues.get(queue_name)
            if queue is None:
                self._note_unknown(queue_name, name, rest)
            elif rest.startswith("de:"):
                ids.append((queue, rest.removeprefix("de:")))
            elif (owner := self._owner(queue.keys, rest)) is not None:
                parts.append((queue, name))
                calls.append(owner)
            elif rest and not is_queue_key(rest):
                jobs.append((queue, rest))
        for (queue, name), found in zip(parts, self._try(calls), strict=True):
            if found is False and len(self.orphans[queue.keys.name]) < _MAX_CANDIDATES:
                self.orphans[queue.keys.name].append(name)
        self._look_at_ids(ids)
        self._look_at_jobs(jobs)

    def _note_unknown(self, queue: str, name: str, rest: str) -> None:
        """Note the key of a queue that is unknown, unless it is another program's key without a queue."""
        if self.known is not None and queue not in self.known and rest and len(self.of_no_queue) < _SAMPLE:
            self.of_no_queue.setdefault(queue, name)

    def _try(self, calls: Sequence[Call[Any]]) -> list[Any]:
        return self.examination.client.try_many(calls) if calls else []

    def _owner(self, keys: QueueKeys, rest: str) -> Call[bool] | None:
        """Return the call that says whether the owner of a key exists; ``None`` for keys of queues, and jobs."""
        if part := next((end for end in _JOB_PARTS if rest.endswith(end)), ""):
            return command("EXISTS", keys.job(rest.removesuffix(part)), parse_reply=bool)
        if rest.startswith("repeat:") and is_queue_key(rest):  # a scheduler, not one of its jobs
            scheduler = rest.removeprefix("repeat:")
            return command("ZSCORE", keys.repeat, scheduler, parse_reply=lambda reply: reply is not None)
        return None

    def _look_at_ids(self, ids: Sequence[tuple[_Queue, str]]) -> None:
        """Note deduplication ids whose job is gone, unless they end by themselves."""
        calls = list[Call[Any]]()
        for queue, dedup in ids:
            calls.append(command("PTTL", queue.keys.deduplication(dedup)))
            calls.append(command("GET", queue.keys.deduplication(dedup), parse_reply=codec.decode_text))
        replies = self._try(calls)
        rows = zip(ids, replies[::2], replies[1::2], strict=True)
        endless = [(*of, owner) for of, ttl_ms, owner in rows if ttl_ms == -1 and isinstance(owner, str)]
        exist = self._try([command("EXISTS", queue.keys.job(owner)) for queue, _, owner in endless])
        for (queue, dedup, _), exists in zip(endless, exist, strict=True):
            if exists == 0 and len(self.dedup_ids[queue.keys.name]) < _MAX_CANDIDATES:
                self.dedup_ids[queue.keys.name].append(dedup)

    def _look_at_jobs(self, jobs: Sequence[tuple[_Queue, str]]) -> None:
        calls = list[Call[Any]]()
        for queue, job_id in jobs:
            calls.append(command("HMGET", queue.keys.job(job_id), "name", CRASHES))
            calls.append(command("ZSCORE", queue.keys.completed, job_id))
        replies, unfinished = self._try(calls), list[tuple[_Queue, str]]()
        for (queue, job_id), hashed, completed in zip(jobs, replies[::2], replies[1::2], strict=True):
            if _is_record(hashed):
                self.records[queue.keys.name].append(job_id)
            elif completed is None and isinstance(hashed, list) and hashed[0] is not None:  # not another program's key
                unfinished.append((queue, job_id))
        self._look_at_lists(unfinished)

    def _look_at_lists(self, jobs: Sequence[tuple[_Queue, str]]) -> None:
        for queue, job_id in self._in_no_set(jobs):
            listed = self._ids_in_lists(queue)
            if listed is None:
                self._unsearched.add(queue.name)
            elif job_id not in listed and len(self.lost[queue.keys.name]) < _MAX_CANDIDATES:
                self.lost[queue.keys.name].append(job_id)

    def _in_no_set(self, jobs: Sequence[tuple[_Queue, str]]) -> list[tuple[_Queue, str]]:
        """Return the jobs that have no lock, and are in no sorted set."""
        calls = list[Call[Any]]()
        for queue, job_id in jobs:
            calls.append(command("EXISTS", queue.keys.lock(job_id), parse_reply=lambda reply: reply or None))
            calls += [command("ZSCORE", f"{queue.keys.base}{state}", job_id) for state in SETS]
        replies, width = self._try(calls), 1 + len(SETS)
        rows = [replies[start : start + width] for start in range(0, len(replies), width)]
        return [job for job, row in zip(jobs, rows, strict=True) if all(reply is None for reply in row)]

    def _ids_in_lists(self, queue: _Queue) -> set[str] | None:
        """Return all ids in the queue's lists, read once; ``None`` if there are too many."""
        name, keys = queue.keys.name, queue.keys
        if name not in self._listed:
            lengths = self._try([command("LLEN", keys.base + each) for each in LISTS])
            if any(isinstance(length, BulltaskError) for length in lengths) or sum(lengths) > _MAX_LISTED:
                self._listed[name] = None
            else:
                pages = [
                    command("LRANGE", keys.base + each, start, start + 999, parse_reply=texts)
                    for each, length in zip(LISTS, lengths, strict=True)
                    for start in range(0, length, 1_000)
                ]
                replies = self._try(pages)
                found = {it for page in replies if not isinstance(page, BulltaskError) for it in page}
                self._listed[name] = found
        return self._listed[name]

    def _confirm(self) -> None:
        """Look again at what was found, because jobs move and are removed meanwhile, and add what has remained."""
        self._add_unknown_queues()
        for name, queue in self.queues.items():
            if lost := self._still_lost(queue, self.lost[name]):
                self.examination.add_jobs(queue, lost, {"lost"})
            self._add_records(queue, self.records[name])
            self._add_orphans(queue, self.orphans[name])
            self.examination.add_jobs(queue, self.dedup_ids[name], {"deduplicated"})

    def _add_unknown_queues(self) -> None:
        metas: list[Call[Any]] = [
            command("EXISTS", QueueKeys(self.server.prefix, name).meta) for name in self.of_no_queue
        ]
        have_meta = self._try(metas)
        names = [name for name, exists in zip(self.of_no_queue, have_meta, strict=True) if exists == 0]
        if names:
            keys = [self.of_no_queue[name] for name in names]
            many = f"{counted(len(names), 'queue')} without `meta`, such as {names[0]}"
            sentence = f"Redis at {self.server.url} has keys of {many}: left behind, or of Bull, BullMQ's predecessor"
            evidence = {"queues": names[:_SHOWN], "keys": keys[:_SHOWN]}
            line = f"redis-cli SCAN 0 MATCH {quote(f'{self.server.prefix}:{names[0]}:*')} COUNT 1000"
            self.examination.add(None, _symptom("keys-without-owner", sentence, evidence, line))

    def _still_lost(self, queue: _Queue, job_ids: Sequence[str]) -> list[str]:
        lists, calls = [f"{queue.keys.base}{name}" for name in LISTS], list[Call[Any]]()
        for job_id in job_ids:
            calls += [command("LPOS", key, job_id, "RANK", rank, "MAXLEN", 1_000) for key in lists for rank in (1, -1)]
        replies, width = self._try(calls), 2 * len(lists)
        rows = [replies[start : start + width] for start in range(0, len(replies), width)]
        unlisted = [(queue, it) for it, row in zip(job_ids, rows, strict=True) if all(reply is None for reply in row)]
        return [job_id for _, job_id in self._in_no_set(unlisted)]

    def _add_records(self, queue: _Queue, job_ids: Sequence[str]) -> None:
        keys = queue.keys
        named = self._try([command("HMGET", keys.job(job_id), "name", CRASHES) for job_id in job_ids])
        still = [it for it, row in zip(job_ids, named, strict=True) if _is_record(row)]
        if not still:
            return

        def apply() -> str:
            # If a job was added with the id, it keeps its record; and only these fields are removed.
            run_many = queue.context.broker.pool.run_many
            now = run_many([command("HMGET", keys.job(job_id), "name", CRASHES) for job_id in still])
            gone = [job_id for job_id, row in zip(still, now, strict=True) if _is_record(row)]
            if gone:
                run_many([command("HDEL", keys.job(job_id), *_CRASH_FIELDS) for job_id in gone])
            return f"{counted(len(gone), 'crash record')} of queue {queue.name} removed"

        many = counted(len(still), "removed job")
        sentence = f"{many} of queue {queue.name} left a record of crashes, such as {still[0]}"
        symptom = _symptom(
            "crash-record-without-job",
            sentence,
            {"jobs": still[:_SHOWN], "number": len(still)},
            " ".join(["redis-cli HDEL", quote(keys.job(still[0])), *_CRASH_FIELDS]),
            fix=Fix(f"remove {counted(len(still), 'crash record')} of queue {queue.name}", apply),
        )
        self.examination.add(queue.name, symptom)

    def _add_orphans(self, queue: _Queue, names: Sequence[str]) -> None:
        keys, calls = queue.keys, list[Call[Any]]()
        for name in names:
            owner = self._owner(keys, name.removeprefix(keys.base))
            assert owner is not None
            calls += [owner, command("EXISTS", name, parse_reply=bool)]
        replies = self._try(calls)
        pairs = zip(names, replies[::2], replies[1::2], strict=True)
        if still := [name for name, owner, exists in pairs if owner is False and exists is True]:
            are = (
                "belongs to a job or scheduler that does not exist"
                if len(still) == 1
                else ("belong to jobs or schedulers that do not exist")
            )
            sentence = f"{counted(len(still), 'key')} of queue {queue.name} {are}, such as {still[0]}"
            evidence = {"keys": still[:_SHOWN], "number": len(still)}
            line = " ".join(["redis-cli UNLINK", *map(quote, still[:_SHOWN])])
            self.examination.add(queue.name, _symptom("keys-without-owner", sentence, evidence, line))


def _is_record(fields: Any) -> bool:
    """Whether a hash, of which the name and the crashes were read, has nothing but the latter."""
    return isinstance(fields, list) and fields[0] is None and fields[1] is not None


def _scanned(reply: Any) -> tuple[str, list[str]]:
    return text(reply[0]), texts(reply[1])


def _keys_of(node: Mapping[str, str], database: int) -> int:
    """Return how many keys a node has: ``db0:keys=12,expires=3``."""
    match = re.match(r"keys=(\d+)", node.get(f"db{database}", ""))
    return int(match[1]) if match else 0
