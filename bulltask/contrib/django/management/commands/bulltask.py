"""``manage.py bulltask …``: every command of ``bulltask``, with the project's app."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import BaseCommand

from bulltask.cli.main import main

__all__ = ["Command"]


class Command(BaseCommand):  # type: ignore[misc]
    """The command. ``-A`` is needed only for an app other than the project's."""

    help = "Run a bulltask command with this project's app, such as 'bulltask worker -c 4'."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Accept the arguments of ``bulltask``, which come after Django's own."""
        parser.add_argument(
            "arguments",
            nargs=argparse.REMAINDER,
            help="the command and its options; 'bulltask worker --help' explains those of the worker",
        )

    def handle(self, *_: object, arguments: list[str], **_options: Any) -> None:
        """Run the command, and exit with its exit code unless that is 0."""
        try:
            main(
                arguments or ["--help"], prog_name="manage.py bulltask", default_map={"app": "bulltask.contrib.django"}
            )
        except SystemExit as exc:
            if exc.code:
                raise
