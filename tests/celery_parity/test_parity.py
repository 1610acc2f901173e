"""Each scenario has the stated outcome in bulltask. `python -m tests.celery_parity` runs them in Celery."""

from __future__ import annotations

import runpy
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

import bulltask
from tests.celery_parity.areas import AREAS
from tests.celery_parity.scenario import Area, Project
from tests.process.conftest import harness  # noqa: F401 - a fixture
from tests.support.programs import ROOT
from tests.support.worker_harness import WorkerHarness
from tools.celery_suite.__main__ import read_classes

SOURCE = "from tests.celery_parity.tasks import define\ndefine(app)\n"


@pytest.mark.process
@pytest.mark.parametrize("area", AREAS, ids=lambda area: area.title)
def test_each_scenario_has_the_stated_outcome(
    area: Area,
    harness: WorkerHarness,  # noqa: F811 - the fixture
    subtests: pytest.Subtests,
) -> None:
    environ = {"PYTHONPATH": str(ROOT)}
    settings = {"task_retry_backoff": 0.01}
    harness.worker(SOURCE, children=4, environ=environ, settings=settings)
    harness.worker(SOURCE, children=1, environ=environ, options=["-Q", "single"])
    with redis.Redis.from_url(harness.url, socket_timeout=None) as journal, ThreadPoolExecutor(4) as threads:
        project = Project(bulltask, harness.sender(task_retry_backoff=0.01), journal)
        outcomes = [threads.submit(scenario.outcome, project.again()) for scenario in area.scenarios]
        for scenario, outcome in zip(area.scenarios, outcomes, strict=True):
            with subtests.test(scenario.sentence):
                assert outcome.result() == scenario.bulltask


def test_there_are_at_least_150_scenarios_with_a_reason_for_each_difference() -> None:
    scenarios = [scenario for area in AREAS for scenario in area.scenarios]
    assert len(scenarios) >= 150
    assert len({scenario.sentence for scenario in scenarios}) == len(scenarios)
    for scenario in scenarios:
        is_same = scenario.verdict == "same"
        assert is_same == (scenario.celery == scenario.bulltask) == (not scenario.because), scenario.sentence


def test_each_failure_of_celerys_own_tests_has_one_class_and_a_reason() -> None:
    kinds = runpy.run_path(str(ROOT / "docs/celery_parity_table.py"))["KINDS"]
    files, failures = read_classes()
    assert all(kind in kinds and because for kind, because in failures.values())
    assert {name.partition(":")[0] for name in failures} <= files.keys()


def test_the_facade_for_celerys_own_tests_has_at_most_200_lines() -> None:
    assert len((ROOT / "tools/celery_suite/facade.py").read_text().splitlines()) <= 200


def test_the_page_contains_all_scenarios() -> None:
    script = runpy.run_path(str(ROOT / "docs/celery_parity_table.py"))
    assert script["PAGE"].read_text() == script["page"](), "run: .venv/bin/python docs/celery_parity_table.py"
