"""``bulltask acl``: print the permissions that a Redis user needs."""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import click

from bulltask.cli.app_loader import load_app_or_broker
from bulltask.cli.options import redis_options
from bulltask.config.config import Config
from bulltask.config.urls import SecretUrl
from bulltask.jobs.names import bullmq_name, check_queue_name
from bulltask.transport.call import QueueKeys
from bulltask.transport.permissions import ROLES, role_grants

__all__ = ["acl"]

_FORMS: Final = {
    "setuser": "ACL SETUSER {user} on >PASSWORD {rules}",
    "file": "user {user} on >PASSWORD {rules}",
    "rules": "on {rules}",
}
_USER: Final = re.compile(r"[^\s\x00-\x1f\x7f]+")
_EPILOG: Final = "\b\nRoles:\n" + "\n".join(f"  {role:9}{text}" for role, text in ROLES.items())


@click.command("acl", short_help="Print the permissions that a Redis user needs.", epilog=_EPILOG)
@click.argument("roles", metavar="ROLE...", nargs=-1, required=True, type=click.Choice(list(ROLES)))
@redis_options
@click.option(
    "-Q",
    "--queue",
    "queues",
    multiple=True,
    help="Restrict the user to this queue; may be repeated.  [default: all queues]",
)
@click.option("--user", help="The user's name.  [default: the first role]")
@click.option(
    "--format",
    "form",
    type=click.Choice(list(_FORMS)),
    default="setuser",
    show_default=True,
    help="setuser: a command for redis-cli; file: a line of users.acl; rules: without user and password, such as "
    "the access string of ElastiCache.",
)
@click.pass_context
def acl(
    ctx: click.Context,
    /,
    *,
    roles: tuple[str, ...],
    queues: tuple[str, ...],
    user: str | None,
    form: str,
    **options: Any,
) -> None:
    """Print the minimum permissions (ACL) that a Redis user with these ROLEs needs.

    The prefix, and whether the servers are a cluster, come from the app (-A) or the options. The command does not
    connect to Redis. Replace PASSWORD before you use the line.
    """
    app = load_app_or_broker(ctx, options)
    config = app.conf.freeze()
    if user is not None and not _USER.fullmatch(user):
        raise click.BadParameter(
            "Redis allows no spaces in a user's name, and no control characters", param_hint="--user"
        )
    rules = role_grants(roles).rules(
        config.prefix, cluster=config.broker_url.scheme.endswith("+cluster"), queues=_keys(queues, config)
    )
    if _database(config.broker_url):
        rules.append("+select")
    quote = _quoted if form == "setuser" else str  # a line of users.acl is split at spaces
    click.echo(_FORMS[form].format(user=quote(user or roles[0]), rules=" ".join(map(quote, rules))))
    if not queues and config.prefix != "bull":
        click.echo(
            f"note: these permissions include the keys of every prefix that begins with {config.prefix}: (such as "
            f"{config.prefix}:eu); restrict the user with --queue if there is one",
            err=True,
        )


def _quoted(word: str) -> str:
    """Return a word as redis-cli reads it."""
    if not set(word) & set("\"'\\"):
        return word
    return '"{}"'.format(word.replace("\\", "\\\\").replace('"', '\\"'))


def _keys(queues: tuple[str, ...], config: Config) -> list[QueueKeys]:
    names = [bullmq_name(check_queue_name(queue), hash_tag=config.queue_hash_tag) for queue in queues]
    return [QueueKeys(config.prefix, name) for name in names]


def _database(url: SecretUrl) -> bool:
    """Whether connections use a database other than 0, so that they need ``SELECT``."""
    parts = urlsplit(str(url))
    in_path = parts.path.strip("/") if url.scheme in {"redis", "rediss"} else ""
    return (dict(parse_qsl(parts.query)).get("db") or in_path or "0") != "0"
