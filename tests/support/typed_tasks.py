"""Tasks with type hints, for the sender and the worker of a test."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Annotated
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from bulltask import App, Context

__all__ = ["Address", "Card", "Item", "Order", "Receipt", "Shipping", "register"]


class Shipping(enum.Enum):
    STANDARD = "standard"
    EXPRESS = "express"


@dataclass
class Item:
    sku: str
    price: Decimal
    count: int = 1


@dataclass
class Order:
    id: UUID
    placed: datetime
    items: list[Item]
    shipping: Shipping = Shipping.STANDARD
    tags: set[str] = field(default_factory=set)


@dataclass
class Receipt:
    order: UUID
    total: Decimal
    due: date
    lines: tuple[str, ...]


class Address(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    street: str
    post_code: str = Field(alias="postCode", pattern="^[0-9]{5}$")
    since: date | None = None


class Card(BaseModel):
    number: str
    holder: Address


def register(app: App) -> None:
    """Register the functions of this module as tasks of ``app``."""
    for function in (checkout, move, now, wrong, loose, due, latest):
        app.task(name=f"shop.{function.__name__}")(function)
    app.task(name="shop.strict", typed=True)(loose)
    app.task(bind=True, name="shop.postpone")(postpone)


def checkout(order: Order, discount: Decimal = Decimal(0), *, terms: timedelta = timedelta(days=14)) -> Receipt:
    total = sum((item.price * item.count for item in order.items), Decimal(0)) - discount
    lines = tuple(f"{item.count} {item.sku}" for item in order.items)
    return Receipt(order.id, total, (order.placed + terms).date(), lines)


def move(cards: list[Card], limit: Annotated[int, Field(gt=0)] = 5) -> dict[UUID, Address]:
    return {UUID(int=index): card.holder for index, card in enumerate(cards[:limit])}


def postpone(self: Context, due: datetime, data: bytes = b"") -> bytes:
    if not data:
        self.update_data({"due": due + timedelta(days=1), "data": b"\xff"})
        self.move_to_delayed(0)
    return data + due.isoformat().encode()


async def now(zone: str = "UTC") -> datetime:
    return datetime(2026, 11, 23, 10, tzinfo=UTC)


def due(placed: datetime, terms: timedelta = timedelta(days=1)) -> date:
    return (placed + terms).date()


def latest(days: tuple[date, ...], than: date = date.min) -> date:
    return max(*days, than)


def wrong() -> list[Item]:
    return [Item("a", Decimal(1)), None]  # type: ignore[list-item]


def loose(count: int, tags: list[str] | None = None) -> str:
    return f"{count!r} {tags!r}"
