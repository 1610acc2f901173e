"""The alerts and dashboards in ``deploy/``, checked with Prometheus' own programs."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bulltask.observe.metrics import METRICS
from bulltask.testing.worker import wait_until
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "bulltask-alerts.yml"
DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count")}
SERIES = {name + suffix for name, metric in METRICS.items() for suffix in SUFFIXES.get(metric.type, ("",))}

TASKS = """
from bulltask.errors import TransientError

@app.task(name="flaky")
def flaky():
    raise TransientError("again")
"""


def program(name: str) -> str:
    """Return a program of Debian's package prometheus, which CI must have."""
    if (path := shutil.which(name)) is None:
        if os.environ.get("CI"):
            pytest.fail(f"{name} is missing: apt-get install prometheus")
        pytest.skip(f"needs {name}: apt-get install prometheus")
    return path


def panels() -> Iterator[tuple[str, str]]:
    """Yield the title of each panel, and each of its queries with Grafana's variables replaced."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", "1m")
                yield f"{path.stem}: {panel['title']}", re.sub(r"\$(queue|instance)", ".*", query)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_alerts_and_dashboards_use_only_metrics_that_exist() -> None:
    text = ALERTS.read_text() + "".join(query for _, query in panels())
    assert set(re.findall(r"\b(?:bulltask|bullmq)_\w+", text)) <= SERIES
    assert len(list(panels())) > 25


def test_promtool_accepts_the_alerts_and_all_queries_of_the_dashboards(tmp_path: Path) -> None:
    rules = [{"record": "panel", "expr": query} for _, query in panels()]
    queries = tmp_path / "queries.yml"
    queries.write_text(json.dumps({"groups": [{"name": str(at), "rules": [rule]} for at, rule in enumerate(rules)]}))
    for path in (ALERTS, queries):
        checked = subprocess.run(
            [program("promtool"), "check", "rules", path], capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr


def alert_test(alert: str, at: str, series: Mapping[str, str], fired: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'ALERTS{{alertname="{alert}",alertstate="firing"}}',
                "eval_time": at,
                "exp_samples": [
                    {
                        "labels": f"ALERTS{json_labels({'alertname': alert, 'alertstate': 'firing', **labels})}",
                        "value": 1,
                    }
                    for labels in fired
                ],
            }
        ],
    }


def json_labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def test_alerts_fire_for_what_they_name_and_not_for_its_opposite(tmp_path: Path) -> None:
    waiting, workers = "bulltask_queue_jobs{{queue='{}',state='wait'}}", "bulltask_queue_workers{{queue='{}'}}"
    tests = [
        alert_test(
            "BulltaskQueueHasNoWorker",
            "7m",
            {waiting.format("a"): "3x10", workers.format("a"): "0x10", waiting.format("b"): "3x10",
             workers.format("b"): "1x10", waiting.format("c"): "0x10", workers.format("c"): "0x10"},
            [{"queue": "a", "severity": "critical"}],
        ),
        alert_test(
            "BulltaskChildOutOfMemory",
            "5m",
            {"bulltask_child_crashes_total{instance='a',cause='out_of_memory'}": "0 0 1x10",
             "bulltask_child_crashes_total{instance='b',cause='SIGKILL'}": "0 0 1x10"},
            [{"instance": "a", "severity": "critical"}],
        ),
        alert_test(
            "BulltaskTaskFails",
            "20m",
            {"bulltask_attempts_total{queue='q',task='bad',status='failed'}": "0+3x30",
             "bulltask_attempts_total{queue='q',task='bad',status='completed'}": "0+7x30",
             "bulltask_attempts_total{queue='q',task='good',status='failed'}": "0+1x30",
             "bulltask_attempts_total{queue='q',task='good',status='completed'}": "0+99x30"},
            [{"queue": "q", "task": "bad", "severity": "warning"}],
        ),
    ]  # fmt: skip
    file = tmp_path / "tests.yml"
    file.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run([program("promtool"), "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_metrics_of_a_worker(harness: WorkerHarness) -> None:
    port = free_port()
    harness.worker(children=1, settings={"metrics_port": port})
    harness.app.send_task("quick").get(timeout=60)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        metrics = response.read()
    checked = subprocess.run([program("promtool"), "check", "metrics"], input=metrics, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr.decode()) == (0, "")


@contextmanager
def prometheus(directory: Path, target: int) -> Iterator[str]:
    """Run a Prometheus that scrapes a port every second; yield its address."""
    port = free_port()
    scrape = {"job_name": "bulltask", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
    config = {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "scrape_configs": [scrape]}
    (directory / "prometheus.yml").write_text(json.dumps({**config, "rule_files": [str(ALERTS)]}))
    command = [
        program("prometheus"),
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def results(address: str, query: str) -> list[Any]:
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            found: list[Any] = json.load(response)["data"]["result"]
    except OSError:  # it is starting
        return []
    return found


@pytest.mark.extended
def test_every_panel_shows_data_of_a_real_worker(harness: WorkerHarness, tmp_path: Path) -> None:
    port = free_port()
    harness.worker(TASKS, children=2, settings={"metrics_port": port})
    with prometheus(tmp_path, port) as address:
        for name in ("quick", "flaky"):
            harness.app.send_task(name)
        wait_until(lambda: len(results(address, "bulltask_attempts_total[1m]")) > 0, 60, "the first scrape")
        for name in ("quick", "flaky"):
            harness.app.send_task(name)
        held = harness.hold()
        harness.wait_for_start(held)
        empty = set(panels())

        def all_have_data() -> bool:
            for title, query in tuple(empty):
                found = results(address, query)
                if any("NaN" not in sample["value"] for sample in found):
                    empty.discard((title, query))
            return not empty

        wait_until(all_have_data, 60, f"data of {empty}")
        harness.open_gate()
