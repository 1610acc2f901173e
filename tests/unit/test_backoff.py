from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.errors import ConfigError, DecodeError
from bulltask.jobs.backoff import Backoff, CustomBackoff, bullmq_delay_ms, bulltask_delay_ms, reconnect_delay_ms

MAX_DELAY_MS = 2**52
HOUR_MS = 3_600_000

delays = st.integers(0, 10**9)
jitters = st.floats(0, 1)
attempts = st.integers(1, 10**12)
chances = st.floats(0, 1, exclude_max=True)
backoffs = st.builds(
    Backoff,
    type=st.sampled_from(["fixed", "exponential"]),
    delay_ms=delays,
    jitter=jitters,
    max_delay_ms=st.none() | delays,
)


def lowest() -> float:
    return 0.0


def middle() -> float:
    return 0.5


def highest() -> float:
    return 1 - 2**-53


# --- jobs that bulltask sent ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempt", "min_ms", "base_ms", "max_ms"),
    [
        (1, 800, 1_000, 1_200),
        (2, 1_600, 2_000, 2_400),
        (3, 3_200, 4_000, 4_800),
        (4, 6_400, 8_000, 9_600),
        (5, 12_800, 16_000, 19_200),
        (6, 25_600, 32_000, 38_400),
        (7, 51_200, 64_000, 76_800),
        (8, 102_400, 128_000, 153_600),
        (9, 204_800, 256_000, 307_200),
        (10, 409_600, 512_000, 614_400),
        (11, 819_200, 1_024_000, 1_228_800),
        (12, 1_638_400, 2_048_000, 2_457_600),
        (13, 3_276_800, HOUR_MS, HOUR_MS),
        (14, HOUR_MS, HOUR_MS, HOUR_MS),
        (1_000_000_000_000, HOUR_MS, HOUR_MS, HOUR_MS),
    ],
)
def test_the_default_backoff_doubles_from_1_s_up_to_1_h_with_20_percent_jitter(
    attempt: int, min_ms: int, base_ms: int, max_ms: int
) -> None:
    assert bulltask_delay_ms(Backoff(), attempt, lowest) == min_ms
    assert bulltask_delay_ms(Backoff(), attempt, middle) == base_ms
    assert bulltask_delay_ms(Backoff(), attempt, highest) == max_ms


@pytest.mark.parametrize("attempt", [0, -1])
def test_an_attempt_number_below_1_gives_the_first_delay_without_jitter(attempt: int) -> None:
    assert bulltask_delay_ms(Backoff(delay_ms=1_000), attempt, highest) == 1_000
    assert bulltask_delay_ms(Backoff(delay_ms=1_000, max_delay_ms=300), attempt, highest) == 300


@given(delay=delays, jitter=jitters, cap=st.none() | delays, attempt=attempts, chance=chances)
def test_a_fixed_delay_is_constant(delay: int, jitter: float, cap: int | None, attempt: int, chance: float) -> None:
    backoff = Backoff("fixed", delay, jitter, cap)
    assert bulltask_delay_ms(backoff, attempt, lambda: chance) == delay


@given(backoff=backoffs, attempt=st.integers(-5, 10**12), chance=chances)
def test_a_delay_is_never_negative_and_never_exceeds_the_maximum(backoff: Backoff, attempt: int, chance: float) -> None:
    delay = bulltask_delay_ms(backoff, attempt, lambda: chance)
    assert isinstance(delay, int)
    assert 0 <= delay <= MAX_DELAY_MS
    if backoff.type == "exponential" and backoff.max_delay_ms is not None:
        assert delay <= backoff.max_delay_ms


@given(delay=delays, jitter=jitters, attempt=st.integers(1, 20), chance=chances)
def test_jitter_changes_a_delay_by_at_most_its_fraction(delay: int, jitter: float, attempt: int, chance: float) -> None:
    base = delay * 2 ** (attempt - 1)
    got = bulltask_delay_ms(Backoff("exponential", delay, jitter, None), attempt, lambda: chance)
    assert base * (1 - jitter) - 1 <= got <= base * (1 + jitter) + 1


