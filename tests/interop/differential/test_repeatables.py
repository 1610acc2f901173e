"""Repeatable jobs of BullMQ's older interface, which only Node makes: removed by Node, and the same ones by us."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, cast

import pytest

from tests.interop.differential.hands import Form
from tests.interop.differential.pair import HOUR, START_MS, Pair
from tests.interop.differential.test_scripts import Steps, do, every, take

pytestmark = [pytest.mark.interop, pytest.mark.redis]

UTC_NIGHT: Final = {"pattern": "0 3 * * *", "tz": "UTC"}
OLDEST: Final = f"tick:::UTC:{HOUR}"
END: Final = {"pattern": "0 4 * * *", "endDate": START_MS + 1000 * HOUR}


def made(name: str, repeat: dict[str, Any], **opts: object) -> dict[str, Any]:
    return do("add_repeatable", name=name, data={"n": 1}, opts={"repeat": repeat, **opts})


def removed(name: str, repeat: dict[str, Any], **more: object) -> dict[str, Any]:
    return do("remove_repeatable", name=name, repeat=repeat, **more)


MADE: Final[Steps] = [
    made("tick", {"every": HOUR}),
    made("night", UTC_NIGHT),
    made("night", UTC_NIGHT, jobId="mine"),
    made("end", END),
    made("keyed", {"every": 2 * HOUR, "key": "own-key"}),
]


def md5(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()


@pytest.fixture(params=["sync", "async"])
def form(request: pytest.FixtureRequest) -> Form:
    return cast("Form", request.param)


def test_repeatable_jobs_are_listed_as_in_node(pair: Pair, form: Form) -> None:
    outcome = pair.run([do("repeatables")], form, made=MADE)
    assert not outcome.report()
    assert [name for _, name, _ in outcome.ours[0]["ok"]] == ["tick", "keyed", "night", "night", "end"]


def test_schedulers_are_not_listed_as_repeatable_jobs(pair: Pair, form: Form) -> None:
    """Node lists them too, and would remove them by their key without their template."""
    outcome = pair.run([do("repeatables")], form, made=[*MADE[:1], every(HOUR)])
    assert (len(outcome.theirs[0]["ok"]), len(outcome.ours[0]["ok"])) == (2, 1)


@pytest.mark.parametrize(
    "step",
    [
        removed("tick", {"every": HOUR}),
        removed("tick", {"every": 2 * HOUR}),
        removed("night", UTC_NIGHT),
        removed("night", UTC_NIGHT, jobId="mine"),
        removed("end", END),
        do("remove_repeatable_by_key", key="own-key"),
        do("remove_repeatable_by_key", key="missing"),
        do("remove_repeatable_by_key", key="a:b:c:d:e"),
    ],
    ids=lambda step: json.dumps(step)[:70],
)
def test_removing_a_repeatable_job_leaves_the_same_state_as_in_node(
    pair: Pair, form: Form, step: dict[str, Any]
) -> None:
    outcome = pair.run([step, step], form, made=MADE)
    assert not outcome.report()


def test_a_running_series_can_be_removed(pair: Pair, form: Form) -> None:
    steps = [do("wait", ms=2 * HOUR), take(), removed("tick", {"every": HOUR}), do("repeatables")]
    outcome = pair.run(steps, form, made=MADE[:1])
    assert not outcome.report()
    assert outcome.ours[0]["ok"] is not None
    assert outcome.ours[-2:] == [{"ok": True}, {"ok": []}]
    assert "removeRepeatable" in outcome.our_scripts & outcome.their_scripts


def oldest(pair: Pair, key: str, job_id: str) -> None:
    """What BullMQ 1 to 4 have stored: the key says it all, and there is no hash."""
    for name in pair.names:
        base = f"bull:{name}:"
        pair.redis.zadd(f"{base}repeat", {key: START_MS + HOUR})
        pair.redis.zadd(f"{base}delayed", {job_id: (START_MS + HOUR) * 4096})
        fields = {"name": "tick", "data": "{}", "opts": "{}", "timestamp": START_MS}
        pair.redis.hset(f"{base}{job_id}", mapping=cast(Any, fields))


@pytest.mark.parametrize(
    "step",
    [removed("tick", {"every": HOUR, "tz": "UTC"}), do("remove_repeatable_by_key", key=OLDEST)],
    ids=["by what it was made of", "by its key"],
)
def test_a_series_of_the_oldest_format_is_removed_with_its_next_job(
    pair: Pair, form: Form, step: dict[str, Any]
) -> None:
    job_id = f"repeat:{md5('tick' + md5(OLDEST))}:{START_MS + HOUR}"
    outcome = pair.run([step, do("repeatables")], form, made=[], prepare=lambda: oldest(pair, OLDEST, job_id))
    assert not outcome.report()
    assert outcome.ours == [{"ok": True}, {"ok": []}]
    assert "delayed" not in outcome.our_state


def test_a_key_of_the_oldest_format_is_parsed(pair: Pair, form: Form) -> None:
    end = START_MS + 1000 * HOUR
    key = f"tick:mine:{end}:Europe/Berlin:0 3 * * *"
    outcome = pair.run([do("repeatables")], form, made=[], prepare=lambda: oldest(pair, key, "x"))
    assert outcome.ours == [{"ok": [[key, "tick", START_MS + HOUR]]}]
