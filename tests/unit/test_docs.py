"""The documentation matches the code: snippets run, tables are up to date, links work."""

from __future__ import annotations

import builtins
import dis
import importlib
import json
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import flask  # noqa: F401 - a snippet cannot be the first to import it, because it runs with a copy of sys.modules
import jsonschema
import pytest

from bulltask import App, Context
from bulltask.cli import migrate_bull
from bulltask.cli import worker as worker_command
from bulltask.cli.groups import CELERY_COMMANDS, CELERY_OPTIONS
from bulltask.cli.main import COMMANDS, main
from bulltask.cli.options import ExitCode as CommandExitCode
from bulltask.contrib.opentelemetry import BulltaskInstrumentor
from bulltask.events import Bus
from bulltask.registry import tasks as shared
from bulltask.registry.options import CallOptions, TaskOptions
from bulltask.testing.worker import wait_until
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.locks import Heartbeat
from bulltask.worker.slots import ExitCode
from bulltask.worker.supervisor import SIGNAL_METHODS
from tests.interop.conftest import HERE as NODE_FOLDER
from tests.interop.conftest import node_client  # noqa: F401 - a fixture
from tests.support.command_output import SCHEMAS
from tests.support.worker import Worker

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
TUTORIAL = ROOT / "docs/tutorial/first-steps.md"
SIGNALS = ROOT / "docs/reference/signals.md"
CONFIGURATION = ROOT / "docs/reference/configuration.md"
PAGES = sorted(
    [
        *(page for folder in (".", "tools", "examples") for page in (ROOT / folder).glob("*.md")),
        *(ROOT / "docs").rglob("*.md"),
    ],
    key=lambda path: path.as_posix(),
)
DOCS = ("start", "tutorial", "how-to", "reference", "explanation")
"""Directories of all pages but the index and the ADRs."""
NODE_URL = "redis://localhost:6379"

METHODS = {
    "warm_shutdown": "warm shutdown",
    "cold_shutdown": "cold shutdown",
    "restart": "restart",
    "pause": "pauses",
    "resume": "resumes",
    "grow": "adds a child",
    "shrink": "removes a child",
    "dump_stacks": "logs the stacks",
    "ignore": "ignores it",
    "child_changed": "wakes up",
}
"""The beginning of each supervisor method's description in the table of signals."""


def relative_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def file_block(page: Path, language: str, name: str) -> str:
    """Return the block that begins with ``# name``."""
    return next(block for block in blocks(page, language) if block.startswith(f"# {name}\n"))


def rows(page: Path, section: str) -> list[list[str]]:
    """Return the cells of all tables in a section, without the header rows."""
    text = re.split(r"^#+ ", page.read_text().partition(f"# {section}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    tables = re.findall(r"^\|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split(" |")] for table in tables for line in table.splitlines()]


def prose(page: Path) -> str:
    """Return the text of a page without code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def inline_code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


# ---- Python snippets -------------------------------------------------------------------------------------------------


class FakeLibrary(types.ModuleType):
    """A fake library for snippets. Each attribute is another fake or an empty exception class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return FakeLibrary(name) if name.islower() else type(name, (Exception,), {})

    def __call__(self, *_: object, **__: object) -> Any:
        return FakeLibrary("result")