@given(delay=delays, cap=st.none() | delays, attempt=attempts)
def test_a_delay_without_jitter_never_shrinks(delay: int, cap: int | None, attempt: int) -> None:
    backoff = Backoff("exponential", delay, 0.0, cap)
    assert bulltask_delay_ms(backoff, attempt) <= bulltask_delay_ms(backoff, attempt + 1)


@given(attempt=attempts)
def test_a_custom_type_is_computed_as_exponential(attempt: int) -> None:
    assert bulltask_delay_ms(Backoff("fibonacci"), attempt, middle) == bulltask_delay_ms(Backoff(), attempt, middle)


def test_every_delay_gets_new_random_jitter() -> None:
    assert len({bulltask_delay_ms(Backoff(delay_ms=10**6), 1) for _ in range(50)}) > 10


# --- jobs of other BullMQ clients -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("attempt", "delay_ms"), [(1, 700), (2, 1_400), (3, 2_800), (14, 5_734_400)])
def test_an_exponential_backoff_of_another_client_has_no_maximum(attempt: int, delay_ms: int) -> None:
    assert bullmq_delay_ms(Backoff("exponential", 700, 0.0, None), attempt) == delay_ms


@given(delay=delays, attempt=attempts)
def test_a_fixed_backoff_of_another_client_without_jitter_is_constant(delay: int, attempt: int) -> None:
    assert bullmq_delay_ms(Backoff("fixed", delay, 0.0, None), attempt) == delay


@pytest.mark.parametrize("kind", ["fixed", "exponential"])
def test_jitter_of_another_client_shortens_fixed_and_exponential_delays(kind: str) -> None:
    backoff = Backoff(kind, 1_000, 0.5, None)
    assert bullmq_delay_ms(backoff, 1, lowest) == 500
    assert bullmq_delay_ms(backoff, 1, middle) == 750
    assert bullmq_delay_ms(backoff, 1, lambda: 0.999) == 999


@given(delay=delays, jitter=jitters, attempt=st.integers(1, 20), chance=chances)
def test_jitter_of_another_client_never_lengthens_the_delay(
    delay: int, jitter: float, attempt: int, chance: float
) -> None:
    full = delay * 2 ** (attempt - 1)
    got = bullmq_delay_ms(Backoff("exponential", delay, jitter, None), attempt, lambda: chance)
    assert full * (1 - jitter) - 1 <= got <= full


@given(backoff=backoffs, attempt=st.integers(-5, 10**12), chance=chances)
def test_delays_of_other_clients_jobs_never_overflow(backoff: Backoff, attempt: int, chance: float) -> None:
    delay = bullmq_delay_ms(backoff, attempt, lambda: chance)
    assert isinstance(delay, int)
    assert 0 <= delay <= MAX_DELAY_MS


@pytest.mark.parametrize(
    ("kind", "delay", "jitter", "attempt", "chance", "expected"),
    [
        ("fixed", 83_808, 0.25, 2, 0.30481433868408203, 69_242),
        ("exponential", 47_936, 0.5, 3, 0.6324834823608398, 156_509),
        ("fixed", 38_336, 0.75, 4, 0.9958810806274414, 38_217),
        ("exponential", 32_416, 1, 5, 0.6794614791870117, 352_406),
        ("exponential", 66_176, 0.25, 7, 0.1726980209350586, 3_359_303),
        ("exponential", 59_008, 0.75, 9, 0.7072738409042358, 11_789_596),
        ("exponential", 78_848, 0.5, 13, 0.7938960790634155, 289_679_601),
    ],
)
def test_a_delay_equals_bullmqs_for_the_same_random_number(
    kind: str, delay: int, jitter: float, attempt: int, chance: float, expected: int
) -> None:
    # Expected: the result of Backoffs.calculate in bullmq 5.62.0 with Math.random replaced by `chance`.
    assert bullmq_delay_ms(Backoff(kind, delay, jitter, None), attempt, lambda: chance) == expected


def test_an_unknown_backoff_type_of_another_client_counts_as_exponential() -> None:
    assert bullmq_delay_ms(Backoff("linear", 0, 0.0, None), 3) == 4_000
    assert bullmq_delay_ms(Backoff("linear", 200, 0.0, None), 3) == 800


