"""How the tests of the official Python client 2.16.2 end with 3.4.4: a column of docs/reference/official-python.md."""

from __future__ import annotations

import pytest

from tests.interop.node_bridge import NodeError

__all__ = ["FIXED", "THE_SAME"]

_OTHERWISE = pytest.mark.xfail(
    raises=(AssertionError, NodeError, TimeoutError, pytest.fail.Exception), strict=True, reason="3.4.4 has fixed it"
)

THE_SAME = pytest.mark.parametrize("mail", ["2", "3"], indirect=True)
"""It holds for 3.4.4 too."""

FIXED = pytest.mark.parametrize("mail", ["2", pytest.param("3", marks=_OTHERWISE)], indirect=True)
"""With 3.4.4 the test fails: the difference to Node and bulltask is gone."""
