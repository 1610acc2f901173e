"""``bulltask report``: what a ticket about a running system needs, in one text, without secrets."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import IO, Any, Final

import click

from bulltask.app import App
from bulltask.cli.app_loader import load_app_or_broker
from bulltask.cli.job import known_queues
from bulltask.cli.jobs import failures_json, failures_text, group_failures
from bulltask.cli.options import operator_options
from bulltask.cli.outbox import outbox_json, outbox_line
from bulltask.cli.terminal import as_table, duration_text, in_one_line, safe, stamp, time_of
from bulltask.cli.workers import task_names, worker_pages, workers_json
from bulltask.config.config import SETTINGS
from bulltask.config.urls import redact_secrets
from bulltask.lake.formatting import json_text
from bulltask.queue.fields import ALL_STATES
from bulltask.queue.overview import read_figures, read_fleet
from bulltask.transport.call import command, info_by_name
from bulltask.transport.scripts.queue import QueueFigures, get_meta

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
_MAX_EXPLAINED: Final = 20
_MAX_SCHEDULES: Final = 20


@click.command("report", short_help="Collect what a ticket needs, without secrets.")
@click.option("-o", "--output", type=click.File("w", "utf-8", lazy=True), help="Write to this file.")
@operator_options
def report(ctx: click.Context, /, *, output: IO[str] | None, as_json: bool, **options: Any) -> None:
    """Print versions, settings, Redis' state, queues, why jobs wait, schedules, workers, outboxes, frequent failures.

    Passwords, keys and tokens are replaced by ***. Names of queues, tasks and hosts, and texts of errors remain: read
    the report before you publish it.

    What Redis does not permit, or cannot answer, is listed. Exit codes: 0 (done), 1 (an error).
    """
    with closing(load_app_or_broker(ctx, options)) as app:
        collected, workers = _collect(app)
    document = _without_secrets(collected)
    text = json_text(document) if as_json else "\n".join(_text(document, _without_secrets(workers)))
    click.echo(text, file=output)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, str):
        return redact_secrets(value)
    if isinstance(value, Mapping):
        return {name: _without_secrets(item) for name, item in value.items()}
    return [_without_secrets(item) for item in value] if isinstance(value, list | tuple) else value


def _collect(app: App) -> tuple[dict[str, Any], list[str]]:
    """Return the document, and the lines about the workers."""
    missing: list[str] = []

    def attempt(what: str, read: Callable[[], Any], default: Any) -> Any:
        try:
            return read()
        except Exception as exc:  # noqa: BLE001 - such as a database's, or one in a module of the app
            missing.append(f"{what}: {exc}")
            return default

    attempt("the app's tasks", app._load_tasks, None)
    redis = attempt("Redis' state", lambda: _redis(app), {})
    names = attempt("the list of queues", lambda: known_queues(app), [])
    if len(names) > _MAX_QUEUES:
        missing.append(f"queues: only the first {_MAX_QUEUES} of {len(names):,} are here")
        names = names[:_MAX_QUEUES]

    @cache  # but no error is kept: each part that needs the figures reports it
    def figures() -> Mapping[str, QueueFigures]:
        with app._broker.pool.client() as client:
            return read_figures(client, list(map(app._broker.keys, names)))

    workers, worker_lines = attempt("the workers", lambda: _workers(app, names), ([], []))
    document = {
        "at": datetime.now(UTC).isoformat(),
        "versions": _versions(),
        "settings": _settings(app),
        "redis": redis,
        "queues": attempt("the queues", lambda: _queues(app, names, figures), []),
        "reasons": attempt("why jobs wait", lambda: _reasons(app, figures), []),
        "schedules": attempt("the schedules", lambda: _schedules(app, names), []),
        "workers": workers,
        "failures": attempt("the failures", lambda: _failures(app, names), []),
        "outboxes": attempt("the outboxes", lambda: [outbox_json(outbox.backlog()) for outbox in app._outboxes], []),
        "not_available": missing,
    }
    return document, worker_lines


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
            found[name] = str(sorted(map(str, value)) if isinstance(value, Mapping) else value)
    return found


def _redis(app: App) -> dict[str, str]:
    with app._broker.pool.client() as client:
        parts: list[bytes] = client.run_on_all_nodes(command("INFO"))
        config = info_by_name(parts[0])
    found = {name: config[name] for name in _INFO if name in config}
    return {"url": app._broker.endpoint.safe_url, "nodes": str(len(parts)), **found}


_ReadFigures = Callable[[], Mapping[str, QueueFigures]]


def _queues(app: App, names: list[str], read: _ReadFigures) -> list[dict[str, Any]]:
    calls = [get_meta(app._broker.keys(name)) for name in names]
    metas = app._broker.pool.run_many(calls) if calls else []
    figures = read()
    rows = []
    for name, meta in zip(names, metas, strict=True):
        found = figures[name]
        states = {state: found.jobs["wait" if state == "waiting" else state] for state in ALL_STATES}
        oldest = None if found.oldest_ms is None else found.oldest_ms / 1000
        rows.append({"queue": name, **states, "oldest_waiting": oldest, "meta": meta})
    return rows


def _reasons(app: App, read: _ReadFigures) -> list[dict[str, Any]]:
    """Return why jobs of the queues with the longest waiting jobs wait."""
    figures = read()
    waiting = [name for name, found in figures.items() if found.waiting or found.delayed or found.waiting_children]
    waiting.sort(key=lambda name: -(figures[name].oldest_ms or 0))
    explained = [app.queue(name).explain() for name in waiting[:_MAX_EXPLAINED]]
    return [
        {"queue": each.queue, "code": reason.code, "sentence": reason.sentence}
        for each in explained
        for reason in each.reasons
    ]


def _schedules(app: App, names: list[str]) -> list[dict[str, Any]]:
    """Return the next schedules of each queue, without their data."""
    return [
        {
            "queue": name,
            "id": item.id,
            "task": item.name,
            "rule": item.pattern or f"{item.every_ms} ms",
            "next": stamp(time_of(item.next_ms)) if item.paused_ms is None else "paused",
        }
        for name in names
        for schedulers in [app.queue(name).schedulers]
        for item in [*schedulers.list(0, _MAX_SCHEDULES - 1, asc=True), *schedulers.list_paused()[:_MAX_SCHEDULES]]
    ]


def _workers(app: App, names: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    with app._broker.pool.client() as client:
        client.connect()  # sets the clock
        now_ms = app._broker.clock.now_ms()
        fleet = read_fleet(client, list(map(app._broker.keys, names)), now_ms)
        tasks = task_names(client, app, fleet)
    return workers_json(app, fleet, tasks, now_ms)["workers"], list(worker_pages(app, fleet, tasks, now_ms))


def _failures(app: App, names: list[str]) -> list[dict[str, Any]]:
    groups = group_failures(app, names, scan=_MAX_FAILED).groups[:_MAX_GROUPS]
    return [{**failures_json(group), "example": group.example, "text": failures_text(group)} for group in groups]


def _text(document: Mapping[str, Any], workers: Sequence[str]) -> Iterator[str]:
    yield f"bulltask report, {document['at']}"
    for title, lines in _sections(document, workers).items():
        if lines:
            yield from ("", title, *lines)


def _sections(document: Mapping[str, Any], workers: Sequence[str]) -> dict[str, list[str]]:
    queues, reasons = document["queues"], document["reasons"]
    rows = [
        (each["queue"], *(f"{each[state]:,}" for state in ALL_STATES), duration_text(each["oldest_waiting"]))
        for each in queues
    ]
    metas = [", ".join(f"{name}={value}" for name, value in sorted(each["meta"].items())) for each in queues]
    return {
        **{
            title: [f"  {in_one_line(name)}: {in_one_line(str(value))}" for name, value in document[title].items()]
            for title in ("versions", "settings", "redis")
        },
        "queues": [as_table(("queue", *ALL_STATES, "oldest"), rows, list(map(in_one_line, metas)))] if rows else [],
        "why jobs wait": [f"  {in_one_line(it['queue'])}: {in_one_line(it['sentence'], 1_000)}" for it in reasons],
        "schedules": _table(document["schedules"], ("queue", "id", "task", "rule", "next")),
        "workers": [safe(page) for page in workers] or ["  none"],
        "failures": _table(document["failures"], ("count", "queue", "task", "last", "text")),
        "outboxes": [f"  {outbox_line(number, row)}" for number, row in enumerate(document["outboxes"])],
        "not available": [f"  {safe(line)}" for line in document["not_available"]],
    }


def _table(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    return [as_table(names, [[in_one_line(str(row[name]), 100) for name in names] for row in rows])] if rows else []
