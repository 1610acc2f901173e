"""Marks for tests of the official Python client 2.16.2 that state the outcome with 3.4.4 (official-python.md)."""

from __future__ import annotations

import pytest

from tests.interop.node_bridge import NodeError

__all__ = ["FIXED_IN_3", "SAME_IN_3"]

_FAILS = pytest.mark.xfail(
    raises=(AssertionError, NodeError, TimeoutError, pytest.fail.Exception), strict=True, reason="3.4.4 has fixed it"
)

SAME_IN_3 = pytest.mark.parametrize("mail", ["2", "3"], indirect=True)
"""The test passes with 3.4.4 too."""

FIXED_IN_3 = pytest.mark.parametrize("mail", ["2", pytest.param("3", marks=_FAILS)], indirect=True)
"""The test fails with 3.4.4, which has fixed the difference from Node and bulltask."""
