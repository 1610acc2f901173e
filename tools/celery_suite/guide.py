"""The examples of Celery's user guide: finds the blocks of code in a page, and runs them in order.

Run as a program, it runs the blocks of a page in this process, with the library that ``celery`` is there:
``python -m tools.celery_suite.guide bulltask canvas.rst``. A block works if no statement raises an error (or
the error that the guide shows), and if each value that the guide shows is printed.
"""

from __future__ import annotations

import ast
import codeop
import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["CODE", "PAGES", "SOURCE", "Block", "blocks"]

PAGES: Final = ("calling.rst", "tasks.rst", "canvas.rst", "periodic-tasks.rst", "routing.rst")
SOURCE: Final = Path(__file__).parents[2] / ".venv/celery-suite/source"
PROJECT: Final = Path(__file__).parent / "guide_project"
SECONDS: Final = 30
CODE: Final = ("python", "pycon", "console")

_DIRECTIVE: Final = re.compile(r"\s*\.\. code-block:: *(\w+)")
_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        page, line: Where it is; together, its name.
        language: ``python``, ``pycon`` (with prompts), ``console``, or another language, which is not run.
        text: The code.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        """The block's name, such as ``canvas.rst:403``."""
        return f"{self.page}:{self.line}"


def blocks(page: str) -> Iterator[Block]:
    """Yield all literal blocks of a page."""
    lines = (SOURCE / "docs/userguide" / page).read_text().splitlines()
    number = 0
    while number < len(lines):
        first, line, number = number + 1, lines[number], number + 1
        directive = _DIRECTIVE.match(line)
        if directive is None and not (line.rstrip().endswith("::") and not line.lstrip().startswith("..")):
            continue
        margin, found = len(line) - len(line.lstrip()), []
        while number < len(lines) and (not lines[number].strip() or _margin(lines[number]) > margin):
            found.append(lines[number])
            number += 1
        text = textwrap.dedent("\n".join(found)).strip("\n") + "\n"
        language = directive[1] if directive else "python"
        yield Block(page, first, "pycon" if language == "python" and ">>> " in text else language, text)


def _margin(line: str) -> int:
    return len(line) - len(line.lstrip())


@dataclass
class Statement:
    """A part of a block: a statement, and what the guide shows below it."""

    code: str
    shown: str = ""


def statements(block: Block) -> list[Statement]:
    """Split a block; one without prompts is one statement."""
    if block.language == "python" or ">>> " not in block.text:
        return [Statement(block.text)]
    found: list[Statement] = []
    complete = True
    for line in block.text.splitlines():
        if prompt := re.match(r"\s*(>>>|\.\.\.)( |$)", line):
            code = line[prompt.end() :] + "\n"
            if prompt[1] == "..." or not complete:
                found[-1].code += code
            else:
                found.append(Statement(code))
            complete = _is_complete(found[-1].code)
        elif found and complete and line.strip() and not line.lstrip().startswith("#"):
            found[-1].shown += line + "\n"
    return found


def _is_complete(code: str) -> bool:
    try:
        return codeop.compile_command(code) is not None
    except SyntaxError:
        return True


class Overdue(BaseException):
    """A block takes too long; not a ``TimeoutError``, after which the library would try again."""