SNIPPET_NAMES: Mapping[str, Mapping[str, Any]] = {
    "README.md": {},
    "docs/index.md": {},
    "docs/tutorial/first-steps.md": {},
    "docs/how-to/async-tasks.md": {},
    "docs/how-to/batches.md": {},
    "docs/how-to/sentinel.md": {},
    "docs/how-to/cluster.md": {},
    "docs/how-to/canvas.md": {},
    "docs/how-to/checkpoints.md": {
        name: FakeLibrary(name)
        for name in (
            *("products_after", "index", "crm", "save", "send_reminder"),
            *("close_orders", "compute_totals", "send_reports"),
        )
    },
    "docs/how-to/coming-from-celery.md": {},
    "docs/how-to/coming-from-huey-django-q.md": {},
    "docs/reference/configuration.md": {},
    "docs/how-to/dashboard.md": {"django_app": FakeLibrary("django_app")},
    "docs/how-to/django.md": {},
    "docs/how-to/embedded-server.md": {"App": App},
    "docs/how-to/my-job-does-not-run.md": {},
    "docs/how-to/fastapi.md": {},
    "docs/how-to/flask.md": {},
    "docs/how-to/errors-and-retries.md": {
        name: FakeLibrary(name) for name in ("httpx", "URL", "BANK", "balance", "botocore", "order_id", "download")
    }
    | {name: type(name, (Exception,), {}) for name in ("InsufficientFunds", "Throttled", "Overloaded")},
    "docs/how-to/flows.md": {"parts_of": FakeLibrary("parts_of")},
    "docs/explanation/scaling.md": {},
    "docs/explanation/guarantees.md": {
        **{name: FakeLibrary(name) for name in ("bank", "connect", "process")},
        "unsent": [],
    },
    "docs/how-to/interop-node.md": {},
    "docs/how-to/managed-redis.md": {},
    "docs/how-to/migrating-from-bull.md": {},
    "docs/reference/mixed-versions.md": {},
    "docs/reference/official-python.md": {},
    "docs/reference/queue-events.md": {"pager": FakeLibrary("pager")},
    "docs/reference/queues.md": {},
    "docs/how-to/rate-limits.md": {"call_service": FakeLibrary("call_service")},
    "docs/how-to/revoking.md": {},
    "docs/how-to/rolling-deploys.md": {},
    "docs/how-to/schedules.md": {},
    "docs/how-to/serializers.md": {},
    "docs/how-to/typed-arguments.md": {},
    "docs/how-to/testing.md": {"bank": FakeLibrary("bank"), "refuse": FakeLibrary("refuse")},
    "docs/how-to/time-limits.md": {
        name: FakeLibrary(name) for name in ("draw", "remove_temporary_files", "walk", "save_partial_result")
    },
    "docs/reference/workers.md": {},
    "docs/how-to/hooks.md": {name: FakeLibrary(name) for name in ("database", "tracer", "current_request_id")},
    "docs/how-to/outbox.md": {},
    "docs/how-to/sentry-opentelemetry.md": {},
    "docs/how-to/task-classes.md": {name: FakeLibrary(name) for name in ("connect", "web_app", "import_file")},
    "docs/how-to/observability.md": {"pager": FakeLibrary("pager")},
}
"""Names that the snippets of a page may use without a definition."""


FAKE_MODULES = ("asyncpg", "azure", "azure.identity", "developer_toolkit_elasticache")
"""Packages that snippets import, but that are not installed."""


PROGRAMS = {"README.md", "docs/tutorial/first-steps.md"}
"""Pages whose snippets are programs that run with a worker."""


def unknown_names(code: types.CodeType, defined: Collection[str]) -> Iterator[str]:
    # A name that is deleted later counts too: ``except … as error`` deletes its name.
    known = {*defined, *(str(step.argval) for step in dis.get_instructions(code) if step.opname == "STORE_NAME")}
    for instruction in dis.get_instructions(code):
        name = str(instruction.argval)
        if instruction.opname in {"LOAD_GLOBAL", "LOAD_NAME"} and name not in known and not hasattr(builtins, name):
            yield name
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from unknown_names(constant, known)


def run_snippets(page: Path) -> None:
    """Run a page's snippets in order. ``app`` is a new app for each snippet."""
    names: dict[str, Any] = {**SNIPPET_NAMES[relative_name(page)], "__name__": page.stem.replace("-", "_")}
    for block in blocks(page, "python"):
        names["app"] = App("documented")
        code = compile(block, relative_name(page), "exec", dont_inherit=True)
        exec(code, names)
        assert list(unknown_names(code, names)) == [], block
        if title := re.match(r"# (\w+)\.py\n", block):
            module = types.ModuleType(title[1])
            vars(module).update(names)
            sys.modules[title[1]] = module


@pytest.mark.redis
@pytest.mark.parametrize("name", sorted(SNIPPET_NAMES.keys() - PROGRAMS))
def test_every_python_snippet_runs_and_uses_no_undefined_name(
    name: str, broker_url: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(BulltaskInstrumentor().uninstrument)
    monkeypatch.setenv("BULLTASK_BROKER_URL", broker_url)
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "")  # a snippet may set it, which would apply to later tests
    monkeypatch.setattr(shared.SHARED, "_tasks", dict(shared.SHARED))
    code = "".join(blocks(ROOT / name, "python"))
    for module in re.findall(r"^from ((?:sqlalchemy|django)\S*) import", code, re.MULTILINE):
        importlib.import_module(module)  # its circular imports fail if `sys.modules` is replaced
    monkeypatch.setattr(sys, "modules", {**{fake: FakeLibrary(fake) for fake in FAKE_MODULES}, **sys.modules})
    run_snippets(ROOT / name)


