"""bulltask lists and removes repeatable jobs of BullMQ's legacy API, which only Node adds, like Node."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, cast

import pytest

from tests.interop.differential.pair import HOUR, START_MS, Pair
from tests.interop.differential.processors import Form
from tests.interop.differential.test_scripts import Steps, acquire, do, every

pytestmark = [pytest.mark.interop, pytest.mark.redis]

UTC_NIGHT: Final = {"pattern": "0 3 * * *", "tz": "UTC"}
OLDEST: Final = f"tick:::UTC:{HOUR}"
END: Final = {"pattern": "0 4 * * *", "endDate": START_MS + 1000 * HOUR}


def add_repeatable(name: str, repeat: dict[str, Any], **opts: object) -> dict[str, Any]:
    return do("add_repeatable", name=name, data={"n": 1}, opts={"repeat": repeat, **opts})


def remove_repeatable(name: str, repeat: dict[str, Any], **more: object) -> dict[str, Any]:
    return do("remove_repeatable", name=name, repeat=repeat, **more)


NODE_SETUP: Final[Steps] = [
    add_repeatable("tick", {"every": HOUR}),
    add_repeatable("night", UTC_NIGHT),
    add_repeatable("night", UTC_NIGHT, jobId="mine"),
    add_repeatable("end", END),
    add_repeatable("keyed", {"every": 2 * HOUR, "key": "custom-key"}),
]


def md5(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()


@pytest.fixture(params=["sync", "async"])
def form(request: pytest.FixtureRequest) -> Form:
    return cast("Form", request.param)


def test_repeatable_jobs_are_listed_as_node_lists_them(pair: Pair, form: Form) -> None:
    outcome = pair.run([do("repeatables")], form, node_setup=NODE_SETUP)
    assert not outcome.report()
    assert [name for _, name, _ in outcome.bulltask_results[0]["ok"]] == ["tick", "keyed", "night", "night", "end"]


def test_schedulers_are_not_listed_as_repeatable_jobs(pair: Pair, form: Form) -> None:
    """Node lists schedulers too, and would remove them by their key without their template."""
    outcome = pair.run([do("repeatables")], form, node_setup=[*NODE_SETUP[:1], every(HOUR)])
    assert (len(outcome.node_results[0]["ok"]), len(outcome.bulltask_results[0]["ok"])) == (2, 1)


@pytest.mark.parametrize(
    "step",
    [
        remove_repeatable("tick", {"every": HOUR}),
        remove_repeatable("tick", {"every": 2 * HOUR}),
        remove_repeatable("night", UTC_NIGHT),
        remove_repeatable("night", UTC_NIGHT, jobId="mine"),
        remove_repeatable("end", END),
        do("remove_repeatable_by_key", key="custom-key"),
        do("remove_repeatable_by_key", key="missing"),
        do("remove_repeatable_by_key", key="a:b:c:d:e"),
    ],
    ids=lambda step: json.dumps(step)[:70],
)
def test_removing_a_repeatable_job_leaves_the_same_state_as_node(pair: Pair, form: Form, step: dict[str, Any]) -> None:
    outcome = pair.run([step, step], form, node_setup=NODE_SETUP)
    assert not outcome.report()


def test_a_repeatable_job_can_be_removed_while_an_iteration_is_active(pair: Pair, form: Form) -> None:
    steps = [do("wait", ms=2 * HOUR), acquire(), remove_repeatable("tick", {"every": HOUR}), do("repeatables")]
    outcome = pair.run(steps, form, node_setup=NODE_SETUP[:1])
    assert not outcome.report()
    assert outcome.bulltask_results[0]["ok"] is not None
    assert outcome.bulltask_results[-2:] == [{"ok": True}, {"ok": []}]
    assert "removeRepeatable" in outcome.bulltask_scripts & outcome.node_scripts


def store_oldest_format(pair: Pair, key: str, job_id: str) -> None:
    """Store a repeatable job like BullMQ 1 to 4: the key contains the rule, and there is no hash."""
    for name in pair.names:
        base = f"bull:{name}:"
        pair.redis.zadd(f"{base}repeat", {key: START_MS + HOUR})
        pair.redis.zadd(f"{base}delayed", {job_id: (START_MS + HOUR) * 4096})
        fields = {"name": "tick", "data": "{}", "opts": "{}", "timestamp": START_MS}
        pair.redis.hset(f"{base}{job_id}", mapping=cast(Any, fields))


@pytest.mark.parametrize(
    "step",
    [remove_repeatable("tick", {"every": HOUR, "tz": "UTC"}), do("remove_repeatable_by_key", key=OLDEST)],
    ids=["by its rule", "by its key"],
)
def test_a_repeatable_job_in_the_oldest_format_is_removed_with_its_next_job(
    pair: Pair, form: Form, step: dict[str, Any]
) -> None:
    job_id = f"repeat:{md5('tick' + md5(OLDEST))}:{START_MS + HOUR}"
    outcome = pair.run(
        [step, do("repeatables")], form, node_setup=[], prepare=lambda: store_oldest_format(pair, OLDEST, job_id)
    )
    assert not outcome.report()
    assert outcome.bulltask_results == [{"ok": True}, {"ok": []}]
    assert "delayed" not in outcome.bulltask_state


def test_a_repeatable_key_in_the_oldest_format_is_parsed(pair: Pair, form: Form) -> None:
    end = START_MS + 1000 * HOUR
    key = f"tick:mine:{end}:Europe/Berlin:0 3 * * *"
    outcome = pair.run([do("repeatables")], form, node_setup=[], prepare=lambda: store_oldest_format(pair, key, "x"))
    assert outcome.bulltask_results == [{"ok": [[key, "tick", START_MS + HOUR]]}]
