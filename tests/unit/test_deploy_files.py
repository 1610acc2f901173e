"""The files of ``deploy/``: each is valid for its program, and uses commands, options, probes and metrics that exist.

The Dockerfile is built in tests/process/test_container_image.py; alerts and Grafana's dashboards are checked in
tests/process/test_monitoring_files.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
import jsonschema
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]

from bulltask import App
from bulltask.cli.main import main
from bulltask.observe.metrics import METRICS

DEPLOY = Path(__file__).parents[2] / "deploy"
STOP_S = App("shop")._config.shutdown_timeout_ms / 1000
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MANIFESTS = [*yaml.safe_load_all((DEPLOY / "kubernetes" / "worker.yaml").read_text())]
KEDA = yaml.safe_load((DEPLOY / "kubernetes" / "keda.yaml").read_text())
UNIT = DEPLOY / "systemd" / "shop-worker.service"


def parse(command: Sequence[str]) -> Mapping[str, Any]:
    """Parse a command as ``bulltask`` does; return its options."""
    program, name, *arguments = command
    assert program == "bulltask"
    group: click.Command = main
    context = click.Context(main)
    while isinstance(group, click.Group):
        found = group.get_command(context, name)
        assert found is not None, command
        if isinstance(found, click.Group):
            name, *arguments = arguments
        group = found
    return group.make_context(name, [*arguments]).params


def manifest(kind: str, name: str) -> Any:
    [found] = [each for each in MANIFESTS if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def container_of(deployment: Any) -> Any:
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    return container


# ---- Docker, Compose, Procfile ---------------------------------------------------------------------------------------


def test_the_dockerfile_starts_a_worker_without_a_shell_and_as_a_user_without_rights() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    steps = re.findall(r"^([A-Z]+) (.*)$", text, re.MULTILINE)
    instructions = dict(steps)
    assert [name for name, _ in steps][:2] == ["ARG", "FROM"], "the base is an argument"
    assert parse(yaml.safe_load(instructions["CMD"]))["app"] is None, "BULLTASK_APP sets it"
    assert instructions["USER"].partition(":")[0].isdigit()
    assert instructions["STOPSIGNAL"] == "SIGTERM"


def test_compose_accepts_the_compose_file() -> None:
    schema = json.loads((files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    assert [error.message for error in validator.iter_errors(COMPOSE)] == []
    misspelt = {**COMPOSE["services"], "worker": {**COMPOSE["services"]["worker"], "stop_grace": "45s"}}
    assert not validator.is_valid({**COMPOSE, "services": misspelt})


def test_the_compose_file_uses_commands_that_exist_and_stops_late_enough() -> None:
    services = COMPOSE["services"]
    assert services.keys() == {"redis", "worker", "exporter"}
    for name in ("worker", "exporter"):
        parse(services[name]["command"])
        assert services[name]["build"] == {"context": ".", "args": {"APP": "shop"}}
        assert services[name]["depends_on"].keys() <= services.keys()
    parse(services["worker"]["healthcheck"]["test"][1:])
    assert float(services["worker"]["stop_grace_period"].removesuffix("s")) > STOP_S
    assert "--maxmemory-policy noeviction" in services["redis"]["command"]
    named = {mount.partition(":")[0] for service in services.values() for mount in service.get("volumes", ())}
    assert named == COMPOSE["volumes"].keys()


def test_the_procfile_uses_commands_that_exist_and_stops_within_the_usual_30_seconds() -> None:
    lines = (DEPLOY / "Procfile").read_text().splitlines()
    parsed = {name: parse(shlex.split(command.replace("${PORT:-9809}", "80"))) for name, command in
              (re.fullmatch(r"([a-z]+): (.+)", line).groups() for line in lines)}  # type: ignore[union-attr]  # fmt: skip
    assert parsed.keys() == {"worker", "exporter"}
    assert parsed["worker"]["shutdown_timeout"] < 30


# ---- systemd ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    file = tmp_path / UNIT.name
    file.write_text(
        UNIT.read_text().replace("/srv/shop/.venv/bin/bulltask", str(Path(sys.executable).parent / "bulltask"))
    )
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if file.name in line]) == (0, []), done.stderr


def test_the_unit_stops_late_enough_leaves_the_watchdog_time_for_redis_and_its_children_enough_memory() -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE))
    command = shlex.split(settings["ExecStart"])
    options = parse([Path(command[0]).name, *command[1:]])
    assert (settings["Type"], settings["NotifyAccess"], settings["KillMode"]) == ("notify", "main", "mixed")
    assert float(settings["TimeoutStopSec"]) > STOP_S
    assert float(settings["WatchdogSec"]) >= 30
    children, each = options["worker_concurrency"], options["worker_max_memory_per_child"].removesuffix("M")
    assert int(settings["MemoryMax"].removesuffix("G")) * 1024 > int(children) * int(each) + 55
    assert settings["OOMPolicy"] == "continue", "the kernel kills a child, not the service"
    assert settings["StartLimitIntervalSec"] == "0"


# ---- Kubernetes and KEDA ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.28", kubernetes_validate.latest_version()])
def test_kubernetes_accepts_the_manifests(version: str) -> None:
    for each in MANIFESTS:
        kubernetes_validate.validate(each, version, strict=True)  # strict: a misspelt field is an error


def test_the_manifests_use_commands_and_probes_that_exist_and_drain_on_stop() -> None:
    worker, exporter = (manifest("Deployment", name) for name in ("shop-worker", "shop-exporter"))
    for deployment in (worker, exporter):
        container = container_of(deployment)
        parse([*container["command"], *container["args"]])
        [port] = container["ports"]
        assert f"{port['containerPort']}" in container["args"]
        template = deployment["spec"]["template"]["metadata"]
        assert template["annotations"]["prometheus.io/port"] == str(port["containerPort"])
        assert template["labels"] == deployment["spec"]["selector"]["matchLabels"]
    container = container_of(worker)
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    live, ready = {"path": "/livez", "port": "metrics"}, {"path": "/readyz", "port": "metrics"}
    assert probes == {"startup": live, "liveness": live, "readiness": ready}
    assert worker["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > STOP_S
    budget = manifest("PodDisruptionBudget", "shop-worker")["spec"]
    assert budget == {"maxUnavailable": 1, "selector": worker["spec"]["selector"]}, "a drain is never blocked"


def test_keda_scales_the_worker_by_what_waits_is_due_and_runs_and_by_its_age(tmp_path: Path) -> None:
    spec = KEDA["spec"]
    assert spec["scaleTargetRef"]["name"] == manifest("Deployment", "shop-worker")["metadata"]["name"]
    queries = {trigger["name"]: trigger["metadata"]["query"] for trigger in spec["triggers"]}
    assert {trigger["type"] for trigger in spec["triggers"]} == {"prometheus"}
    assert all(isinstance(value, str) for trigger in spec["triggers"] for value in trigger["metadata"].values())
    assert set(re.findall(r"\bbulltask_\w+", str(queries))) <= METRICS.keys()
    if (promtool := shutil.which("promtool")) is None:
        if os.environ.get("CI"):
            pytest.fail("promtool is missing: apt-get install prometheus")
        pytest.skip("needs promtool: apt-get install prometheus")

    jobs = {"wait": 10, "prioritized": 5, "active": 4, "completed": 1_000, "delayed": 500, "paused": 70}
    series = [
        {"series": f'bulltask_queue_jobs{{queue="default", state="{state}", instance="{instance}"}}', "values": count}
        for state, count in jobs.items()
        for instance in "ab"  # two workers export the same queue
    ]
    series += [
        {"series": 'bulltask_queue_due_delayed_jobs{queue="default"}', "values": 2},
        {"series": 'bulltask_queue_oldest_waiting_seconds{queue="default"}', "values": 90},
        {"series": 'bulltask_queue_jobs{queue="other", state="wait"}', "values": 9_999},
    ]
    tests = [
        {"input_series": series, "promql_expr_test": [expected(queries["jobs"], 21), expected(queries["oldest"], 90)]},
        {"input_series": [], "promql_expr_test": [expected(queries["oldest"], 0)]},
    ]
    file = tmp_path / "keda.yml"
    file.write_text(yaml.safe_dump({"tests": tests}))
    done = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def expected(query: str, value: int) -> Mapping[str, object]:
    return {"expr": query, "eval_time": "0m", "exp_samples": [{"labels": "{}", "value": value}]}
