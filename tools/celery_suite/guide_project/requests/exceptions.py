"""The exception of a library that the guide's examples use."""

from __future__ import annotations


class RequestException(Exception):
    """A request failed."""
