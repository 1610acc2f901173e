"""Sends of tasks with task_routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulltask import App


def by_total(_name: str, _args: object, kwargs: Mapping[str, Any], *_: object, **__: object) -> str:
    """A router whose route depends on the arguments."""
    return "large" if kwargs["total"] > 100 else "small"


def test_each_way_to_send_follows_the_routes(broker_url: str) -> None:
    with_table = App("shop", broker_url, task_routes={"or*": "orders"}, set_as_current=False)
    with_function = App("shop", broker_url, task_routes=by_total, set_as_current=False)
    queues = []
    for app in (with_table, with_function):

        @app.task(name="order")
        def order(total: int) -> None: ...

        results = [
            order.delay(1),
            order.delay(101),
            *order.delay_many([(1,), (101,)]),
            order.apply_async((101,)),
            order.apply_async((101,), queue="own"),
            *app.send_many([order.s(1), order.s(total=101)]),
            app.send_task("order", (), {"total": 101}),
        ]
        queues.append([result.queue for result in results])
        assert [result.state for result in results] == ["waiting"] * 9
        app.close()
    orders, large, small = "orders", "large", "small"
    assert queues[0] == [orders] * 5 + ["own"] + [orders] * 3
    assert queues[1] == [small, large, small, large, large, "own", small, large, large]


def test_a_canvas_follows_the_routes_of_its_tasks(broker_url: str) -> None:
    app = App("shop", broker_url, task_routes={"pack": "packing{shop}", "order": "orders{shop}"}, set_as_current=False)

    @app.task(name="order")
    def order(total: int) -> int:
        return total

    @app.task(name="pack")
    def pack(total: int) -> None: ...

    assert (order.s(1) | pack.s()).apply_async().queue == "packing{shop}"
    assert order.map([1, 2]).apply_async().queue == "orders{shop}"
    assert app.queue("orders{shop}").get_waiting_count() == 2
    app.close()
