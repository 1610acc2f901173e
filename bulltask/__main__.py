"""The ``bulltask`` command, also as ``python -m bulltask``."""

from __future__ import annotations

import gc

__all__ = ["run"]


def run() -> None:
    """Run the command."""
    gc.disable()  # a collection while modules are imported would free nothing
    from bulltask.cli.main import main  # noqa: PLC0415

    gc.enable()
    main(prog_name="bulltask")


if __name__ == "__main__":
    run()
