"""The app for ``bulltask worker -A worker``."""

from __future__ import annotations

from shop import create_app

app = create_app().extensions["bulltask"]
