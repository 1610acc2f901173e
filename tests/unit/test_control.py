"""The public names of ``app.control`` and ``app.inspect()``, and orders as other versions may write them."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bulltask import App
from bulltask.cli.main import main
from bulltask.errors import BulltaskError, ConfigError, InvalidNameError
from bulltask.queue.aio.control import AsyncControl, AsyncInspect
from bulltask.queue.control import Answers, _matches
from bulltask.queue.sync.control import Control, Inspect
from bulltask.transport.orders import Order, Reply
from bulltask.worker.orders import INSPECTIONS, Orders

PAGE = Path(__file__).parents[2] / "docs/reference/commands.md"

CONTROL = set(
    "add_consumer autoscale broadcast cancel_consumer discard_all inspect log_level order pause ping pool_grow "
    "pool_restart pool_shrink purge rate_limit resume revoke shutdown terminate time_limit".split()
)
INSPECT = set("active active_queues conf ping registered registered_tasks reserved stats".split())
OTHERS = {"broadcast", "discard_all", "inspect", "order", "purge", "revoke", "terminate"}
"""Names of ``app.control`` that are not orders."""


def names(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_the_names_are_celerys_and_those_of_the_orders() -> None:
    assert names(Control) == names(AsyncControl) == CONTROL
    assert names(Inspect) == names(AsyncInspect) == INSPECT
    orders = {name for name in vars(Orders) if not name.startswith("_")} - {"cancelled", "execute"}
    assert orders == CONTROL - OTHERS | INSPECTIONS
    assert INSPECT - {"registered_tasks"} == INSPECTIONS


def test_the_orders_are_documented() -> None:
    section = PAGE.read_text().split("## Live workers")[1].split("\n## ")[0]
    columns = re.findall(r"^\| `.*?` \| (.*?) \|", section, re.MULTILINE)
    documented = {name for column in columns for name in re.findall(r"\w+", column)}
    assert documented - {"app", "control"} == CONTROL - OTHERS - {"ping"}


def test_an_app_keeps_its_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    app = App("kept", "redis://h")
    assert (app.control is app.control, app.acontrol is app.acontrol) == (True, True)
    assert isinstance(app.ainspect(), AsyncInspect)
    assert "destination" in inspect.signature(app.inspect).parameters


def test_what_routes_jobs_in_celery_but_not_in_redis_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(Control, "broadcast", lambda _, *args: given.append(args))
    control = App("routes", "redis://h").control
    control.add_consumer("mail", "mail", "direct", "mail", {}, ["web-1"])
    assert given == [("add_consumer", {"queue": "mail"}, ["web-1"], False, 2)]
    with pytest.raises(ConfigError, match=r"cannot use exchange, exchange_type, routing_key: Redis has no exchanges"):
        control.add_consumer("mail", "media", "topic", "media.*")
    with pytest.raises(InvalidNameError, match="contains a ':'"):
        control.add_consumer("a:b")


@pytest.mark.parametrize(
    ("name", "matches"),
    [
        ("web@host-1-7-0f3a9b", True),
        ("web@host-1", True),
        ("web@*", True),
        ("*-0f3a9?", True),
        ("web@host", False),
        ("host-1-7-0f3a9b", False),
    ],
)
def test_workers_are_named_by_their_ids_or_patterns(name: str, matches: bool) -> None:
    assert _matches("web@host-1-7-0f3a9b", name) is matches


def test_an_order_is_read_as_it_was_written_and_may_have_more_fields() -> None:
    order = Order(id="a1", name="pool_grow", arguments={"n": 2}, sender="ada@host", app="shöp", expires_ms=5)
    stored = json.loads(order.to_json())
    assert Order.from_json(json.dumps({**stored, "new": [1]}).encode()) == order
    for missing in ("id", "order", "expires_ms"):
        raw: dict[str, Any] = {name: value for name, value in stored.items() if name != missing}
        with pytest.raises(BulltaskError, match="not an order"):
            Order.from_json(json.dumps(raw).encode())


def test_a_reply_is_read_as_it_was_written_and_another_value_is_none() -> None:
    for reply in (Reply(worker="w", value=[1]), Reply(worker="w", error="no")):
        assert Reply.from_json(reply.to_json().encode()) == reply
    assert [Reply.from_json(raw) for raw in (b"[]", b"x", b"{}", b"\xff")] == [None] * 4
    answers = Answers(replies={"a": 1}, errors={"b": "no"})
    assert (answers.answered, answers.results()) == (2, {"a": 1, "b": {"error": "no"}})


def test_an_invalid_rate_is_invalid_usage_and_is_not_sent() -> None:
    refused = CliRunner().invoke(main, ["control", "rate-limit", "-b", "redis://127.0.0.1:1", "mail", "fast"])
    assert (refused.exit_code, "RATE must be" in refused.output) == (2, True)
