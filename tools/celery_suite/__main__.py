"""Run Celery's integration tests, and the examples of its user guide, on bulltask: ``python -m tools celery-suite``.

Each failure has a class, which ``classes.toml`` records. If a test or an example that is recorded as working fails, or
the other way round, the tool fails; change the file if that is right.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from bulltask.testing.worker import RedisServer
from tools.celery_suite.guide import CODE, PAGES, SOURCE, blocks

ROOT: Final = Path(__file__).parents[2]
PYTHON: Final = ROOT / ".venv/celery-suite/bin/python"
TESTS: Final = ("test_canvas.py", "test_tasks.py")
WORKS: Final = ("passed", "xpassed")
CLASSES: Final = Path(__file__).with_name("classes.toml")
BUILD: Final = ROOT / "build/celery-suite"
Outcomes = dict[str, tuple[str, str]]
"""The outcome of each test or example (``passed``, ``failed``, ``skipped`` …), and its error."""


def download(release: str, *, install: bool) -> Path:
    """Return the directory with the tests of another release of Celery; install that release if it is to run them."""
    target, name = BUILD / release, f"celery=={release}"
    pip = [sys.executable, "-m", "pip", "--quiet"]
    if not (target / "t").exists():
        subprocess.run([*pip, "download", "--no-deps", "--no-binary=celery", f"--dest={target}", name], check=True)
        with tarfile.open(target / f"celery-{release}.tar.gz") as archive:
            top = f"celery-{release}/"
            members = [member for member in archive.getmembers() if member.name.startswith(f"{top}t/")]
            for member in members:
                member.name = member.name.removeprefix(top)
            archive.extractall(target, members, filter="data")
    if install and not (target / "celery").exists():
        subprocess.run([*pip, "install", "--no-deps", f"--target={target}", name], check=True)
    return target


def source() -> Path:
    """Return the directory with Celery's tests."""
    return Path(os.environ.get("SUITE_SOURCE", SOURCE))


def directory(library: str) -> Path:
    """Return the directory for logs and outcomes."""
    return BUILD / library


def environment(library: str, name: str, url: str) -> dict[str, str]:
    """Return the environment variables of a process that runs tests or examples."""
    return {
        **os.environ,
        "LIBRARY": library,
        "BULLTASK_WORKER_CONCURRENCY": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # it would import Celery
        "PYTHONPATH": f"{source()}:{ROOT}",
        "TEST_BROKER": url,
        "TEST_BACKEND": url,
        "REDIS_HOST": "127.0.0.1",
        "REDIS_PORT": url.rpartition(":")[2].partition("/")[0],
        "SUITE_OUTCOMES": str(directory(library) / f"{name}.jsonl"),
        "SUITE_WORKER_LOG": str(directory(library) / f"{name}-worker.log"),
    }


def run(library: str, name: str, url: str, *command: object) -> str:
    """Run Python in the suite's environment; return what it printed."""
    log = directory(library) / f"{name}.log"
    with log.open("w") as file:
        subprocess.run(
            [PYTHON, "-W", "ignore", *map(str, command)],
            cwd=directory(library),  # an example of the guide writes a file
            env=environment(library, name, url),
            check=False,
            stdout=file,
            stderr=file,
        )
    return log.read_text()


def pytest(library: str, name: str, url: str, tests: Iterable[str], *options: str) -> str:
    """Run tests; return what pytest printed."""
    plugins = ["pytest_timeout", "tools.celery_suite.recorder"]
    plugins += ["tools.celery_suite.facade" if library == "bulltask" else "celery.contrib.pytest"]
    options = (
        "-c",
        os.devnull,
        "--rootdir",
        str(source()),
        "-opython_classes=test_*",
        "-opython_files=test_*.py",
        *options,
    )
    paths = [source() / "t/integration" / test for test in tests]
    return run(
        library, name, url, "-m", "pytest", "-pno:cacheprovider", *options, *(f"-p{name}" for name in plugins), *paths
    )


def collect(library: str) -> list[str]:
    """Return the ids of all tests."""
    printed = pytest(library, "collected", "redis://127.0.0.1:1/0", TESTS, "--collect-only", "-q")
    found = [line.removeprefix("t/integration/") for line in printed.splitlines() if "::" in line]
    if not found:
        raise SystemExit(f"no test was found; see {directory(library)}/collected.log")
    return found


