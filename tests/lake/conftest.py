"""Fixtures for the lake's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lake import LakeBuilder


@pytest.fixture
def lake(tmp_path: Path) -> LakeBuilder:
    """Return a builder for an empty lake."""
    return LakeBuilder(tmp_path)