def test_python_snippets_of_all_pages_are_run() -> None:
    assert {relative_name(page) for page in PAGES if blocks(page, "python")} == SNIPPET_NAMES.keys()


# ---- the README's example, and the tutorial --------------------------------------------------------------------------


@pytest.fixture
def start_worker(broker_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Return a function that saves a page's programs in ``tmp_path`` and starts a worker with the page's command."""
    monkeypatch.setenv("BULLTASK_BROKER_URL", broker_url)
    with ExitStack() as stack:

        def start(page: Path) -> None:
            for block in blocks(page, "python"):
                if title := re.match(r"# (\w+\.py)\n", block):
                    (tmp_path / title[1]).write_text(block)
                else:
                    exec(compile(block, relative_name(page), "exec", dont_inherit=True), {"__name__": page.stem})
            args = shlex.split(next(block for block in blocks(page, "sh") if block.startswith("bulltask worker")))
            process = subprocess.Popen([sys.executable, "-m", *args], cwd=tmp_path, stderr=subprocess.DEVNULL)
            stack.callback(stop, process)

        yield start


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    assert process.wait(20) == ExitCode.OK


def run_program(args: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(args, cwd=directory, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.process
@pytest.mark.parametrize("page", [README, TUTORIAL], ids=relative_name)
def test_the_programs_of_a_page_print_the_documented_output(
    start_worker: Callable[[Path], None], tmp_path: Path, page: Path
) -> None:
    start_worker(page)
    programs = [path for path in sorted(tmp_path.glob("*.py")) if path.name != "tasks.py"]
    assert programs
    for program in programs:
        run = run_program([sys.executable, program.name], tmp_path)
        comments = re.findall(r"print\(.*\)\s+# (.*)$", program.read_text(), re.MULTILINE)
        assert run.stderr == ""
        assert run.stdout == "".join(f"{line}\n" for comment in comments for line in re.split(r", (?=Hello)", comment))


@pytest.mark.interop
def test_the_readmes_node_program_prints_the_documented_output(
    start_worker: Callable[[Path], None],
    node_client: None,  # noqa: F811
    broker_url: str,
    tmp_path: Path,
) -> None:
    start_worker(README)
    program = blocks(README, "js")[0]
    assert NODE_URL in program
    (tmp_path / "program.mjs").write_text(program.replace(NODE_URL, broker_url.removesuffix("/0")))
    (tmp_path / "node_modules").symlink_to(NODE_FOLDER / "node_modules")
    node = shutil.which("node")
    assert node is not None
    run = run_program([node, "program.mjs"], tmp_path)
    assert run.stdout.split() == re.findall(r"console\.log\(.*// (.*)$", program, re.MULTILINE), run.stderr


def test_the_readmes_programs_are_as_short_as_documented() -> None:
    tasks = [line for line in file_block(README, "python", "tasks.py").splitlines() if line.strip()]
    node = [line for line in blocks(README, "js")[0].splitlines() if line.strip()]
    assert len(tasks) <= 20
    assert len(node) <= 10


def test_the_readme_has_at_most_900_words() -> None:
    assert sum(any(map(str.isalnum, word)) for word in README.read_text().split()) <= 900


def test_pages_that_install_an_extra_say_that_bulltask_is_not_on_pypi_yet() -> None:
    """The first such command of a page fails unless bulltask was installed from a clone."""
    texts = {page.name: page.read_text() for page in PAGES}
    assert [
        name
        for name, text in texts.items()
        if "pip install" in text and "bulltask[" in text and "not on PyPI yet" not in text.replace("\n", " ")
    ] == []


def test_pages_install_the_tested_version_of_bullmq() -> None:
    tested = json.loads((NODE_FOLDER / "package.json").read_text())["dependencies"]["bullmq"]
    texts = {page: page.read_text() for page in PAGES}
    commands = [(page, command) for page, text in texts.items() for command in re.findall(r"npm install[^`]*", text)]
    versions = [(page, version) for page, line in commands for version in re.findall(r"\sbullmq(?:@(\S+))?", line)]
    assert [(page, version) for page, version in versions if version != tested] == []
    imports = [page for page in PAGES if any("from 'bullmq'" in block for block in blocks(page, "js"))]
    assert [page for page in imports if f"npm install bullmq@{tested}" not in texts[page]] == []


# ---- signals, exit codes, commands -----------------------------------------------------------------------------------


def documented_signals() -> dict[signal.Signals, tuple[str, str]]:
    """Return the table of signals: the texts for supervisor and child by signal, without the row "all others"."""
    lines = rows(SIGNALS, "Signals")
    named = [row for row in lines if "all others" not in row[0]]
    assert len(named) == len(lines) - 1
    return {signal.Signals[f"SIG{name}"]: (row[1], row[2]) for row in named for name in inline_code(row[0])}


def handled_signals(pid: int, *masks: str) -> set[signal.Signals]:
    """Return the signals that a process has handlers for, or those in the given signal masks of ``/proc``."""
    status = Path(f"/proc/{pid}/status").read_text()
    values = re.findall(rf"^(?:{'|'.join(masks or ['SigCgt'])}):\s+(\w+)$", status, re.MULTILINE)
    return {number for number in signal.Signals if any(int(mask, 16) >> (number - 1) & 1 for mask in values)}


def test_the_table_of_signals_matches_the_supervisor() -> None:
    table = documented_signals()
    assert table.keys() == SIGNAL_METHODS.keys()
    for number, method in SIGNAL_METHODS.items():
        assert table[number][0].startswith(METHODS[method]), f"{number.name} is {method}"


@pytest.mark.process
def test_worker_and_child_handle_the_documented_signals(broker_url: str, tmp_path: Path) -> None:
    table = documented_signals()
    handles = ("exits", "ignores", "logs", "checks")
    by_child = {number for number, (_, child) in table.items() if child.startswith(handles)}
    others = {number for number, (_, child) in table.items() if child.startswith(("dies", "nothing"))}
    assert by_child | others == table.keys()
    worker = Worker(tmp_path, settings={"broker_url": broker_url, "worker_concurrency": 1})
    try:
        child = worker.wait_for_line("Child started")[0]["pid"]

        def handled() -> set[signal.Signals]:
            return handled_signals(child, "SigCgt", "SigIgn") & table.keys()

        wait_until(lambda: handled() == by_child, what=f"handlers of the child: {handled()}, not {by_child}")
        assert handled_signals(worker.pid) == table.keys()
        assert worker.stop() == ExitCode.OK
    finally:
        worker.close()


def test_documented_exit_codes_match_the_worker() -> None:
    codes = {int(row[0]): inline_code(row[1])[0] for row in rows(SIGNALS, "Exit codes")}
    assert codes == {int(code): code.name for code in ExitCode}


COMMAND_PAGE = ROOT / "docs/reference/commands.md"
SCHEMA_OF_GROUP = {"control", "inspect", "queue"}
"""Groups whose commands have one schema."""
NOT_YET = set[str]()
"""Commands that are mentioned before they exist."""


def test_every_command_is_documented() -> None:
    words = " ".join(row[0] for row in rows(COMMAND_PAGE, "Commands")).replace("`", " ").replace(",", " ").split()
    assert COMMANDS.keys() - set(words) == set(), "docs/reference/commands.md lists the commands"


def test_the_documented_exit_codes_of_commands_match_the_code() -> None:
    assert [int(row[0]) for row in rows(COMMAND_PAGE, "Exit codes")] == [*CommandExitCode]


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Yield all commands that are not groups, with their names: ``job show``."""
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def test_each_json_document_has_a_schema() -> None:
    with_json = {name for name, command in commands(main) if any("--json" in param.opts for param in command.params)}
    of_groups = {name: name.split()[0] for name in with_json if name.split()[0] in SCHEMA_OF_GROUP}
    schemas = {path.stem.replace(".", " ") for path in SCHEMAS.glob("*.json")}
    assert schemas == with_json - of_groups.keys() | set(of_groups.values())
    for path in SCHEMAS.glob("*.json"):
        jsonschema.Draft202012Validator.check_schema(json.loads(path.read_text()))


def test_the_hints_for_celerys_names_mention_only_commands_that_exist() -> None:
    known = {name for name, _ in commands(main)} | set(COMMANDS)
    for hint in [*CELERY_COMMANDS.values(), *CELERY_OPTIONS.values()]:
        for command in re.findall(r"'bulltask ((?:[a-z]+(?:-[a-z]+)* ?)+)", hint):
            assert command.strip() in known | NOT_YET, hint


# ---- settings, flags, options ----------------------------------------------------------------------------------------


def test_the_tables_of_settings_are_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "docs/settings_table.py"))
    for path, table in ((CONFIGURATION, "table"), (script["CELERY_PAGE"], "celery_table")):
        page = path.read_text()
        assert script["replace_table"](page, script[table]()) == page, "run: .venv/bin/python docs/settings_table.py"


