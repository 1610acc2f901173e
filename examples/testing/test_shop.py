"""52 tests of an app's tasks: each uses a real Valkey server, and none waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import date, timedelta

import pytest
from shop import tasks
from shop.tasks import Line, charge, checkout, import_prices, invoice_number, mail, order, resize

from bulltask import App, JobState, PermanentError
from bulltask.errors import EncodeError, ResultTimeoutError
from bulltask.events import JobCompleted, JobFailed, JobRetried
from bulltask.testing import FakeClock, InlineWorker

CART = [Line("tea", 2, 450), Line("cup", 1, 1200)]


class FakeBank:
    """Refuses the first ``failures`` payments."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures

    def charge(self, cents: int) -> str:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the bank is closed")
        return f"R-{cents}"


@pytest.fixture(autouse=True)
def shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tasks, "bank", FakeBank())
    tasks.STOCK.update(tea=10, cup=1)
    yield
    for memory in (tasks.STOCK, tasks.SENT, tasks.PAYMENTS, tasks.REPORTS):
        memory.clear()


# ---- which jobs does the code send? ----------------------------------------------------------------------------------


def test_checkout_sends_an_order(assert_enqueued: Callable[..., list]) -> None:
    job_id = checkout("ann@example.com", CART)
    [job] = assert_enqueued(order, ("ann@example.com", CART))
    assert job.id == job_id


def test_checkout_sends_nothing_for_an_empty_cart(assert_enqueued: Callable[..., list]) -> None:
    with pytest.raises(ValueError, match="empty"):
        checkout("ann@example.com", [])
    assert_enqueued(order, count=0)


@pytest.mark.parametrize("text", ["hello", "", "äöü 🙂", "a" * 10_000, '{"json": true}', "line\nbreak"])
def test_any_text_reaches_the_mail_task(bulltask_worker: InlineWorker, text: str) -> None:
    mail.delay("ann@example.com", text)
    bulltask_worker.run_jobs()
    assert [("ann@example.com", text)] == tasks.SENT


@pytest.mark.parametrize("priority", [1, 5, 100])
def test_options_of_a_call(assert_enqueued: Callable[..., list], priority: int) -> None:
    mail.apply_async(("ann@example.com", "hello"), priority=priority, countdown=30)
    assert_enqueued(mail, queue="mail", priority=priority, countdown=30)


@pytest.mark.parametrize("cart", [[object()], [Line("tea", 1, object())], "tea"])  # type: ignore[arg-type]
def test_a_cart_that_is_not_json_is_rejected_before_it_is_sent(
    assert_enqueued: Callable[..., list], cart: list
) -> None:
    with pytest.raises(EncodeError):
        order.delay("ann@example.com", cart)
    assert_enqueued(order, count=0)


def test_wrong_arguments_are_rejected_before_they_are_sent(assert_enqueued: Callable[..., list]) -> None:
    with pytest.raises(TypeError):
        mail.delay("ann@example.com")  # type: ignore[call-arg]
    assert_enqueued(mail, count=0)


# ---- what do the tasks do? -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("quantity", "cents"), [(1, 450), (2, 900), (10, 4500)])
def test_an_order_costs_the_sum_of_its_lines(bulltask_worker: InlineWorker, quantity: int, cents: int) -> None:
    assert order.delay("ann@example.com", [Line("tea", quantity, 450)]).get() == cents
    assert tasks.STOCK["tea"] == 10 - quantity


def test_an_order_leads_to_a_payment_and_a_receipt(bulltask_worker: InlineWorker) -> None:
    checkout("ann@example.com", CART)
    bulltask_worker.run_jobs()
    assert tasks.PAYMENTS == [2100]
    assert tasks.SENT == [("ann@example.com", "receipt R-2100")]


def test_an_order_is_paid_once(bulltask_worker: InlineWorker) -> None:
    checkout("ann@example.com", CART)
    bulltask_worker.run_jobs()
    bulltask_worker.run_jobs()
    assert len(tasks.PAYMENTS) == 1


@pytest.mark.parametrize("product", ["tea", "cup", "pot"])
def test_an_order_fails_if_a_product_is_sold_out(
    bulltask_worker: InlineWorker, assert_enqueued: Callable[..., list], product: str
) -> None:
    order.delay("ann@example.com", [Line(product, 11, 1)])
    with pytest.raises(PermanentError, match=f"{product} is sold out"):
        bulltask_worker.run_jobs()
    assert_enqueued(charge, count=0)


def test_a_failed_order_can_be_inspected(bulltask_worker: InlineWorker) -> None:
    result = order.delay("ann@example.com", [Line("pot", 1, 1)])
    [event] = bulltask_worker.run_jobs(propagate=False)
    assert isinstance(event, JobFailed)
    assert result.state is JobState.FAILED
    with pytest.raises(PermanentError, match="sold out"):
        result.get()


@pytest.mark.parametrize("address", ["ann", "", "example.com"])
def test_mail_needs_an_address(bulltask_worker: InlineWorker, address: str) -> None:
    with pytest.raises(PermanentError, match="not an address"):
        mail.delay(address, "hello").get()


def test_a_plain_call_needs_no_worker() -> None:
    mail("ann@example.com", "hello")
    assert tasks.SENT == [("ann@example.com", "hello")]


