"""``python -m bulltask``."""

from __future__ import annotations

from bulltask.cli.main import main

main(prog_name="bulltask")