def test_the_documented_heartbeat_interval_matches_the_code() -> None:
    app = App("documented")
    backoff = ReconnectBackoff(Bus(), app._config)
    heartbeat = Heartbeat([], list, app._broker.client(), app._config, Bus(), backoff)
    match = re.search(r"a quarter of `lock_duration` \(([\d.]+) s for\s+(\d+) s\)", prose(CONFIGURATION))
    assert match is not None
    assert [float(seconds) * 1000 for seconds in match.groups()] == [heartbeat.interval_ms, app._config.lock_ms]


def test_every_worker_flag_is_documented() -> None:
    documented = set(inline_code(prose(CONFIGURATION)))
    options = [*worker_command.worker.params, *main.params]
    flags = {opt for option in options if isinstance(option, click.Option) for opt in option.opts}
    assert flags - documented - {"--help", "-h", "--version"} == set()


def test_the_documented_flags_of_migrate_bull_match_the_command() -> None:
    page = ROOT / "docs/how-to/migrating-from-bull.md"
    documented = {name for row in rows(page, "Options") for name in inline_code(row[0]) if name.startswith("--")}
    options = [option for option in migrate_bull.migrate_bull.params if isinstance(option, click.Option)]
    assert documented == {opt for option in options for opt in option.opts} - {
        "-A",
        "--app",
        "-b",
        "--broker",
        "--config",
    }
    codes = {int(row[0]) for row in rows(page, "Options") if row[0].isdigit()}
    assert codes == {0, 1, 2, migrate_bull.EXIT_REJECTED, migrate_bull.EXIT_SKIPPED}


