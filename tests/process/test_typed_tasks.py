"""A sender and a worker convert arguments and results to the types of their hints."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from bulltask import JobState, chord, group
from bulltask.errors import InvalidJobError, TaskError
from tests.support.programs import ROOT
from tests.support.typed_tasks import Address, Card, Item, Order, Receipt, Shipping, register
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

SOURCE = "from tests.support.typed_tasks import register\nregister(app)\n"
PLACED = datetime(2026, 11, 23, 10, 30, tzinfo=UTC)
ORDER = Order(
    UUID(int=7), PLACED, [Item("tea", Decimal("2.50"), 2), Item("cup", Decimal(4))], Shipping.EXPRESS, {"new"}
)


@pytest.fixture
def tasks(harness: WorkerHarness) -> Any:
    register(harness.app)
    harness.worker(SOURCE, children=1, environ={"PYTHONPATH": str(ROOT)}, settings={"incompatible_timeout": 0})
    return harness.app.tasks


def test_arguments_and_results_arrive_as_the_types_of_their_hints(harness: WorkerHarness, tasks: Any) -> None:
    receipt = tasks["shop.checkout"].delay(ORDER, Decimal("0.5"), terms=timedelta(days=1)).get(timeout=60)
    assert receipt == Receipt(UUID(int=7), Decimal("8.50"), date(2026, 11, 24), ("2 tea", "1 cup"))
    sent = harness.app.send_task("shop.checkout", (ORDER,))
    assert isinstance(sent.get(timeout=60), Receipt)
    assert sent.info == sent.get()
    many = harness.app.send_many([tasks["shop.checkout"].s(ORDER), tasks["shop.now"].s()])
    assert [type(result.get(timeout=60)) for result in many] == [Receipt, datetime]
    assert isinstance(harness.app.result(sent.id).get(), dict)
    assert isinstance(harness.app.result(sent.id, task=tasks["shop.checkout"]).get(), Receipt)


async def test_await_returns_the_type_of_the_hint(tasks: Any) -> None:
    assert await (await tasks["shop.now"].adelay()) == datetime(2026, 11, 23, 10, tzinfo=UTC)


def test_a_job_written_by_another_client_runs_with_the_types_of_the_hints(harness: WorkerHarness, tasks: Any) -> None:
    order: Any = {"id": str(UUID(int=7)), "placed": "2026-11-23T10:30:00.000Z", "items": [{"sku": "tea", "price": 2.5}]}
    job = harness.app.queue("default").add("shop.checkout", {"order": order, "terms": 86_400})
    result = harness.app.result(job.id)
    result.get(timeout=60)
    assert harness.field(result, "returnvalue") == (
        '{"order":"00000000-0000-0000-0000-000000000007","total":"2.5","due":"2026-11-24","lines":["1 tea"]}'
    )


def test_pydantic_validates_models_by_their_own_rules(harness: WorkerHarness, tasks: Any) -> None:
    address = Address(street="Main 1", postCode="12345", since=date(2020, 1, 1))
    moved = tasks["shop.move"].delay([Card(number="1", holder=address)])
    assert moved.get(timeout=60) == {UUID(int=0): address}
    assert '"postCode":"12345"' in harness.field(moved, "data")


def test_a_bad_payload_fails_without_a_retry_with_the_path_of_the_bad_field(harness: WorkerHarness, tasks: Any) -> None:
    order = {"id": str(UUID(int=7)), "placed": "2026-11-23T10:30:00Z", "items": []}
    prices = [{"sku": "a", "price": 1}, {"sku": "b", "price": "?"}]
    holder = {"street": "Main 1", "postCode": "1", "country": "DE"}
    calls: list[tuple[str, dict[str, Any], str]] = [
        ("shop.checkout", {"order": {**order, "items": prices}}, "order.items[1].price: expected a decimal number"),
        (
            "shop.checkout",
            {"order": {**order, "item": []}},
            "order.item: Order has no such field; did you mean",
        ),
        ("shop.move", {"cards": [{"number": "1", "holder": holder}]}, "cards[0].holder.postCode: String should match"),
        ("shop.move", {"cards": [], "limit": 0}, "limit: Input should be greater than 0"),
        ("shop.strict", {"count": "3"}, "count: expected an integer, not '3'"),
    ]
    queue = harness.app.queue("default")
    jobs = {message: queue.add(name, data, attempts=3) for name, data, message in calls}
    for message, job in jobs.items():
        result = harness.app.result(job.id)
        with pytest.raises(InvalidJobError) as caught:
            result.get(timeout=60)
        assert message in str(caught.value)
        assert (result.state, harness.field(result, "atm")) == (JobState.FAILED, "1")


def test_results_arrive_in_the_next_tasks_of_a_canvas_as_the_types_of_their_hints(tasks: Any) -> None:
    due, latest, now = tasks["shop.due"], tasks["shop.latest"], tasks["shop.now"]
    chained = (now.s() | due.s(terms=timedelta(days=2))).delay()
    assert chained.get(timeout=60) == date(2026, 11, 25)
    members = [due.s(PLACED), due.s(PLACED, timedelta(days=3))]
    joined = chord(members)(latest.s(than=date(2020, 1, 1)))
    assert joined.get(timeout=60) == date(2026, 11, 26)
    assert group(members)().get(timeout=60) == [date(2026, 11, 24), date(2026, 11, 26)]
    starmap = due.starmap([(PLACED,), (PLACED, timedelta(days=3))])
    assert starmap.delay().get(timeout=60) == [date(2026, 11, 24), date(2026, 11, 26)]


def test_hints_of_jsons_own_types_are_enforced_only_if_the_task_is_typed(tasks: Any) -> None:
    assert tasks["shop.loose"].delay("3", [1]).get(timeout=60) == "'3' [1]"
    assert tasks["shop.strict"].delay(3, ["a"]).get(timeout=60) == "3 ['a']"


def test_a_return_value_that_does_not_match_its_hint_fails_the_job(tasks: Any) -> None:
    with pytest.raises(TaskError, match=r"the return value of task shop.wrong: \[1\]: expected Item, not None"):
        tasks["shop.wrong"].delay().get(timeout=60)


def test_a_task_can_replace_its_arguments_with_values_of_their_types(tasks: Any) -> None:
    assert tasks["shop.postpone"].delay(PLACED).get(timeout=60) == b"\xff2026-11-24T10:30:00+00:00"
