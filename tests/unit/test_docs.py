"""The documentation says what the code does: its snippets run, its tables are the code's, its links lead somewhere."""

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
import pytest

from bulltask import App, Context
from bulltask.cli import migrate_bull
from bulltask.cli import worker as worker_command
from bulltask.cli.main import COMMANDS, main
from bulltask.config.settings import SETTINGS
from bulltask.events import Bus
from bulltask.registry.options import CallOptions, TaskOptions
from bulltask.testing.wait import wait_until
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.exit_codes import ExitCode
from bulltask.worker.supervisor.heartbeat import Heartbeat
from bulltask.worker.supervisor.signals import SIGNAL_METHODS
from tests.interop.conftest import HERE as NODE_FOLDER
from tests.interop.conftest import node_client  # noqa: F401 - a fixture
from tests.support.worker import Worker

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
TUTORIAL = ROOT / "docs/tutorial/first-steps.md"
SIGNALS = ROOT / "docs/reference/signals.md"
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")],
    key=lambda path: path.as_posix(),
)
DOCS = ("tutorial", "how-to", "reference", "explanation")
"""Where a page is, beside the index and the decisions."""
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
"""What the page about signals calls the supervisor's methods."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def file_block(page: Path, language: str, name: str) -> str:
    """The block that begins with ``# name``."""
    return next(block for block in blocks(page, language) if block.startswith(f"# {name}\n"))


def rows(page: Path, section: str) -> list[list[str]]:
    """The cells of all tables in a section, without their heads."""
    text = re.split(r"^#+ ", page.read_text().partition(f"# {section}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    tables = re.findall(r"^\|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split(" |")] for table in tables for line in table.splitlines()]


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def in_code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


# ---- Python snippets ------------------------------------------------------------------------------------------------


class Anything(types.ModuleType):
    """Stands in for a library that a snippet uses; everything in it is a class without use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name) if name.islower() else type(name, (Exception,), {})

    def __call__(self, *_: object, **__: object) -> Any:
        return Anything("result")


GIVEN: Mapping[str, Mapping[str, Any]] = {
    "README.md": {},
    "docs/tutorial/first-steps.md": {},
    "docs/how-to/coming-from-celery.md": {"download": Anything("download")},
    "docs/reference/configuration.md": {},
    "docs/how-to/embedded-server.md": {"App": App},
    "docs/how-to/errors-and-retries.md": {
        name: Anything(name) for name in ("httpx", "URL", "BANK", "balance", "botocore", "order_id", "download")
    }
    | {name: type(name, (Exception,), {}) for name in ("InsufficientFunds", "Throttled", "Overloaded")},
    "docs/how-to/flows.md": {"parts_of": Anything("parts_of")},
    "docs/explanation/guarantees.md": {"bank": Anything("bank"), "outbox": []},
    "docs/how-to/interop-node.md": {},
    "docs/how-to/migrating-from-bull.md": {},
    "docs/reference/mixed-versions.md": {},
    "docs/reference/official-python.md": {},
    "docs/reference/queue-events.md": {"pager": Anything("pager")},
    "docs/reference/queues.md": {},
    "docs/how-to/revoking.md": {},
    "docs/how-to/schedules.md": {},
    "docs/how-to/time-limits.md": {
        name: Anything(name) for name in ("draw", "remove_temporary_files", "walk", "save_what_is_there")
    },
    "docs/reference/workers.md": {},
    "docs/how-to/observability.md": {"pager": Anything("pager")},
}
"""What the snippets of a page may use without making it."""


PROGRAMS = {"README.md", "docs/tutorial/first-steps.md"}
"""Pages whose snippets are programs for a worker, and are run as such."""


def unknown_names(code: types.CodeType, there: Collection[str]) -> Iterator[str]:
    # What was stored counts even if it is gone: ``except … as error`` deletes its name.
    known = {*there, *(str(step.argval) for step in dis.get_instructions(code) if step.opname == "STORE_NAME")}
    for instruction in dis.get_instructions(code):
        name = str(instruction.argval)
        if instruction.opname in {"LOAD_GLOBAL", "LOAD_NAME"} and name not in known and not hasattr(builtins, name):
            yield name
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from unknown_names(constant, known)


def run_snippets(page: Path) -> None:
    """Run a page's snippets one after the other; each but those that make an app of their own gets a fresh one."""
    names: dict[str, Any] = {**GIVEN[name_of(page)], "__name__": page.stem.replace("-", "_")}
    for block in blocks(page, "python"):
        names["app"] = App("documented")
        code = compile(block, name_of(page), "exec", dont_inherit=True)
        exec(code, names)
        assert list(unknown_names(code, names)) == [], block
        if title := re.match(r"# (\w+)\.py\n", block):
            module = types.ModuleType(title[1])
            vars(module).update(names)
            sys.modules[title[1]] = module