class Runner:
    """Runs the blocks of a page, one after another, with the names of the earlier ones.

    A worker knows the tasks that were defined before it was forked; it is replaced when a block has defined others.
    """

    def __init__(self, library: str) -> None:
        self._library = library
        if library == "bulltask":
            import bulltask.celery  # noqa: F401, PLC0415 - the line of the migration guide
        sys.path.insert(0, str(PROJECT))
        import proj.celery  # noqa: PLC0415
        import proj.tasks  # noqa: PLC0415

        self._app: Any = proj.celery.app
        self._names: dict[str, Any] = {**vars(proj.tasks), "__name__": "tasks", "__package__": "proj", "app": self._app}
        self._shadowed: set[str] = set()
        self._worker: int | None = None
        self._known: object = None

    def run(self, block: Block) -> str:
        """Run a block; return what is wrong, ``""`` if it works."""
        self._restore_names()
        signal.signal(signal.SIGALRM, self._stop)
        signal.alarm(SECONDS)
        configures = bool(re.search(r"app\.conf|on_after_configure|^task_routes|^timezone", block.text, re.MULTILINE))
        if configures:  # each is the beginning of a program: settings cannot change later
            self._names["app"] = self._new_app()
        try:
            for statement in statements(block):
                if problem := self._run(statement):
                    return problem
            if configures:
                self._configure(block)
        except BaseException as error:  # noqa: BLE001 - also those of bulltask that are no Exception
            lines = [line for line in traceback.format_exception_only(error) if line.strip()]
            return lines[-1].strip()
        finally:
            signal.alarm(0)
            if configures:
                self._names["app"] = self._app
                self._app.set_current()
        return ""

    def close(self) -> None:
        """Stop the worker."""
        if self._worker is not None:
            os.kill(self._worker, signal.SIGKILL if self._library == "celery" else signal.SIGTERM)
            os.waitpid(self._worker, 0)
            self._worker = None

    def _run(self, statement: Statement) -> str:
        tree = ast.parse(statement.code)
        self._forget(tree)
        printed = io.StringIO()
        self._names["_"] = None
        try:
            with contextlib.redirect_stdout(printed):
                for node in tree.body:
                    self._execute(node)
        except Exception as error:
            if not statement.shown.startswith("Traceback"):
                raise
            expected = statement.shown.strip().splitlines()[-1].split(":")[0].rpartition(".")[2]
            return "" if expected in (cls.__name__ for cls in type(error).__mro__) else f"raises {error!r}"
        if statement.shown.startswith("Traceback"):
            return f"raises nothing; the guide shows {statement.shown.strip().splitlines()[-1]!r}"
        return "" if _same(printed.getvalue(), statement.shown) else f"prints {printed.getvalue()!r}"

    def _restore_names(self) -> None:
        """Restore names of the library that an example before the previous one has given to something else."""
        import celery  # noqa: PLC0415

        given = {name: getattr(celery, name) for name in ("chain", "chord", "group", "signature")}
        self._names |= {name: given[name] for name in self._shadowed}
        self._shadowed = {name for name, value in given.items() if self._names[name] is not value}

    def _execute(self, node: ast.stmt) -> None:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
            self._start_worker()
        if isinstance(node, ast.Expr):
            value = eval(compile(ast.Expression(node.value), "<guide>", "eval"), self._names)  # noqa: S307
            if value is not None:
                print(repr(value))  # noqa: T201
        else:
            exec(compile(ast.Module([node], []), "<guide>", "exec"), self._names)  # noqa: S102

    def _forget(self, tree: ast.Module) -> None:
        """Remove the tasks that a block defines again: in a project, they would be in other modules."""
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                given = re.search(r"name='([^']+)'", ast.unparse(node))
                tasks = self._names["app"].tasks
                for name in (f"tasks.{node.name}", given[1] if given else ""):
                    (tasks if self._library == "celery" else vars(tasks)["_tasks"]).pop(name, None)
                self._known = None

    def _new_app(self) -> Any:
        import celery  # noqa: PLC0415

        url = os.environ["TEST_BROKER"]
        return celery.Celery("tasks", broker=url, backend=url)

    def _configure(self, block: Block) -> None:
        """Use the settings that a block has set, as a worker does when it starts."""
        app = self._names["app"]
        found = re.findall(r"^(task_routes|timezone) =", block.text, re.MULTILINE)
        if found:
            app.conf.update({name: self._names[name] for name in found})
        if self._library == "bulltask":
            app._load_tasks()
            _ = app._config
        else:
            app.finalize(auto=True)
            _ = app.conf.beat_schedule, app.amqp.routes, app.amqp.queues

    def _start_worker(self) -> None:
        app = self._names["app"]
        known = (id(app), tuple(sorted(app.tasks)))
        if known == self._known or app is not self._app:
            return
        self.close()
        self._known = known
        self._worker = os.fork()
        if self._worker == 0:
            code = 1
            try:
                code = self._run_worker()
            finally:
                os._exit(code)
        app.tasks["proj.tasks.add"].delay(1, 1).get()  # it has started

    def _run_worker(self) -> int:
        signal.alarm(0)
        log = os.open(os.environ["SUITE_WORKER_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        if self._library == "bulltask":
            return int(self._app.worker_main(["worker"]) or 0)
        self._app._after_fork()  # noqa: SLF001 - multiprocessing calls it
        self._app.worker_main(["worker", "-P", "solo", "--without-mingle", "--without-gossip"])
        return 0

    def _stop(self, *_: object) -> None:
        raise Overdue(f"no end after {SECONDS} s")


def _same(printed: str, shown: str) -> bool:
    if shown.strip() in ("", "None"):
        return not shown.strip() or not printed
    with contextlib.suppress(ValueError, SyntaxError):
        return bool(ast.literal_eval(printed.strip()) == ast.literal_eval(shown.strip()))
    return _normal(printed) == _normal(shown)


def _normal(text: str) -> str:
    return re.sub(r"\s|\b(proj\.)?tasks\.", "", _ID.sub("ID", text))


def run_commands(block: Block, library: str) -> str:
    """Run the commands ``celery …`` of a block; a worker works if it starts."""
    commands = re.findall(r"^\S*\$ celery (.*(?:\\\n.*)*)", block.text, re.MULTILINE)
    if not commands:
        return "the commands are not Celery's"
    for command in commands:
        words = shlex.split(command.replace("\\\n", " "), comments=True)
        process = subprocess.Popen(
            [sys.executable, "-m", library, *words],
            env={**os.environ, "PYTHONPATH": f"{PROJECT}:{os.environ['PYTHONPATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        assert process.stdout is not None
        last, ready = "", False
        for line in process.stdout:
            last = line.strip() or last
            if re.search(r"Worker ready|Worker started| ready\.$|exchange=|maxinterval", line):
                ready = True
                break
        process.terminate()
        process.communicate()
        timer.cancel()
        if not ready and process.returncode != 0:
            return f"celery {command.strip()}: {last}"
    return ""


def main(library: str, page: str) -> None:
    """Run the blocks of a page; write a line for each."""
    runner = Runner(library)
    with Path(os.environ["SUITE_OUTCOMES"]).open("w") as file:
        for block in blocks(page):
            if block.language == "console":
                problem = run_commands(block, library)
            elif block.language in CODE:
                problem = runner.run(block)
            else:
                continue
            outcome = "failed" if problem else "passed"
            file.write(json.dumps({"name": block.name, "outcome": outcome, "message": problem}) + "\n")
            file.flush()
    runner.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
