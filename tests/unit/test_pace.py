"""How many jobs a child acquires in one round trip."""

from __future__ import annotations

from bulltask.worker.child.pace import Pace


def pace_after(*durations_ms: float, maximum: int = 16) -> Pace:
    pace = Pace(maximum)
    for duration_ms in durations_ms:
        pace.record(duration_ms)
    return pace


def test_jobs_are_prefetched_only_after_several_short_ones_in_a_row() -> None:
    assert pace_after().jobs == 1
    assert pace_after(*[0.1] * 10).jobs == 1
    assert pace_after(*[0.1] * 40).jobs == 16


def test_a_long_job_ends_prefetching_immediately() -> None:
    pace = pace_after(*[0.1] * 40)
    pace.record(20)
    assert pace.jobs == 1
    pace = pace_after(*[0.1] * 40)
    pace.record_long_job()
    assert pace.jobs == 1


def test_the_jobs_of_one_round_trip_take_about_five_milliseconds() -> None:
    assert pace_after(*[1.0] * 100).jobs == 5
    assert pace_after(*[2.4] * 100).jobs == 2


def test_one_job_is_prefetched_while_two_do_not_fit_into_one_round_trip_and_none_will_be_released() -> None:
    assert pace_after(*[3.0] * 100).jobs == 2
    assert pace_after(*[7.5] * 100).jobs == 2
    assert pace_after(*[7.6] * 100).jobs == 1
    assert pace_after(*[3.0] * 100, maximum=1).jobs == 1


def test_the_setting_is_the_maximum_and_turns_prefetching_off() -> None:
    assert pace_after(*[0.0] * 200, maximum=4).jobs == 4
    assert pace_after(*[0.0] * 200, maximum=0).jobs == 1
