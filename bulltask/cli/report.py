"""``bulltask report``: what a ticket about a running system needs, in one text, without secrets."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import IO, Any, Final

import click

from bulltask.app import App
from bulltask.cli.app_loader import load_app_or_broker
from bulltask.cli.job import known_queues
from bulltask.cli.jobs import group_failures
from bulltask.cli.options import json_option, redis_options
from bulltask.cli.terminal import as_table, in_one_line, safe
from bulltask.config.config import SETTINGS
from bulltask.config.urls import redact_text
from bulltask.jobs.codec import decode_text
from bulltask.jobs.errors import BrokerError
from bulltask.lake.formatting import json_text
from bulltask.queue.fields import ALL_STATES
from bulltask.transport.call import command

__all__ = ["report"]

_PACKAGES: Final = (
    *("bulltask", "redis", "hiredis", "click", "msgpack", "uuid-utils"),
    *("django", "sqlalchemy", "pydantic", "pyarrow", "pyspark", "celery"),
)
_INFO: Final = tuple(
    "redis_version valkey_version redis_mode server_mode os uptime_in_seconds connected_clients blocked_clients "
    "maxclients used_memory_human used_memory_peak_human maxmemory_human maxmemory_policy mem_fragmentation_ratio "
    "evicted_keys expired_keys keyspace_misses instantaneous_ops_per_sec rejected_connections loading aof_enabled "
    "rdb_bgsave_in_progress rdb_last_bgsave_status aof_last_write_status role connected_slaves master_link_status "
    "cluster_enabled db0".split()
)
_SECRET: Final = re.compile("key|password|secret|token|credential")
_MAX_QUEUES: Final = 200
_MAX_GROUPS: Final = 20
_MAX_FAILED: Final = 10_000


@click.command("report", short_help="Collect what a ticket needs, without secrets.")
@redis_options
@click.option("-o", "--output", type=click.File("w", "utf-8", lazy=True), help="Write to this file.")
@json_option
@click.pass_context
def report(ctx: click.Context, /, *, output: IO[str] | None, as_json: bool, **options: Any) -> None:
    """Print versions, changed settings, Redis' state, queues, workers, and the most frequent failures.

    Passwords and keys are replaced by ***. Names of queues, tasks and hosts, and texts of errors remain: read the
    report before you publish it.

    What Redis does not permit, or cannot answer, is listed. Exit codes: 0 (done), 1 (an error).
    """
    app = load_app_or_broker(ctx, options)
    try:
        document = _collect(app)
    finally:
        app.close()
    text = redact_text(json_text(document), json=True) if as_json else redact_text("\n".join(_text(document)))
    click.echo(text, file=output)


def _collect(app: App) -> dict[str, Any]:
    missing: list[str] = []

    def attempt(what: str, read: Callable[[], Any], default: Any) -> Any:
        try:
            return read()
        except BrokerError as exc:
            missing.append(redact_text(f"{what}: {exc}"))
            return default

    redis = attempt("Redis' state", lambda: _redis(app), {})
    names = attempt("the list of queues", lambda: known_queues(app), [])
    if len(names) > _MAX_QUEUES:
        missing.append(f"queues: only the first {_MAX_QUEUES} of {len(names):,} are here")
        names = names[:_MAX_QUEUES]
    return {
        "at": datetime.now(UTC).isoformat(),
        "versions": _versions(),
        "settings": _settings(app),
        "redis": redis,
        "queues": attempt("the queues", lambda: [_queue(app, name) for name in names], []),
        "workers": attempt("the workers", lambda: _workers(app, names), []),
        "failures": attempt("the failures", lambda: _failures(app, names), []),
        "not_available": missing,
    }


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _settings(app: App) -> dict[str, str]:
    """Return the settings that were changed, without secrets; of mappings, such as schedules, only the keys."""
    found: dict[str, str] = {}
    for name, declared in SETTINGS.items():
        value = getattr(app.conf, name)
        if value == declared.default:
            continue
        if declared.is_secret or _SECRET.search(name):
            found[name] = "***"
        else:
            found[name] = redact_text(str(sorted(map(str, value)) if isinstance(value, Mapping) else value))
    return found


def _redis(app: App) -> dict[str, str]:
    with app._broker.pool.client() as client:
        parts: list[bytes] = client.run_on_all_nodes(command("INFO"))
        config = _parsed(parts[:1])
    found = {name: config[name] for name in _INFO if name in config}
    return {"url": app._broker.endpoint.safe_url, "nodes": str(len(parts)), **found}


def _parsed(replies: Iterable[Any]) -> dict[str, str]:
    lines = (line for reply in replies for line in decode_text(reply).splitlines() if ":" in line)
    return dict(line.partition(":")[::2] for line in lines)


def _queue(app: App, name: str) -> dict[str, Any]:
    queue = app.queue(name)
    return {"queue": name, **queue.get_job_counts(*ALL_STATES), "meta": queue.get_meta()}


def _workers(app: App, names: list[str]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        for worker_id, state in app.queue(name).get_worker_states().items():
            found[worker_id] = {"id": worker_id, "state": "unknown"} if state is None else state.to_dict()
    return list(found.values())


def _failures(app: App, names: list[str]) -> list[dict[str, Any]]:
    options = {"since": None, "task": None, "error": None, "scan": _MAX_FAILED}
    return [
        {**group.to_json(), "example": group.example} for group in group_failures(app, names, options)[0][:_MAX_GROUPS]
    ]


def _text(document: Mapping[str, Any]) -> Iterator[str]:
    yield f"bulltask report, {document['at']}"
    for title in ("versions", "settings", "redis"):
        yield from ("", title)
        yield from (f"  {in_one_line(name)}: {in_one_line(str(value))}" for name, value in document[title].items())
    if rows := document["queues"]:
        yield from ("", "queues")
        table = [(queue["queue"], *(f"{queue[state]:,}" for state in ALL_STATES)) for queue in rows]
        yield as_table(("queue", *ALL_STATES), table)
        for queue in rows:
            meta = ", ".join(f"{name}={value}" for name, value in sorted(queue["meta"].items()))
            yield f"  {in_one_line(queue['queue'])}: {in_one_line(meta)}"
    yield from ("", f"workers: {len(document['workers'])}")
    for worker in document["workers"]:
        fields = {name: value for name, value in worker.items() if name not in {"children", "tasks"}}
        yield f"  {in_one_line(', '.join(f'{name}={value}' for name, value in fields.items()), 1_000)}"
        for child in worker.get("children", ()):
            yield f"    {in_one_line(str(child), 500)}"
    if rows := document["failures"]:
        yield from ("", "failures")
        head = ("count", "queue", "task", "last", "error")
        yield as_table(head, [[in_one_line(str(row[name]), 100) for name in head] for row in rows])
    if document["not_available"]:
        yield from ("", "not available")
        yield from (f"  {safe(line)}" for line in document["not_available"])