def test_a_zero_delay_retries_immediately() -> None:
    assert bullmq_delay_ms(Backoff("fixed", 0, 0.0, None), 1) == 0
    assert bullmq_delay_ms(Backoff("exponential", 0, 0.5, None), 9) == 0


# --- the stored format ------------------------------------------------------------------------------------------------


def test_the_default_backoff_is_stored_in_bullmqs_format() -> None:
    expected = {"type": "exponential", "delay": 1_000, "jitter": 0.2, "maxDelay": HOUR_MS}
    assert Backoff().to_wire() == expected


def test_a_fixed_backoff_is_stored_without_jitter() -> None:
    # Node would apply the jitter.
    assert Backoff("fixed", 500).to_wire() == {"type": "fixed", "delay": 500, "jitter": 0, "maxDelay": HOUR_MS}
    assert Backoff("fixed", 500, jitter=0.9).jitter == 0


def test_the_jitter_of_another_clients_fixed_backoff_is_kept() -> None:
    stored = {"type": "fixed", "delay": 500, "jitter": 0.5}
    backoff = Backoff.from_wire(stored)
    assert backoff is not None
    assert backoff.to_wire() == stored


def test_the_name_of_a_custom_strategy_is_never_stored() -> None:
    assert Backoff("fibonacci", 250).to_wire()["type"] == "exponential"


@given(backoff=backoffs)
def test_a_stored_backoff_is_read_back_unchanged(backoff: Backoff) -> None:
    assert Backoff.from_wire(json.loads(json.dumps(backoff.to_wire()))) == backoff


def test_a_missing_backoff_is_read_as_none() -> None:
    assert Backoff.from_wire(None) is None


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (5_000, Backoff("fixed", 5_000, 0.0, None)),
        (0, Backoff("fixed", 0, 0.0, None)),
        (1.5e3, Backoff("fixed", 1_500, 0.0, None)),
        ({"type": "exponential", "delay": 1_000}, Backoff("exponential", 1_000, 0.0, None)),
        ({"type": "fixed", "delay": 10, "jitter": 0.5}, Backoff("fixed", 10, 0.5, None)),
        ({"type": "exponential", "delay": 10, "maxDelay": 99}, Backoff("exponential", 10, 0.0, 99)),
        ({"type": "custom"}, Backoff("custom", 0, 0.0, None)),
        ({"type": "fixed", "delay": -5}, Backoff("fixed", 0, 0.0, None)),
        ({"type": "fixed", "delay": 10.4}, Backoff("fixed", 10, 0.0, None)),
        ({"type": "fixed", "delay": 10**400}, Backoff("fixed", MAX_DELAY_MS, 0.0, None)),
        ({"type": "fixed", "delay": 1, "jitter": None, "maxDelay": None}, Backoff("fixed", 1, 0.0, None)),
    ],
)
def test_every_backoff_that_bullmq_stores_can_be_read(stored: object, expected: Backoff) -> None:
    assert Backoff.from_wire(stored) == expected


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        ("1000", "object"),
        (True, "object"),
        ([1_000], "object"),
        (float("nan"), "object"),
        ({}, "type"),
        ({"delay": 5}, "type"),
        ({"type": ["fixed"], "delay": 5}, "type"),
        ({"type": None, "delay": 5}, "type"),
        ({"type": "fixed", "delay": "5"}, "delay"),
        ({"type": "fixed", "delay": True}, "delay"),
        ({"type": "fixed", "delay": float("inf")}, "delay"),
        ({"type": "fixed", "delay": 5, "jitter": 1.5}, "jitter"),
        ({"type": "fixed", "delay": 5, "jitter": "much"}, "jitter"),
        ({"type": "fixed", "delay": 5, "maxDelay": {}}, "maxDelay"),
    ],
)
def test_a_malformed_stored_backoff_is_rejected_with_a_reason(stored: object, reason: str) -> None:
    with pytest.raises(DecodeError, match=reason):
        Backoff.from_wire(stored)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["type", "delay", "jitter", "maxDelay"]), inner),
)


