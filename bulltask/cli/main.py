"""``bulltask``: the commands, each loaded when it is asked for."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Final

import click

from bulltask.errors import BulltaskError

__all__ = ["main"]

COMMANDS: Final = {
    "migrate-bull": "bulltask.cli.migrate_bull",
    "server": "bulltask.cli.server",
    "worker": "bulltask.cli.worker",
}


class LazyGroup(click.Group):
    """A group that imports a command's module only when the command is used, so that ``--help`` stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """The names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's
        """Load one command."""
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = importlib.import_module(module).command
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run; an error of bulltask's own is one line for the user, not a traceback."""
        try:
            return super().invoke(ctx)
        except BulltaskError as exc:
            raise click.ClickException(str(exc)) from exc


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("bulltask"), prog_name="bulltask")
@click.option("-A", "--app", envvar="BULLTASK_APP", help="The app: pkg.mod:name, pkg.mod or pkg.")
@click.option("-b", "--broker", help="Redis URL; wins over the app's own.")
@click.option("--workdir", type=click.Path(exists=True, file_okay=False), help="Change to this directory first.")
@click.pass_context
def main(ctx: click.Context, app: str | None, broker: str | None, workdir: str | None) -> None:
    """Celery-style tasks over BullMQ's protocol. -A and -b may stand before or after the command."""
    ctx.obj = {"app": app, "broker": broker, "workdir": workdir}
