"""On a Redis Cluster, a flow across several slots is rejected before anything is sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bulltask import App, chain, group
from bulltask.errors import BrokerUnavailableError, ConfigError
from bulltask.jobs.job import JobRef, PlannedJob
from bulltask.queue import FlowJob
from bulltask.queue.flows import FlowSender, plan
from bulltask.registry.canvas import Canvas
from bulltask.registry.canvas_plan import plan_canvas, plan_replacement
from bulltask.transport.broker import Broker

URL = "redis://127.0.0.1:1"  # no connection is made
CLUSTER_URL = "redis+cluster://127.0.0.1:1"
APP = App("shop", URL)


@APP.task(queue="mail{shop}")
def mail(*values: Any) -> None: ...


@APP.task(queue="news{shop}")
def news(*values: Any) -> None: ...


@APP.task(queue="other")
def other(*values: Any) -> None: ...


@pytest.fixture
def cluster() -> Broker:
    return Broker(APP._config, CLUSTER_URL)


def first_calls(broker: Broker, roots: list[PlannedJob]) -> Any:
    """Return the first calls of a send."""
    return next(FlowSender(roots, broker, set()).try_once())


def planned(canvas: Canvas[Any, Any]) -> list[PlannedJob]:
    return plan_canvas(canvas, APP._config, {}).roots


ONE_SLOT: dict[str, Any] = {
    "a chain": lambda: planned(mail.si() | news.si()),
    "a chord with callbacks": lambda: planned(
        chain(group(mail.s(), news.s()), mail.s(), group(news.si().on_error(mail.si()), mail.si()))
    ),
    "a call in a queue without a tag": lambda: planned(other.s()),
    "a parent": lambda: plan([FlowJob("a", "mail{shop}")], JobRef("news{shop}", "p"), {}, APP._config),
    "a replacement": lambda: plan_replacement(mail.si() | news.si(), APP._config, JobRef("news{shop}", "p"), {})[0],
}
SEVERAL_SLOTS: dict[str, Any] = {
    "a chain": lambda: planned(mail.si() | other.si()),
    "a group": lambda: planned(group(mail.si(), other.si())),
    "an error callback": lambda: planned(mail.si().on_error(other.si())),
    "the error callback of a chain": lambda: planned((mail.si() | news.si()).on_error(other.si())),
    "a callback": lambda: planned(chain(mail.si(), other.si())),
    "a parent": lambda: plan([FlowJob("a", "mail{shop}")], JobRef("other", "p"), {}, APP._config),
    "a replacement": lambda: plan_replacement(mail.si() | news.si(), APP._config, JobRef("other", "p"), {})[0],
}


@pytest.mark.parametrize("flow", ONE_SLOT)
def test_a_flow_in_one_slot_of_a_cluster_is_sent(cluster: Broker, flow: str) -> None:
    assert first_calls(cluster, ONE_SLOT[flow]())


@pytest.mark.parametrize("flow", SEVERAL_SLOTS)
def test_a_flow_in_several_slots_of_a_cluster_is_an_error_that_says_what_to_do(cluster: Broker, flow: str) -> None:
    roots = SEVERAL_SLOTS[flow]()
    with pytest.raises(ConfigError) as raised:
        first_calls(cluster, roots)
    text = str(raised.value)
    assert "bull:mail{shop} (slot " in text
    assert "bull:{other} (slot " in text
    assert "Nothing was sent" in text
    assert "new Queue('mail{shop}')" in text
    assert "prefix='{bull}'" in text
    assert first_calls(Broker(APP._config, URL), SEVERAL_SLOTS[flow]()), "a single server has no slots"


def test_a_job_whose_parent_is_in_another_slot_is_an_error_and_no_job_is_sent(cluster: Broker) -> None:
    alone, child = mail.s().job(), mail.s().set(parent={"id": "p", "queue": "other"}).job()
    for send in (cluster.producer.send, lambda jobs: asyncio.run(cluster.producer.asend(jobs))):
        with pytest.raises(ConfigError, match=r"bull:mail\{shop\} \(slot \d+\), bull:\{other\}"):
            send([alone, child])  # without the error, it would fail to connect
        with pytest.raises(BrokerUnavailableError):
            send([alone, other.s().job()])


def test_a_prefix_with_a_tag_puts_all_queues_into_one_slot() -> None:
    app = App("shop", URL, prefix="{bull}")
    flow = FlowJob("a", "mail", children=[FlowJob("b", "other")])
    roots = plan([flow], None, {}, app._config)
    assert first_calls(Broker(app._config, CLUSTER_URL), roots)
