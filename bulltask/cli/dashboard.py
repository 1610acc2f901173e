"""``bulltask dashboard``, which serves :class:`bulltask.dashboard.Dashboard`, and ``bulltask top``, in a terminal."""

from __future__ import annotations

import ipaddress
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import click

from bulltask.cli.app_loader import import_tasks, load_app_or_broker
from bulltask.cli.options import lake_option, redis_options
from bulltask.cli.terminal import echo
from bulltask.config.settings import ENV_PREFIX, read_secret_file
from bulltask.observe.http_requests import LOCAL_HOSTS

if TYPE_CHECKING:  # needs the extra
    from bulltask.dashboard import Access, Dashboard, Role

__all__ = ["dashboard", "top"]

_ROLES: Final = ("viewer", "operator", "admin")
_MIN_TOKEN: Final = 16
_STOP_S: Final = 3
"""How long requests may still take when the dashboard is stopped."""


@click.command("dashboard", short_help="Show queues, jobs and workers in a browser.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind the port to.")
@click.option("--port", type=click.IntRange(0, 65_535), default=8_787, show_default=True, help="0: any free port.")
@click.option("--read-only", is_flag=True, help="Reject all changes.")
@click.option(
    "--user-header", metavar="NAME", help="A header with the user's name, which a proxy sets: X-Forwarded-User."
)
@click.option(
    "--proxy", "proxies", multiple=True, metavar="ADDRESS", help="Address or network of the proxy (repeatable)."
)
@click.option(
    "--role",
    "roles",
    multiple=True,
    metavar="NAME=ROLE",
    help="A user's role: viewer, operator or admin (repeatable). '*' means all other users of the proxy, which are "
    "viewers by default.",
)
@click.option(
    "--anonymous", type=click.Choice(_ROLES), help="The role of users without a login. Only on a loopback address."
)
@click.option("--path", default="", metavar="PATH", help="The dashboard's path at the proxy: /tasks.")
@lake_option(required=False, of_one=True)
@redis_options
@click.pass_context
def dashboard(ctx: click.Context, /, *, host: str, port: int, **options: Any) -> None:
    """Show the queues, jobs, workers and failures of a server, and change them, until it is stopped.

    It prints an address with a token, which logs in as admin; a token of your own can be set with
    BULLTASK_DASHBOARD_TOKEN, and a password with BULLTASK_DASHBOARD_PASSWORD. With the suffix _FILE, both name a file.
    Without -A, it knows no tasks to run. With --lake, jobs that Redis no longer has can be searched.
    """
    import uvicorn  # noqa: PLC0415 - slow, and needs the extra

    from bulltask.dashboard import Dashboard  # noqa: PLC0415 - see above
    from bulltask.observe.log import configure  # noqa: PLC0415 - not needed for --help

    app = load_app_or_broker(ctx, options)
    if spec := options["app"] or (ctx.obj or {}).get("app"):
        import_tasks(app, spec)
    access = _access(host, options)
    site = Dashboard(app, access, path=options["path"], lake=options["lake"])
    listener = _bind(host, port)
    configure(level="info", worker_id=None)
    _print_address(listener, access, options["path"])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # process 1 of a container would ignore it
    config = uvicorn.Config(
        site,
        log_config=None,
        log_level="warning",
        access_log=False,  # addresses may contain the token
        proxy_headers=False,  # the dashboard trusts only those of --proxy
        server_header=False,
        timeout_graceful_shutdown=_STOP_S,
        ws="none",
    )
    try:
        _server(config, site).run(sockets=[listener])
    except KeyboardInterrupt:
        ctx.exit(0)


