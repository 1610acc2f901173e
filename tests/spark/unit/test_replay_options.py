"""A replayed job keeps its options, except those that apply only to the original job."""

from __future__ import annotations

import json

import pytest

from bulltask.errors import DecodeError
from bulltask.spark.replay import ReplaySelection, replay_options


def test_options_that_control_how_a_job_runs_are_kept() -> None:
    stored = {
        "attempts": 5, "backoff": {"type": "custom", "delay": 250}, "priority": 7, "lifo": True, "kl": 3,
        "removeOnFail": {"age": 60}, "de": {"id": "same"}, "bulltask": {"v": 1, "headers": "{}"},
    }  # fmt: skip
    options = replay_options(json.dumps(stored))
    assert options.to_wire(1) == stored
    assert (options.priority, options.delay_at(0), options.deduplication_id) == (7, 0, "same")


def test_options_of_the_original_job_are_dropped() -> None:
    stored = {
        "jobId": "x", "delay": 60_000, "timestamp": 5, "parent": {"id": "p", "queue": "bull:q"}, "fpof": True,
        "cpof": True, "idof": True, "rdof": True, "repeat": {"every": 5}, "repeatJobKey": "k", "prevMillis": 7,
        "bulltask": {"v": 1, "expires": 99},
    }  # fmt: skip
    assert replay_options(json.dumps(stored)).to_wire(1) == {"bulltask": {"v": 1}}


def test_a_job_from_another_client_gets_no_bulltask_options() -> None:
    assert replay_options('{"attempts":0}').to_wire(1) == {"attempts": 0}
    assert replay_options(None).to_wire(1) == {}


@pytest.mark.parametrize("broken", ["{", "[]", "7"])
def test_options_that_are_not_a_json_object_are_an_error(broken: str) -> None:
    with pytest.raises(DecodeError, match=r"not (a|valid) JSON"):
        replay_options(broken)


def test_the_write_id_of_a_replay_does_not_depend_on_whitespace() -> None:
    write_id = ReplaySelection("state = 'failed'  and\n name = 'x'").write_id
    assert ReplaySelection("state = 'failed' and name = 'x'", limit=7).write_id == write_id
    assert (
        len(
            {
                write_id,
                ReplaySelection("state = 'failed' and name = 'x'", queue="mail").write_id,
                ReplaySelection("true").write_id,
            }
        )
        == 3
    )