@pytest.mark.redis
@pytest.mark.parametrize("name", sorted(GIVEN.keys() - PROGRAMS))
def test_every_python_snippet_runs_and_uses_no_name_that_is_not_there(
    name: str, broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BULLTASK_BROKER_URL", broker_url)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    run_snippets(ROOT / name)


def test_no_page_has_python_snippets_that_nobody_runs() -> None:
    assert {name_of(page) for page in PAGES if blocks(page, "python")} == GIVEN.keys()


# ---- the README's example, and the tutorial -------------------------------------------------------------------------


@pytest.fixture
def worker_of(broker_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Save a page's programs in ``tmp_path`` and start the worker with the page's command."""
    monkeypatch.setenv("BULLTASK_BROKER_URL", broker_url)
    with ExitStack() as stack:

        def start(page: Path) -> None:
            for block in blocks(page, "python"):
                if title := re.match(r"# (\w+\.py)\n", block):
                    (tmp_path / title[1]).write_text(block)
                else:
                    exec(compile(block, name_of(page), "exec", dont_inherit=True), {"__name__": page.stem})
            words = shlex.split(next(block for block in blocks(page, "sh") if block.startswith("bulltask worker")))
            process = subprocess.Popen([sys.executable, "-m", *words], cwd=tmp_path, stderr=subprocess.DEVNULL)
            stack.callback(stop, process)

        yield start


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    assert process.wait(20) == ExitCode.OK


def run_program(words: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=directory, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.process
@pytest.mark.parametrize("page", [README, TUTORIAL], ids=name_of)
def test_the_programs_of_a_page_print_what_it_says(
    worker_of: Callable[[Path], None], tmp_path: Path, page: Path
) -> None:
    worker_of(page)
    programs = [path for path in sorted(tmp_path.glob("*.py")) if path.name != "tasks.py"]
    assert programs
    for program in programs:
        printed = run_program([sys.executable, program.name], tmp_path)
        said = re.findall(r"print\(.*\)\s+# (.*)$", program.read_text(), re.MULTILINE)
        assert printed.stderr == ""
        assert printed.stdout == "".join(f"{line}\n" for comment in said for line in re.split(r", (?=Hello)", comment))


@pytest.mark.interop
def test_the_readmes_node_program_gets_the_answer_it_says(
    worker_of: Callable[[Path], None],
    node_client: None,  # noqa: F811
    broker_url: str,
    tmp_path: Path,
) -> None:
    worker_of(README)
    program = blocks(README, "js")[0]
    assert NODE_URL in program
    (tmp_path / "program.mjs").write_text(program.replace(NODE_URL, broker_url.removesuffix("/0")))
    (tmp_path / "node_modules").symlink_to(NODE_FOLDER / "node_modules")
    node = shutil.which("node")
    assert node is not None
    done = run_program([node, "program.mjs"], tmp_path)
    assert done.stdout.split() == re.findall(r"console\.log\(.*// (.*)$", program, re.MULTILINE), done.stderr


def test_the_readmes_programs_are_as_short_as_it_says() -> None:
    tasks = [line for line in file_block(README, "python", "tasks.py").splitlines() if line.strip()]
    node = [line for line in blocks(README, "js")[0].splitlines() if line.strip()]
    assert len(tasks) <= 20
    assert len(node) <= 10


def test_the_readme_is_short() -> None:
    assert len(README.read_text().split()) <= 1300


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_wherever_a_page_installs_bullmq_it_names_the_tested_version(page: Path) -> None:
    wanted = json.loads((NODE_FOLDER / "package.json").read_text())["dependencies"]["bullmq"]
    for command in re.findall(r"npm install[^`]*", page.read_text()):
        versions = re.findall(r"\sbullmq(?:@(\S+))?", command)
        assert versions == [wanted] * len(versions)
    if any("from 'bullmq'" in block for block in blocks(page, "js")):
        assert f"npm install bullmq@{wanted}" in page.read_text()


# ---- signals, exit codes, commands ----------------------------------------------------------------------------------


def documented_signals() -> dict[signal.Signals, tuple[str, str]]:
    """Signal to the texts of the table for supervisor and child, but for the line of all others."""
    lines = rows(SIGNALS, "Signals")
    named = [row for row in lines if "all others" not in row[0]]
    assert len(named) == len(lines) - 1
    return {signal.Signals[f"SIG{name}"]: (row[1], row[2]) for row in named for name in in_code(row[0])}


def caught(pid: int, *masks: str) -> set[signal.Signals]:
    """The signals that a process has handlers for, or that are in other masks of the kernel's."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.findall(rf"^(?:{'|'.join(masks or ['SigCgt'])}):\s+(\w+)$", status, re.MULTILINE)
    return {number for number in signal.Signals if any(int(mask, 16) >> (number - 1) & 1 for mask in found)}


def test_the_table_of_signals_is_the_supervisors() -> None:
    table = documented_signals()
    assert table.keys() == SIGNAL_METHODS.keys()
    for number, method in SIGNAL_METHODS.items():
        assert table[number][0].startswith(METHODS[method]), f"{number.name} is {method}"


@pytest.mark.process
def test_worker_and_child_catch_the_signals_that_the_table_says_they_catch(broker_url: str, tmp_path: Path) -> None:
    table = documented_signals()
    handles = ("ends", "ignores", "logs", "checks")
    by_child = {number for number, (_, child) in table.items() if child.startswith(handles)}
    others = {number for number, (_, child) in table.items() if child.startswith(("dies", "nothing"))}
    assert by_child | others == table.keys()
    worker = Worker(tmp_path, settings={"broker_url": broker_url, "worker_concurrency": 1})
    try:
        child = worker.wait_for_line("Child started")[0]["pid"]

        def handled() -> set[signal.Signals]:
            return caught(child, "SigCgt", "SigIgn") & table.keys()

        wait_until(lambda: handled() == by_child, what=f"handlers of the child: {handled()}, not {by_child}")
        assert caught(worker.pid) == table.keys()
        assert worker.stop() == ExitCode.OK
    finally:
        worker.close()


def test_the_documented_exit_codes_are_the_workers() -> None:
    codes = {int(row[0]): in_code(row[1])[0] for row in rows(SIGNALS, "Exit codes")}
    assert codes == {int(code): code.name for code in ExitCode}


def test_every_command_is_documented() -> None:
    said = (
        set(re.findall(r"bulltask ([\w-]+)", (ROOT / "docs/how-to/coming-from-celery.md").read_text()))
        & COMMANDS.keys()
    )
    assert said == COMMANDS.keys(), "docs/how-to/coming-from-celery.md says which commands there are"


# ---- settings, flags, options ---------------------------------------------------------------------------------------


def test_the_table_of_settings_is_up_to_date() -> None:
    page = (ROOT / "docs/reference/configuration.md").read_text()
    script = runpy.run_path(str(ROOT / "docs/settings_table.py"))
    assert script["written"](page) == page, "run: .venv/bin/python docs/settings_table.py"


def test_locks_are_renewed_as_often_as_the_page_of_settings_says() -> None:
    app = App("documented")
    backoff = ReconnectBackoff(Bus(), app.config)
    heartbeat = Heartbeat([], list, app.broker.client(), app.config, Bus(), backoff)
    said = re.search(
        r"every quarter of `lock_duration` \(([\d.]+) s of (\d+)\)", prose(ROOT / "docs/reference/configuration.md")
    )
    assert said is not None
    assert [float(seconds) * 1000 for seconds in said.groups()] == [heartbeat.interval_ms, app.config.lock_ms]


def test_the_page_of_requirements_gives_reasons_and_the_defaults_of_the_settings() -> None:
    page = ROOT / "docs/explanation/requirements.md"
    table = [row for row in rows(page, "Differences from the requirements") if not row[0].startswith("**")]
    assert [row for row in table if len(row) != 3 or not all(row)] == []
    said = re.findall(r"`(\w+)=([\w.]+)`", "".join(row[1] for row in table))
    defaults = {row.name: str(row.default) for row in SETTINGS.values()}
    assert {name: value for name, value in said if name in defaults and value != defaults[name]} == {
        "queue_hash_tag": "False"
    }
    words = (
        "progress",
        "log keeps",
        "categories",
        "heartbeat",
        "Concurrency",
        "`drain`",
        "`retry`",
        "Job ids",
        "stall",
    )
    assert [word for word in words if not any(word.lower() in row[0].lower() for row in table)] == []


def test_every_flag_of_the_worker_is_documented() -> None:
    said = set(in_code(prose(ROOT / "docs/reference/configuration.md")))
    options = [*worker_command.command.params, *main.params]
    flags = {opt for option in options if isinstance(option, click.Option) for opt in option.opts}
    assert flags - said - {"--help", "-h", "--version"} == set()


def test_every_flag_of_migrate_bull_is_documented_and_no_other() -> None:
    page = ROOT / "docs/how-to/migrating-from-bull.md"
    said = {name for row in rows(page, "Options") for name in in_code(row[0]) if name.startswith("--")}
    options = [option for option in migrate_bull.command.params if isinstance(option, click.Option)]
    assert said == {opt for option in options for opt in option.opts} - {"-A", "--app", "-b", "--broker"}
    codes = {int(row[0]) for row in rows(page, "Options") if row[0].isdigit()}
    assert codes == {0, 1, 2, migrate_bull.EXIT_REFUSED, migrate_bull.EXIT_SKIPPED}


def test_every_option_of_a_task_is_documented() -> None:
    said = {
        name for row in rows(ROOT / "docs/reference/configuration.md", "Options of a task") for name in in_code(row[0])
    }
    assert said == {field.name for field in fields(TaskOptions)} - {"endless"} | {"name", "bind"}


def test_every_option_of_a_call_is_documented() -> None:
    said = {
        name for row in rows(ROOT / "docs/reference/configuration.md", "Options of a call") for name in in_code(row[0])
    }
    assert said == {field.name for field in fields(CallOptions)}


def test_what_the_celery_page_says_that_context_and_request_have_is_there() -> None:
    text = (ROOT / "docs/how-to/coming-from-celery.md").read_text()
    methods = set(re.findall(r"self\.(\w+)\(", text))
    assert methods <= {"update_state"} | set(dir(Context))  # update_state is Celery's


# ---- names and links ------------------------------------------------------------------------------------------------


def resolves(dotted: str) -> bool:
    """True when a dotted name leads to a module or to something in one."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part, None)
        return found is not None
    return False


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_name_of_ours_that_a_page_mentions_exists(page: Path) -> None:
    names = {found for found in in_code(prose(page)) if re.fullmatch(r"bulltask(\.[A-Za-z_]\w*)+", found)}
    assert sorted(name for name in names if not resolves(name)) == []


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings; the site has these and others."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_inside_the_repository_leads_somewhere_on_github(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        file, _, anchor = target.partition("#")
        there = page.parent / file if file else page
        if "://" not in target and not (there.is_file() and (not anchor or anchor in anchors(there))):
            broken.append(target)
    assert broken == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "dummy", "-n", "-c", "docs", ".", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert (built.stderr, built.returncode) == ("", 0)


def test_every_page_is_reachable_from_the_index() -> None:
    docs = ROOT / "docs"
    index = (docs / "index.md").read_text()
    pages = [page.relative_to(docs).as_posix() for room in DOCS for page in (docs / room).glob("*.md")]
    assert [page for page in pages if f"({page})" not in index] == []
    assert [page.name for page in docs.glob("*.md")] == ["index.md"]


def test_the_changelog_has_the_form_that_it_claims() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert re.findall(r"^## (.*)$", text, re.MULTILINE)[0] == "[Unreleased]"
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