def test_every_task_option_is_documented() -> None:
    documented = {name for row in rows(CONFIGURATION, "Task options") for name in inline_code(row[0])}
    assert documented == {field.name for field in fields(TaskOptions)} - {"unlimited_retries"} | {"name", "bind"}


def test_every_call_option_is_documented() -> None:
    documented = {name for row in rows(CONFIGURATION, "Call options") for name in inline_code(row[0])}
    assert documented == {field.name for field in fields(CallOptions)}


def test_context_methods_on_the_celery_page_exist() -> None:
    text = (ROOT / "docs/how-to/coming-from-celery.md").read_text()
    methods = set(re.findall(r"self\.(\w+)\(", text))
    assert methods <= {"update_state"} | set(dir(Context))  # update_state is Celery's


# ---- names and links -------------------------------------------------------------------------------------------------


def resolves(dotted: str) -> bool:
    """Return whether a dotted name is a module or an attribute in a module."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            value = getattr(value, part, None)
        return value is not None
    return False


def test_every_bulltask_name_that_a_page_mentions_exists() -> None:
    codes = [(page, code) for page in PAGES for code in inline_code(prose(page))]
    names = {(page, code) for page, code in codes if re.fullmatch(r"bulltask(\.[A-Za-z_]\w*)+", code)}
    assert sorted((page, name) for page, name in names if not resolves(name)) == []


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub creates for a page's headings; the site has these and more."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_inside_the_repository_works_on_github() -> None:
    targets = [(page, target) for page in PAGES for target in re.findall(r"\]\(([^)\s]+)\)", prose(page))]
    broken = []
    for page, target in targets:
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        if "://" not in target and not (path.is_file() and (not anchor or anchor in anchors(path))):
            broken.append((page, target))
    assert broken == []


def test_every_page_is_reachable_from_the_index() -> None:
    docs = ROOT / "docs"
    index = (docs / "index.md").read_text()
    pages = [page.relative_to(docs).as_posix() for folder in DOCS for page in (docs / folder).glob("*.md")]
    assert [page for page in pages if f"({page})" not in index] == []
    assert [page.name for page in docs.glob("*.md")] == ["index.md"]


def test_the_changelog_has_the_format_of_keep_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert re.findall(r"^## (.*)$", text, re.MULTILINE)[0] == "[Unreleased]"
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