@pytest.mark.parametrize(("day", "number"), [(date(2026, 1, 31), 7), (date(1999, 12, 31), 1234)])
def test_dates_come_back_as_dates(bulltask_worker: InlineWorker, day: date, number: int) -> None:
    assert invoice_number.delay(day, number).get() == invoice_number(day, number)


def test_an_import_reports_its_progress(bulltask_worker: InlineWorker) -> None:
    result = import_prices.delay(["tea;5", "pot;3"])
    assert result.get() == 2
    assert result.progress == {"done": 2, "of": 2}
    assert tasks.STOCK == {"tea": 5, "cup": 1, "pot": 3}


def test_an_import_stops_at_a_bad_row(bulltask_worker: InlineWorker) -> None:
    result = import_prices.delay(["tea;5", "pot"])
    with pytest.raises(ValueError, match="not enough values"):
        result.get()
    assert result.progress == {"done": 1, "of": 2}


# ---- async -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", [(), (100,), (100, 200, 300)])
def test_an_async_task_in_a_sync_test(bulltask_worker: InlineWorker, widths: tuple[int, ...]) -> None:
    assert resize.delay("cup.png", *widths).get() == [f"cup.png?w={width}" for width in widths]


def test_an_async_task_in_an_async_test(bulltask_worker: InlineWorker) -> None:
    async def in_a_loop() -> None:
        results = [await resize.adelay("cup.png", width) for width in (100, 200)]
        assert await asyncio.gather(*results) == [["cup.png?w=100"], ["cup.png?w=200"]]

    asyncio.run(in_a_loop())


# ---- retries ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failures", [1, 2, 3, 4])
def test_a_payment_is_retried_until_the_bank_is_open(
    bulltask_worker: InlineWorker, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    monkeypatch.setattr(tasks, "bank", FakeBank(failures))
    assert charge.delay("ann@example.com", 100).get() == "R-100"
    assert tasks.PAYMENTS == [100]


def test_the_delay_between_retries_doubles(bulltask_worker: InlineWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "bank", FakeBank(3))
    charge.delay("ann@example.com", 100)
    events = bulltask_worker.run_for(60)
    assert [event.delay_ms for event in events if isinstance(event, JobRetried)] == [1000, 2000, 4000]
    assert [event.task for event in events if isinstance(event, JobCompleted)] == [
        "shop.tasks.charge",
        "shop.tasks.mail",
    ]


def test_a_payment_fails_after_five_attempts(bulltask_worker: InlineWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "bank", FakeBank(99))
    result = charge.delay("ann@example.com", 100)
    with pytest.raises(ConnectionError, match="the bank is closed"):
        bulltask_worker.run_for(60)
    assert result.snapshot().attempts_made == 5
    assert tasks.SENT == []


def test_a_first_failed_attempt_is_not_a_failed_job(
    bulltask_worker: InlineWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "bank", FakeBank(1))
    result = charge.delay("ann@example.com", 100)
    [event] = bulltask_worker.run_jobs()
    assert isinstance(event, JobRetried)
    assert result.state is JobState.DELAYED


# ---- time ------------------------------------------------------------------------------------------------------------


def test_a_review_is_asked_for_after_a_week(bulltask_worker: InlineWorker) -> None:
    checkout("ann@example.com", CART)
    bulltask_worker.run_for(timedelta(days=6))
    assert len(tasks.SENT) == 1
    bulltask_worker.run_for(timedelta(days=2))
    assert tasks.SENT[1:] == [("ann@example.com", "How was it?")]


def test_an_order_that_nobody_handles_for_an_hour_expires(
    bulltask_worker: InlineWorker, bulltask_clock: FakeClock
) -> None:
    checkout("ann@example.com", CART)
    bulltask_clock.advance(timedelta(minutes=61))
    [event] = bulltask_worker.run_jobs(propagate=False)
    assert isinstance(event, JobFailed)
    assert tasks.PAYMENTS == []


@pytest.mark.parametrize(("hours", "times"), [(1, 6), (2, 12)])
def test_carts_expire_every_ten_minutes(bulltask_worker: InlineWorker, hours: int, times: int) -> None:
    bulltask_worker.run_for(timedelta(hours=hours))
    assert tasks.REPORTS.count("carts") == times


def test_the_report_is_made_once_a_day(bulltask_worker: InlineWorker) -> None:
    bulltask_worker.run_for(timedelta(days=1))
    assert tasks.REPORTS.count("report") == 1


def test_get_advances_the_clock_until_the_job_is_due(bulltask_worker: InlineWorker, bulltask_clock: FakeClock) -> None:
    start = bulltask_clock.now()
    mail.apply_async(("ann@example.com", "hello"), countdown=3600).get()
    assert bulltask_clock.now() - start >= timedelta(hours=1)


def test_get_respects_its_timeout(bulltask_worker: InlineWorker) -> None:
    with pytest.raises(ResultTimeoutError, match="still delayed"):
        mail.apply_async(("ann@example.com", "hello"), countdown=3600).get(timeout=60)


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.bulltask(task_max_retries=0, max_payload=200)
def test_settings_of_one_test(bulltask_app: App) -> None:
    with pytest.raises(Exception, match="limit of 200"):
        mail.delay("ann@example.com", "a" * 300)


def test_the_next_test_has_the_apps_own_settings(bulltask_app: App) -> None:
    assert bulltask_app.conf.max_payload > 1_000_000