def run_all(library: str, selected: str, shards: int, every_page: Iterable[str]) -> Outcomes:
    """Run tests and pages in several processes, each with a server and a worker of its own."""
    for file in directory(library).glob("*.jsonl"):
        file.unlink()
    tests = [test for test in collect(library) if selected in test]
    pages = [page for page in every_page if selected in page]
    outcomes: Outcomes = dict.fromkeys(tests, ("failed", "the test process has ended"))
    for page in pages:
        outcomes |= {block.name: ("failed", "not run") for block in blocks(page) if block.language in CODE}

    def run_shard(shard: int) -> None:
        with tempfile.TemporaryDirectory() as files, RedisServer.start(files) as server:
            for page in pages[shard::shards]:
                run(library, page, server.url, "-m", "tools.celery_suite.guide", library, page)
            if tests[shard::shards]:
                pytest(library, f"tests-{shard}", server.url, tests[shard::shards], "-v", "--tb=short")

    with ThreadPoolExecutor(shards) as threads:
        list(threads.map(run_shard, range(shards)))
    for line in "".join(file.read_text() for file in sorted(directory(library).glob("*.jsonl"))).splitlines():
        found = json.loads(line)
        name = found["name"].removeprefix("t/integration/")
        if outcomes[name][1] in ("the test process has ended", "not run") or found["outcome"] == "failed":
            outcomes[name] = (found["outcome"], found["message"])
    return outcomes


def read_classes() -> tuple[dict[str, dict[str, int]], dict[str, tuple[str, str]]]:
    """Return the recorded numbers of each file, and the class and the reason of each failure."""
    recorded = tomllib.loads(CLASSES.read_text())
    failures: dict[str, tuple[str, str]] = {}
    for reason in recorded["reason"]:
        for name in reason["names"].split():
            if name in failures:
                raise SystemExit(f"{CLASSES.name} has two reasons for {name}")
            failures[name] = (reason["class"], reason["because"])
    return recorded["files"], failures


def report(outcomes: Outcomes, failures: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return the failures with their classes, a line for each."""
    lines = []
    for name, (outcome, message) in outcomes.items():
        if outcome == "failed":
            errors = [line for line in message.strip().splitlines() if line.startswith("E ")]
            error = (errors or message.strip().splitlines() or [""])[0].removeprefix("E").strip()
            kind, because = failures.get(name, ("NOT RECORDED", ""))
            lines.append(f"{kind}: {name}: {because}\n    {error[:200]}")
        elif outcome not in WORKS:
            lines.append(f"{outcome}: {name}: {message.strip().splitlines()[-1][:200]}")
    return sorted(lines)


def numbers(outcomes: Outcomes) -> dict[str, dict[str, int]]:
    """Return how many tests or examples of each file had which outcome."""
    counts: dict[str, Counter[str]] = {}
    for name, (outcome, _) in outcomes.items():
        counts.setdefault(name.partition(":")[0], Counter())["passed" if outcome in WORKS else outcome] += 1
    return {file: {"total": count.total(), **count} for file, count in counts.items()}


def classes(outcomes: Outcomes, failures: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return how many failures of each file have which class."""
    counts = Counter(
        (name.partition(":")[0], failures.get(name, ("not recorded",))[0])
        for name, (outcome, _) in outcomes.items()
        if outcome == "failed"
    )
    return [f"{file}: {kind}: {count}" for (file, kind), count in sorted(counts.items())]


def changes(outcomes: Outcomes, files: Mapping[str, Any], failures: Mapping[str, object]) -> list[str]:
    """Return what differs from the recorded outcomes."""
    found = [
        f"fails, but is not in {CLASSES.name}: {name}"
        for name, (outcome, _) in outcomes.items()
        if outcome == "failed" and name not in failures
    ]
    found += [
        f"does not fail, but is in {CLASSES.name}: {name}"
        for name in failures
        if name in outcomes and outcomes[name][0] != "failed"
    ]
    found += [
        f"{file} has {count['total']} tests or examples, not {files[file]['total']}"
        for file, count in numbers(outcomes).items()
        if count["total"] != files.get(file, count)["total"]
    ]
    return found


def main() -> int:
    """Run the tests and examples; print the failures and their classes.

    Returns:
        1 if an outcome is not the recorded one, or a failure is a gap.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.celery_suite", description=__doc__)
    parser.add_argument("-k", dest="selected", default="", help="only tests and pages whose name contains this text")
    parser.add_argument("--celery", action="store_true", help="run Celery instead of bulltask, for comparison")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--release", help="run the tests of another release, such as 5.6.3, without the guide")
    options = parser.parse_args()
    library = "celery" if options.celery else "bulltask"
    directory(library).mkdir(parents=True, exist_ok=True)
    if options.release:
        os.environ["SUITE_SOURCE"] = str(download(options.release, install=options.celery))
    outcomes = run_all(library, options.selected, options.processes, [] if options.release else PAGES)
    files, failures = read_classes()
    lines = [
        line
        for log in sorted(directory(library).glob("tests-0.log"))
        for line in log.read_text().splitlines()
        if line.startswith("facade:")
    ]
    lines += report(outcomes, {} if options.celery else failures)
    lines += [f"{file}: {count}" for file, count in numbers(outcomes).items()]
    if not options.celery:
        lines += classes(outcomes, failures)
    partial = options.selected or options.release
    differing = [] if options.celery else changes(outcomes, {} if partial else files, failures)
    sys.stdout.write("\n".join([*lines, *differing, ""]))
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