@given(stored=json_values)
def test_any_stored_value_is_either_read_or_rejected(stored: object) -> None:
    try:
        backoff = Backoff.from_wire(stored)
    except DecodeError:
        return
    assert backoff is None or bullmq_delay_ms(backoff, 1) >= 0


# --- validation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"type": ""}, "type"),
        ({"type": 3}, "type"),
        ({"delay_ms": -1}, "delay"),
        ({"delay_ms": 1.5}, "delay"),
        ({"delay_ms": True}, "delay"),
        ({"delay_ms": 2**53}, "delay"),
        ({"jitter": -0.1}, "jitter"),
        ({"jitter": 1.1}, "jitter"),
        ({"jitter": float("nan")}, "jitter"),
        ({"jitter": "0.2"}, "jitter"),
        ({"max_delay_ms": -1}, "max delay"),
        ({"max_delay_ms": "1h"}, "max delay"),
    ],
)
def test_an_invalid_backoff_is_rejected_with_a_reason(arguments: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Backoff(**arguments)


def test_a_backoff_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Backoff().delay_ms = 5  # type: ignore[misc]


def test_a_custom_strategy_may_return_seconds_or_a_timedelta() -> None:
    strategies: list[CustomBackoff] = [lambda n, exc: 0.5 * n, lambda n, exc: timedelta(seconds=n)]
    assert [strategy(2, ValueError()) for strategy in strategies] == [1.0, timedelta(seconds=2)]


# --- reconnect delays -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("attempt", "delay_ms"), [(1, 100), (2, 200), (5, 1_600), (9, 25_600), (10, 30_000)])
def test_the_reconnect_delay_doubles_up_to_the_maximum(attempt: int, delay_ms: int) -> None:
    assert reconnect_delay_ms(attempt, middle, first_ms=100, cap_ms=30_000) == delay_ms


@given(attempt=st.integers(-5, 10**12), chance=chances)
def test_the_reconnect_delay_has_20_percent_jitter(attempt: int, chance: float) -> None:
    assert 80 <= reconnect_delay_ms(attempt, lambda: chance, first_ms=100, cap_ms=30_000) <= 36_000


def test_jitter_applies_to_the_maximum_reconnect_delay() -> None:
    # Without jitter all workers would reconnect at the same time.
    assert reconnect_delay_ms(50, lowest, first_ms=100, cap_ms=30_000) == 24_000
    assert reconnect_delay_ms(50, highest, first_ms=100, cap_ms=30_000) == 36_000


def test_the_first_and_the_maximum_reconnect_delay_can_be_set() -> None:
    assert [reconnect_delay_ms(n, middle, first_ms=10, cap_ms=50) for n in (1, 2, 3, 4, 99)] == [10, 20, 40, 50, 50]


def test_a_deeply_nested_backoff_is_rejected() -> None:
    deep: object = 1
    for _ in range(100_000):
        deep = [deep]
    for stored in (deep, {"type": deep}, {"type": "fixed", "delay": deep}, {"type": "fixed", "jitter": deep}):
        with pytest.raises(DecodeError, match="backoff"):
            Backoff.from_wire(stored)


def test_an_exponential_delay_doubles_with_each_attempt_up_to_the_maximum() -> None:
    assert [bulltask_delay_ms(Backoff("exponential", 1_000, 0, 10**9), n) for n in (1, 2, 10)] == [
        1_000,
        2_000,
        512_000,
    ]


@pytest.mark.parametrize("delay_ms", ["5", 1.5, True, -1, 2**52 + 1, None])
def test_a_delay_that_is_not_a_number_of_milliseconds_is_rejected(delay_ms: Any) -> None:
    with pytest.raises(ConfigError, match="must be whole milliseconds from 0 to"):
        Backoff("fixed", delay_ms)


def test_the_delay_before_connecting_again_is_at_most_the_maximum() -> None:
    assert [reconnect_delay_ms(attempt, middle, first_ms=100, cap_ms=30_000) for attempt in (1, 2, 100)] == [
        100,
        200,
        30_000,
    ]
