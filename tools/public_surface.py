"""Print what users see of a checkout, one fact per line, so that two checkouts can be compared with ``diff``.

``python -m tools public-surface [CHECKOUT]`` prints the signatures of all public names, the texts of errors and
warnings, the help of every command, the fields of events, and the names of metrics and log lines. The texts are read
from the source, so that an error which no test raises is compared, too.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PUBLIC = (
    "bulltask",
    "bulltask.contrib.django",
    "bulltask.contrib.opentelemetry",
    "bulltask.dashboard",
    "bulltask.errors",
    "bulltask.events",
    "bulltask.exceptions",
    "bulltask.hooks",
    "bulltask.lake",
    "bulltask.migrate",
    "bulltask.outbox.sqlalchemy",
    "bulltask.queue",
    "bulltask.schedules",
    "bulltask.signals",
    "bulltask.spark",
    "bulltask.states",
    "bulltask.testing",
)
"""Modules whose names are public."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_OWN_MODULES = re.compile(r"\bbulltask(\.\w+)+\.(?=\w)")


def signatures() -> Iterator[str]:
    """Yield the signature of each public function, and of each public method of a public class."""
    for name in PUBLIC:
        module = importlib.import_module(name)
        for public in sorted(getattr(module, "__all__", ())):
            yield from _signatures(f"{name}.{public}", getattr(module, public))


def _signatures(path: str, value: Any) -> Iterator[str]:
    yield f"name {path}{_signature(value)}"
    if inspect.isclass(value):
        for name in sorted(dir(value)):
            if not name.startswith("_"):
                yield f"name {path}.{name}{_signature(inspect.getattr_static(value, name))}"


def _signature(value: Any) -> str:
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    try:
        text = (
            str(inspect.signature(value))
            if callable(value) and not hasattr(type(value), "__getattr__")
            else f" {type(value).__name__}"
        )
    except (TypeError, ValueError):
        text = ""
    return _OWN_MODULES.sub("", _ADDRESS.sub("", text))


def texts(package: Path) -> Iterator[str]:
    """Yield the texts of errors, warnings, log lines and help in the source."""
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                yield from (f"text {ast.unparse(text)}" for text in _sentences(node))


def _sentences(call: ast.Call) -> Iterator[ast.expr]:
    for value in [*call.args, *(keyword.value for keyword in call.keywords)]:
        is_text = isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))
        if is_text and " " in ast.unparse(value):
            yield value


def commands() -> Iterator[str]:
    """Yield the lines of each command's help."""
    import click  # noqa: PLC0415 - only for this part

    from bulltask.cli.main import main  # noqa: PLC0415

    pending: list[tuple[str, click.Command]] = [("bulltask", main)]
    for name, command in pending:
        context = click.Context(command, info_name=name, max_content_width=110, terminal_width=110)
        yield from (f"help {name}: {line}" for line in command.get_help(context).splitlines())
        if isinstance(command, click.Group):
            for child in command.list_commands(context):
                found = command.get_command(context, child)
                assert found is not None
                pending.append((f"{name} {child}", found))


def main() -> None:
    """Print the facts, sorted."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    sys.path.insert(0, str(root))
    sys.stdout.writelines(f"{fact}\n" for fact in sorted({*signatures(), *texts(root / "bulltask"), *commands()}))


if __name__ == "__main__":
    main()
