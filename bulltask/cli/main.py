"""The ``bulltask`` command: a group whose commands are imported on first use, so that ``--help`` stays quick.

Each command or group of commands is a function in a module of this package; ``COMMANDS`` names them. Options that
several commands have are in :mod:`bulltask.cli.options`; the app that ``-A`` names is loaded by
:mod:`bulltask.cli.app_loader`; what an unknown command or option is answered with is in :mod:`bulltask.cli.groups`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from bulltask.cli.groups import CELERY_COMMANDS, LazyGroup
from bulltask.cli.options import broker_option, config_option
from bulltask.config.process import open_standard_streams
from bulltask.config.urls import SecretUrl

if TYPE_CHECKING:  # imported late, so that --help is fast
    from bulltask.app import App

__all__ = ["COMMANDS", "main", "run_for"]

COMMANDS: Final = {
    "acl": "bulltask.cli.acl:acl",
    "call": "bulltask.cli.call:call",
    "control": "bulltask.cli.control:control",
    "dashboard": "bulltask.cli.dashboard:dashboard",
    "doctor": "bulltask.cli.doctor:doctor",
    "events": "bulltask.cli.events:events",
    "exporter": "bulltask.cli.exporter:exporter",
    "failures": "bulltask.cli.jobs:failures",
    "gen-ts": "bulltask.cli.tasks:gen_ts",
    "health": "bulltask.cli.health:health",
    "history": "bulltask.cli.history:history",
    "inspect": "bulltask.cli.control:inspect",
    "job": "bulltask.cli.job:job",
    "jobs": "bulltask.cli.jobs:jobs",
    "migrate-bull": "bulltask.cli.migrate_bull:migrate_bull",
    "outbox": "bulltask.cli.outbox:outbox",
    "pipeline": "bulltask.cli.pipeline:pipeline",
    "queue": "bulltask.cli.queues:queue",
    "queues": "bulltask.cli.queues:queues",
    "report": "bulltask.cli.report:report",
    "result": "bulltask.cli.call:result",
    "revoke": "bulltask.cli.job:revoke",
    "schedule": "bulltask.cli.schedule:schedule",
    "server": "bulltask.cli.server:server",
    "shell": "bulltask.cli.call:shell",
    "tasks": "bulltask.cli.tasks:tasks",
    "top": "bulltask.cli.dashboard:top",
    "why": "bulltask.cli.why:why",
    "worker": "bulltask.cli.worker:worker",
    "workers": "bulltask.cli.workers:workers",
}


@click.group(
    cls=LazyGroup,
    places=COMMANDS,
    hints=CELERY_COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="bulltask", prog_name="bulltask")
@click.option("-A", "--app", envvar="BULLTASK_APP", help="The app: pkg.mod:name, pkg.mod or pkg (or set BULLTASK_APP).")
@broker_option
@config_option
@click.option("--workdir", type=click.Path(exists=True, file_okay=False), help="Change to this directory first.")
@click.pass_context
def main(ctx: click.Context, app: str | None, broker: SecretUrl | None, workdir: str | None) -> None:
    """Run and manage Celery-style tasks on BullMQ queues in Redis.

    -A, -b and --config may be given before or after the command.
    """
    open_standard_streams()
    ctx.obj = {"app": app, "broker": broker, "workdir": workdir, **(ctx.obj or {})}


def run_for(app: App, argv: list[str]) -> int:
    """Run a command for an app that is already loaded; the body of :meth:`bulltask.App.start`."""
    try:
        code = main.main(argv, prog_name="bulltask", standalone_mode=False, obj={"app": app})
    except click.ClickException as exc:
        exc.show()
        raise SystemExit(exc.exit_code) from exc
    return code if isinstance(code, int) else 0