@click.command("top", short_help="Show queues, jobs and workers in a terminal.")
@click.option("--read-only", is_flag=True, help="Reject all changes.")
@redis_options
@click.pass_context
def top(ctx: click.Context, /, *, read_only: bool, **options: Any) -> None:
    """Show the queues, jobs and workers of a server, say why jobs do not run, and change them, until you press q.

    Press ? for its keys. Before anything is changed, you are asked.
    """
    from bulltask.cli.top import Top  # noqa: PLC0415 - slow, and needs an extra

    if not (sys.stdin.isatty() and sys.stderr.isatty()):  # textual writes to stderr
        raise click.ClickException("top needs a terminal: in a script, use 'bulltask queues --json'")
    with closing(load_app_or_broker(ctx, options)) as app:
        screen = Top(app, ctx, options, read_only=read_only)
        screen.pages.overview()  # or an error
        signal.signal(signal.SIGTERM, lambda *_: screen.call_next(screen.exit))  # the terminal must be restored
        screen.run(mouse=False)
    ctx.exit(screen.return_code or 0)


def _server(config: Any, site: Dashboard) -> Any:
    import uvicorn  # noqa: PLC0415 - see above

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            site.close_streams()
            await super().shutdown(sockets)

    return Server(config)


def _access(host: str, options: Mapping[str, Any]) -> Access:
    from bulltask.dashboard import Access, Role  # noqa: PLC0415 - see above

    is_local = _is_loopback(host)
    anonymous = None if options["anonymous"] is None else Role[options["anonymous"].upper()]
    if anonymous is not None and not is_local:
        raise click.UsageError(
            f"--anonymous with --host {host} would let everybody in who can reach this machine: remove it, or bind to "
            "127.0.0.1 and let a proxy decide"
        )
    token, password = _secret("TOKEN"), _secret("PASSWORD")
    if token is not None and len(token) < _MIN_TOKEN:
        raise click.UsageError(f"{ENV_PREFIX}DASHBOARD_TOKEN needs at least {_MIN_TOKEN} characters")
    if not (token or password or options["user_header"] or anonymous):
        token = secrets.token_urlsafe(24)
    return Access(
        token=token,
        password=password,
        user_header=options["user_header"],
        proxies=options["proxies"],
        roles=_roles(options["roles"]),
        anonymous=anonymous,
        read_only=options["read_only"],
        hosts=sorted({*LOCAL_HOSTS, host}) if is_local and not options["proxies"] else None,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _roles(given: Iterable[str]) -> dict[str, Role]:
    from bulltask.dashboard import Role  # noqa: PLC0415 - see above

    roles = {}
    for text in given:
        name, _, role = text.rpartition("=")
        if not name or role not in _ROLES:
            raise click.UsageError(f"--role {text!r}: write it like ann=operator; roles are {', '.join(_ROLES)}")
        roles[name] = Role[role.upper()]
    return roles


def _secret(name: str) -> str | None:
    """Return a secret from the environment, or from the file that the environment names."""
    variable = f"{ENV_PREFIX}DASHBOARD_{name}"
    if found := os.environ.get(variable):
        return found
    if not (path := os.environ.get(f"{variable}_FILE")):
        return None
    if not (found := read_secret_file(f"{variable}_FILE", path)):
        raise click.ClickException(f"the file in {variable}_FILE, {path}, is empty")
    return found


def _bind(host: str, port: int) -> socket.socket:
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as exc:
        reason = os.strerror(exc.errno) if isinstance(exc, OSError) and exc.errno else str(exc)
        raise click.ClickException(
            f"the dashboard cannot be served on {host}, port {port}: {reason}. Choose another --port (0: any free "
            "port) or --host"
        ) from exc
    # Connections inherit it. Without it, a page waits 40 ms: its last packet, for the receipt of the one before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _print_address(listener: socket.socket, access: Access, path: str) -> None:
    host, port = listener.getsockname()[:2]
    shown = socket.gethostname() if ipaddress.ip_address(host).is_unspecified else f"[{host}]" if ":" in host else host
    is_generated = access.token is not None and _secret("TOKEN") is None
    login = f"/login?token={access.token}" if is_generated else "/"
    echo(f"Dashboard: http://{shown}:{port}{path.rstrip('/')}{login}")
