"""Random sequences of steps leave the same state in Redis as in Node, which is the reference."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.interop.differential.pair import Pair
from tests.interop.differential.processors import FORMS, Form
from tests.interop.differential.strategies import sequences

pytestmark = [pytest.mark.extended, pytest.mark.interop, pytest.mark.redis, pytest.mark.timeout(900)]

COUNT = int(os.environ.get("BULLTASK_TEST_SEQUENCES", "500"))
"""The number of sequences; any number but 500 draws new ones in each run, and hypothesis prints the seed."""


@settings(
    max_examples=COUNT,
    derandomize=COUNT == 500,  # the same in every run, so that a failure is reproducible
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(steps=sequences(), form=st.sampled_from(FORMS))
def test_any_sequence_of_steps_leaves_the_same_state_in_redis_as_node(
    pair: Pair, steps: list[dict[str, Any]], form: Form
) -> None:
    pair.redis.flushdb()  # reading a state scans all keys
    outcome = pair.run(steps, form)
    report = outcome.report()
    note(report)
    assert not report, f"\n{report}"
