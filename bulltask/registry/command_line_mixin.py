"""``CommandLineMixin``: the command line of an app, run from its own code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final, cast

__all__ = ["CommandLineMixin"]

_CLI: Final = "bulltask.cli.main"  # imported by name, because it is in a layer above


class CommandLineMixin:
    """Runs bulltask's commands for this app in this process: a base class of ``App``."""

    def start(self, argv: Sequence[str] | None = None) -> int:
        """Run a command of ``bulltask`` for this app, without ``-A``: ``app.start(["worker", "-c", "4"])``.

        Args:
            argv: The command and its arguments; default: those of this program.

        Returns:
            The exit code, when the command has ended.

        Raises:
            SystemExit: The arguments are invalid, or the command has failed; the error was printed.
        """
        return cast(int, import_module(_CLI).run_for(self, list(sys.argv[1:] if argv is None else argv)))

    def worker_main(self, argv: Sequence[str] | None = None) -> int:
        """Run a worker in this process: ``app.worker_main(["worker", "--loglevel=info"])``; see :meth:`start`.

        Children are forked from this process, because it may not be possible to import the app (``__main__``).

        Raises:
            ValueError: ``argv`` does not contain ``worker``.
            SystemExit: As for :meth:`start`.
        """
        if "worker" not in (sys.argv if argv is None else argv):
            raise ValueError(
                "argv must contain the command worker: app.worker_main(['worker', …]); app.start() runs other commands"
            )
        return self.start(argv)
