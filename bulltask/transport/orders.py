"""Orders to live workers, and their replies: :class:`Order` and :class:`Reply`, and the calls that carry them.

A sender appends the same order to a list of each worker, in the worker's home queue. A supervisor looks at its list
twice a second, takes the orders from it, so that each is executed at most once, and appends a reply to a list that all
workers with the same home queue share. Orders and replies expire.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Final

from bulltask.jobs.clock import value_class
from bulltask.jobs.errors import DecodeError
from bulltask.lua import loader
from bulltask.transport.call import Call, QueueKeys, command, script_call, text

__all__ = [
    "MAX_ORDERS",
    "MAX_ORDER_BYTES",
    "Order",
    "Reply",
    "has_requests",
    "post_order",
    "post_reply",
    "read_replies",
    "take_orders",
    "withdraw_order",
]


MAX_ORDERS: Final = 16
"""How many orders a supervisor takes at a time, twice a second."""
MAX_ORDER_BYTES: Final = 16_384

_MAX_NAME: Final = 200
_MAX_REPLIES: Final = 10_000
_REPLY_TTL_MS: Final = 60_000
_GRACE_MS: Final = 60_000
"""How long an order may stay in Redis after it has expired, so that a worker whose clock is late can refuse it."""


@value_class(kw_only=True)
class Order:
    """An order to workers.

    Attributes:
        id: 32 hexadecimal digits.
        name: What to do, such as ``pool_grow``.
        arguments: The arguments by name, JSON values.
        sender: Who has sent it: ``user@host``.
        app: The sender's app.
        expires_ms: When it is no longer executed (server time).
    """

    id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sender: str = ""
    app: str = ""
    expires_ms: int = 0

    def to_json(self) -> str:
        """Return the order as JSON."""
        return json.dumps(
            {
                "id": self.id,
                "order": self.name,
                "arguments": dict(self.arguments),
                "sender": self.sender,
                "app": self.app,
                "expires_ms": self.expires_ms,
            },
            ensure_ascii=False,
        )

    @classmethod
    def from_json(cls, raw: bytes) -> Order:
        """Return an order that any client may have written; raises ``DecodeError``."""
        try:
            stored = json.loads(raw)
            order = cls(
                id=stored["id"],
                name=stored["order"],
                arguments=stored.get("arguments") or {},
                sender=stored.get("sender", ""),
                app=stored.get("app", ""),
                expires_ms=stored["expires_ms"],
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
            raise DecodeError(f"not an order: {type(exc).__name__}: {exc}") from exc
        texts = (order.id, order.name, order.sender, order.app)
        if not all(isinstance(each, str) and len(each) <= _MAX_NAME for each in texts):
            raise DecodeError(
                f"not an order: its id, name, sender and app must be texts of up to {_MAX_NAME} characters"
            )
        if not isinstance(order.expires_ms, int) or not isinstance(order.arguments, dict):
            raise DecodeError("not an order: expires_ms must be a number, and arguments an object")
        if not (order.id.isascii() and order.id.isalnum()):
            raise DecodeError("not an order: its id must consist of letters and digits")
        return order


@value_class(kw_only=True)
class Reply:
    """A worker's reply to an order.

    Attributes:
        worker: The worker's id.
        value: The result, a JSON value; ``None`` if there is an error.
        error: Why the worker has not executed the order; ``""`` if it has.
    """

    worker: str
    value: Any = None
    error: str = ""

    def to_json(self) -> str:
        """Return the reply as JSON."""
        result = {"error": self.error} if self.error else {"value": self.value}
        return json.dumps({"worker": self.worker, **result}, ensure_ascii=False, default=str)

    @classmethod
    def from_json(cls, raw: bytes) -> Reply | None:
        """Return the reply; ``None`` if it is none."""
        try:
            stored = json.loads(raw)
            return cls(worker=str(stored["worker"]), value=stored.get("value"), error=str(stored.get("error") or ""))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None


def post_order(keys: QueueKeys, worker_id: str, order: str, timeout_ms: int) -> list[Call[Any]]:
    """Return the calls that send an order to a worker whose home queue has these keys."""
    orders = keys.orders(worker_id)
    return [command("RPUSH", orders, order), command("PEXPIRE", orders, timeout_ms + _GRACE_MS)]


def withdraw_order(keys: QueueKeys, worker_id: str, order: str) -> Call[bool]:
    """Return the call that removes an order; false if the worker has already taken it."""
    return command("LREM", keys.orders(worker_id), 1, order, parse_reply=bool)


def has_requests(keys: QueueKeys, worker_id: str) -> Call[bool]:
    """Return the call that each worker makes twice a second: whether it has orders, or its home queue revoked jobs."""
    return command("EXISTS", keys.orders(worker_id), keys.revoked, parse_reply=bool)


def take_orders(keys: QueueKeys, worker_id: str) -> Call[list[bytes | int]]:
    """Return the call that takes the oldest orders; of those that are too long, only the length."""
    script = loader.bulltask_script("takeOrders")
    return script_call(script, (keys.orders(worker_id),), (MAX_ORDERS, MAX_ORDER_BYTES))


def post_reply(keys: QueueKeys, order_id: str, reply: Reply) -> list[Call[Any]]:
    """Return the calls that reply to an order."""
    replies = keys.replies(order_id)
    return [command("RPUSH", replies, reply.to_json()), command("PEXPIRE", replies, _REPLY_TTL_MS)]


def read_replies(keys: QueueKeys, order_id: str, start: int) -> Call[list[Reply | None]]:
    """Return the call that reads the replies from number ``start`` on; they stay, as a reply of Redis may be lost."""

    def parse_reply(reply: Sequence[bytes]) -> list[Reply | None]:
        return [Reply.from_json(text(raw).encode("utf-8", "surrogateescape")) for raw in reply]

    return command("LRANGE", keys.replies(order_id), start, start + _MAX_REPLIES - 1, parse_reply=parse_reply)
