"""A model of the project that the guide's examples belong to."""

from __future__ import annotations


class User:
    """A user."""
