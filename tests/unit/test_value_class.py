"""Value classes behave like frozen dataclasses, but do not prevent assignments at run time."""

from __future__ import annotations

import copy
import gc
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace

import pytest

from bulltask.jobs.clock import value_class


@value_class
class Point:
    x: int
    y: int = 0


@value_class(kw_only=True)
class Labels:
    texts: list[str] = field(default_factory=list)


class Root:
    __slots__ = ()


@value_class(frozen=True)
class Fixed:
    x: int


@dataclass(frozen=True, slots=True)
class Frozen:
    x: int


def test_values_are_equal_and_hashed_by_their_fields() -> None:
    assert Point(1, 2) == Point(1, 2) != Point(2, 1)
    assert len({Point(1, 2), Point(1, 2), Point(2, 1)}) == 2


def test_a_value_has_the_fields_of_a_dataclass_and_no_other_attributes() -> None:
    assert [item.name for item in fields(Point)] == ["x", "y"]
    assert repr(replace(Point(1), y=3)) == "Point(x=1, y=3)"
    with pytest.raises(AttributeError):
        Point(1).z = 5  # type: ignore[attr-defined]


def test_values_can_be_copied() -> None:
    assert copy.deepcopy(Point(1, 2)) == copy.copy(Point(1, 2)) == Point(1, 2)


def test_a_value_class_supports_default_factories_and_keyword_only_fields() -> None:
    assert Labels().texts is not Labels().texts
    with pytest.raises(TypeError):
        Labels(["a"])  # type: ignore[call-arg]


def test_a_value_class_does_not_enforce_immutability_at_run_time() -> None:
    point = Point(1)
    point.x = 2  # type: ignore[misc]
    assert point.x == 2
    with pytest.raises(FrozenInstanceError):
        Frozen(1).x = 2  # type: ignore[misc]


def test_a_frozen_value_class_refuses_changes_and_leaves_no_copy_without_slots_in_memory() -> None:
    before = len(Root.__subclasses__())

    @value_class(frozen=True)
    class Shown(Root):
        x: int = 1

    gc.collect()
    assert Root.__subclasses__()[before:] == [Shown]
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'x'"):
        Shown().x = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'x'"):
        del Shown().x
    assert copy.deepcopy(Fixed(2)) == Fixed(2) == copy.copy(Fixed(2))
