"""Objectives, prices and capacities from code and from a file, and their validation."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from bulltask.errors import ConfigError
from bulltask.lake import slo_config
from bulltask.lake.slo_config import Objective, SLOConfig, read_slo_config

GOOD: dict[str, Any] = {"metric": "wait", "threshold": 2.0, "target": 0.99}


def write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def test_a_configuration_file_is_equivalent_to_python_code(tmp_path: Path) -> None:
    text = """
        price_per_hour = { images = 0.9, "*" = 0.1 }
        capacity = 16
        [[objective]]
        metric = "wait"
        threshold = 2
        target = 0.99
        queue = "emails"
        [[objective]]
        metric = "total"
        threshold = 0.5
        target = 0.9
        name = "mail.*"
    """
    config = read_slo_config(write(tmp_path / "slo.toml", text))
    assert config.objectives == (
        Objective("wait", threshold=2, target=0.99, queue="emails"),
        Objective("total", threshold=0.5, target=0.9, name="mail.*"),
    )
    assert config.prices == {"images": Decimal("0.9"), "*": Decimal("0.1")}
    assert config.capacities == {"*": 16}


PAGE = (Path(__file__).parents[2] / "docs/how-to/gold.md").read_text()


@pytest.mark.parametrize(
    "example", [(slo_config.__doc__ or "").partition("::")[2], PAGE.partition("```toml\n")[2].partition("```")[0]]
)
def test_the_examples_in_the_docstring_and_in_the_docs_are_valid(tmp_path: Path, example: str) -> None:
    config = read_slo_config(write(tmp_path / "slo.toml", example))
    assert config.objectives == (Objective("wait", threshold=2.0, target=0.99, queue="emails", name="mail.*"),)
    assert (config.prices, config.capacities) == ({"*": Decimal("0.12")}, {"*": 16})


def test_an_empty_configuration_has_no_objectives_prices_or_capacities(tmp_path: Path) -> None:
    for empty in (SLOConfig(), read_slo_config(write(tmp_path / "slo.toml", ""))):
        assert (empty.objectives, empty.prices, empty.capacities) == ((), {}, {})


def test_an_objectives_duration_may_be_a_timedelta() -> None:
    assert Objective("run", threshold=timedelta(minutes=1), target=0.5).threshold_ms == 60_000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"metric": "waits"}, r"metric must be one of wait, run, total, not 'waits'; did you mean 'wait'"),
        ({"threshold": 0}, r"threshold must be at least 0.001 s, not 0"),
        ({"threshold": "2s"}, r"threshold must be a number of seconds or a timedelta, not '2s'"),
        ({"target": 99}, r"target must be more than 0 and less than 1, like 0.99, not 99"),
        ({"target": 1.0}, r"target must be more than 0"),
        ({"queue": ""}, r"queue must be a string"),
        ({"name": 7}, r"name must be a string"),
    ],
)
def test_an_invalid_field_in_an_objective_is_rejected_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Objective(**GOOD | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"price_per_hour": -1}, "price_per_hour must be a number from 0"),
        ({"price_per_hour": {"mail": "much"}}, "price_per_hour of 'mail' must be a number from 0"),
        ({"price_per_hour": float("nan")}, "price_per_hour must be a number from 0"),
        ({"capacity": 0}, "capacity must be an integer of 1 or more"),
        ({"capacity": {"mail": 2.5}}, "capacity of 'mail' must be an integer"),
        ({"capacity": {"": 2}}, "queue of capacity must be a string"),
        ({"objectives": [GOOD]}, "objectives must be instances of"),
    ],
)
def test_an_invalid_field_in_a_configuration_is_rejected_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SLOConfig(**fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[objective]]\nmetric='wait'\nthreshold=2\n", r"objective 1: target is missing"),
        ("[[objective]]\nmetric='wait'\nthreshold=2\ntraget=0.9\n", r"objective 1: 'traget' is unknown.*'target'"),
        (
            "[[objective]]\nmetric='wait'\nthreshold=2\ntarget=0.9\nquue='a'\n",
            r"objective 1: 'quue' is unknown.*'queue'",
        ),
        ("objective = [2]\n", "with two brackets"),
        ("[objective]\nmetric='wait'\n", r"\[\[objective\]\], with two brackets"),
        (
            "price_per_hou = 2\n",
            r"'price_per_hou' is unknown; use objective, price_per_hour, capacity; did you mean 'price_per_hour'",
        ),
        ("price_per_hour = 'x'\n", r"price_per_hour must be a number"),
        ("capacity = ", r"at end of document"),
    ],
)
def test_an_invalid_file_is_rejected_with_its_name_and_error(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "slo.toml", text)
    with pytest.raises(ConfigError, match=rf"^{path}: .*{message}"):
        read_slo_config(path)


def test_a_missing_file_is_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml.*No such file"):
        read_slo_config(tmp_path / "none.toml")
