"""Some scenarios of the model of the worker protocol; ``python -m tools model`` checks all of them."""

from __future__ import annotations

import pytest

from tests.model.check import CORRECT, QUICK, WRONG, check, missing_programs

pytestmark = pytest.mark.skipif(
    bool(missing_programs()), reason="needs spin and gcc (Debian: apt-get install spin gcc)"
)

quick_correct = [scenario for scenario in CORRECT if scenario.name in QUICK]
quick_wrong = [scenario for scenario in WRONG if scenario.name in QUICK]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", quick_correct, ids=lambda scenario: scenario.name)
def test_all_properties_hold_in_every_state(scenario) -> None:
    result = check(scenario)
    assert (result.violated, result.complete) == ("", True), result.output


@pytest.mark.slow
@pytest.mark.parametrize("scenario", quick_wrong, ids=lambda scenario: scenario.name)
def test_a_wrong_protocol_violates_a_property(scenario) -> None:
    result = check(scenario)
    assert result.violated in scenario.expected, result.output
