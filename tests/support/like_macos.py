"""The beginning of an app that runs as on macOS: without signals at a parent's death, and without memfd."""

from __future__ import annotations

from typing import Final

__all__ = ["LIKE_MACOS"]

LIKE_MACOS: Final = """
import os
import sys
import urllib.request  # imports a module of macOS otherwise

sys.platform = "darwin"
del os.memfd_create
"""
