"""The screens of ``bulltask top``: queues, their jobs, workers, and why something does not run, in a terminal.

What they show is read by the functions of the dashboard and of the commands, in threads, so that keys always work. Only
the screen that is seen is read: every two seconds, and less often if reading takes long.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

import click
from textual import work
from textual.app import App as TerminalApp
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.style import Style
from textual.widgets import Footer, Input, OptionList, Static
from textual.widgets.option_list import Option

from bulltask.app import App
from bulltask.cli.job import job_page, with_server
from bulltask.cli.queues import QUEUE_COLUMNS, queue_note, queue_row
from bulltask.cli.terminal import as_table, in_one_line
from bulltask.cli.why import why_page
from bulltask.cli.workers import OTHERS_UNKNOWN, task_names, worker_pages
from bulltask.dashboard.changes import JOB_CHANGES
from bulltask.dashboard.pages import COST, MIN_AGE_S, STATES, Filter, Pages
from bulltask.jobs.clock import mono_s, timeout
from bulltask.jobs.errors import BulltaskError
from bulltask.lake.formatting import age_text
from bulltask.queue import Queue
from bulltask.queue.control import this_user

__all__ = ["Top"]

T = TypeVar("T")

_MAX_LINES: Final = 2_000
_MAX_LINE: Final = 4_000

_HELP: Final = """\
Queues
  ↑ ↓ PgUp PgDn  select a queue; Enter shows its jobs
  w  why its jobs do not run, with what proves it and what mends it
  p  pause or resume it, for all its workers
  s  sort by name, waiting jobs, age of the oldest one, or failed jobs
  /  only queues whose name contains a text; Esc shows all again

Jobs of a queue
  ← →  another state; Enter shows a job: its data, errors, log, and why it waits
  w  why the selected job does not run; without jobs, why the queue's do not
  r  retry    a failed or completed job waits again
  m  promote  a delayed job waits for a worker now
  c  cancel   the job does not run, or its worker stops it
  x  remove   the job and its child jobs are deleted
  /  only jobs with a text in their id, task, data or error

Everywhere
  1 queues   2 workers, and what they run   Space reads again now
  Esc back   ? help   q or Ctrl-C quits     Ctrl-Z suspends

Before anything is changed, you are asked. With --read-only, nothing can be.
'bulltask queues --help' explains the columns."""

_ALL: Final = frozenset(STATES)
_FINISHED: Final = frozenset(("failed", "completed"))
_QUESTIONS: Final[Mapping[str, tuple[str, frozenset[str]]]] = {
    "retry": ("Retry job {0}? It waits again.", _FINISHED),
    "promote": ("Promote job {0}? It is no longer delayed.", frozenset(("delayed",))),
    "remove": ("Remove job {0} and its child jobs? This cannot be undone.", _ALL - {"active"}),
    "revoke": ("Cancel job {0}? If it runs, its worker stops it.", _ALL - _FINISHED),
}
"""What is asked before a job is changed, and the states in which it can be; by the names of :data:`JOB_CHANGES`."""

_SORTS: Final = ("name", "waiting", "oldest_ms", "failed")
_FIRST: Final = ("waiting", "failed", "active", "delayed", "waiting-children", "completed")
"""Of which state a queue's jobs are listed first, if there are any."""


# ---- what is shown ----


class _Shown(NamedTuple):
    """What a screen shows.

    Attributes:
        about: What is above the rows.
        table: The line with the columns, and a line for each row.
        rows: The key of each row, and what is below it.
        text: A text that may be longer than the screen, instead of rows.
        states: The states that the job, or the selected one, may have.
        choice: The sort order, or the state whose jobs are listed.
    """

    about: Sequence[str] = ()
    table: str = ""
    rows: Sequence[tuple[str, str]] = ()
    text: str = ""
    states: frozenset[str] = frozenset()
    choice: int = 0


def _queues(page: _Page) -> _Shown:
    """Read all queues; the key of one that the app's keys cannot reach begins with NUL."""
    top, sort, width = page.top, _SORTS[page.choice % len(_SORTS)], page.size.width
    found = top.pages.overview()
    queues = found.choose(page.find, None if sort == _SORTS[0] else sort)
    cells = [queue_row(queue) for queue in queues]
    room = width - sum(max(map(len, column)) + 1 for column in list(zip(QUEUE_COLUMNS, *cells, strict=True))[1:])
    table = as_table(QUEUE_COLUMNS, [(in_one_line(name, max(12, room)), *rest) for name, *rest in cells], gap=" ")
    names = [queue.keys.queue for queue in queues]
    are_own = [top.queues._broker.keys(name).name == queue.keys.name for name, queue in zip(names, queues, strict=True)]
    keys = [name if is_own else f"\0{name}" for name, is_own in zip(names, are_own, strict=True)]
    about = [in_one_line(found.server, width)]
    about += [] if found.queues else ["There are no queues yet."]
    about += [] if found.scanned_all else ["Queues that only Node.js uses may be missing: there are too many keys."]
    about += [] if sort == _SORTS[0] else [f"sorted by {sort.removesuffix('_ms')}"]
    notes = [queue_note(queue, found.now_ms) for queue in queues]
    return _Shown(about, table, list(zip(keys, notes, strict=True)), choice=page.choice)


def _jobs(page: _Page) -> _Shown:
    """Read a queue: why it does not move, and its jobs of one state."""
    width, name = page.size.width, str(page.queue)
    state = STATES[page.choice % len(STATES)] if page.has_chosen else _FIRST[0]
    found = page.top.pages.queue(name, Filter(state, page.find or None), None)
    if not page.has_chosen and (other := next((one for one in _FIRST if found.counts[one]), state)) != state:
        state = other
        found = page.top.pages.queue(name, Filter(state, page.find or None), None)
    counts = {one: f"{one} {found.counts[one]:,}" for one in STATES}
    about = [in_one_line(reason.sentence, 2 * width) for reason in found.explanation.reasons[:2]]
    about.append("  ".join(f"[{text}]" if one == state else text for one, text in counts.items()))
    jobs, now_s = found.found.jobs, datetime.now(UTC).timestamp()
    if len(jobs) < found.found.total:
        about.append(f"{len(jobs)} of {found.found.total:,}; {found.found.scanned:,} were read")
    cells = [
        (in_one_line(job.id, 36), in_one_line(job.name, 24), age_text(now_s - job.since_ms / 1000)) for job in jobs
    ]
    rows = [(job.id, in_one_line(job.failed_reason, width - 3)) for job in jobs]
    table = as_table(("id", "task", "age"), cells)
    return _Shown(about, table, rows, states=frozenset((state,)), choice=STATES.index(state))


def _why(page: _Page) -> _Shown:
    """Read why a job, or those of a queue, do not run."""
    top = page.top
    explanation = top.queues.queue(str(page.queue)).explain(page.job)
    explanation = with_server(explanation, top.context, top.options, top.queues)
    return _text(why_page(explanation), explanation.state)


def _details(page: _Page) -> _Shown:
    """Read a job."""
    top = page.top
    state, lines = job_page(top.context, top.options, top.queues, str(page.queue), str(page.job))
    return _text(lines, state)


def _workers(page: _Page) -> _Shown:
    """Read all workers."""
    queues, (fleet, now_ms) = page.top.queues, page.top.pages.fleet()
    with queues._broker.pool.client() as client:
        client.connect()
        names = task_names(client, queues, fleet)
    pages = list(worker_pages(queues, fleet, names, now_ms)) or ["There are no workers."]
    return _text("\n\n".join([*pages, *([OTHERS_UNKNOWN] if fleet.others is None else [])]).split("\n"))


def _help(_page: _Page) -> _Shown:
    return _text(_HELP.split("\n"))


def _text(lines: Iterable[str], state: str | None = None) -> _Shown:
    """Return a text, and the state of its job; values may be of any length."""
    cut = [line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}… ({len(line):,} characters)" for line in lines]
    more = [f"… ({len(cut):,} lines)"] if len(cut) > _MAX_LINES else []
    states = () if state is None else (state if state in STATES else _FIRST[0],)
    return _Shown(text="\n".join([*cut[:_MAX_LINES], *more]), states=frozenset(states))


# ---- screens ----


class _Rows(OptionList, inherit_bindings=False):
    """Rows of text, of which one is selected; it stays selected when the rows are read again."""

    BINDINGS = OptionList.BINDINGS  # without those to scroll sideways

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._shown: list[tuple[str, str]] = []

    @property
    def selected(self) -> str | None:
        """The key of the selected row."""
        return None if self.highlighted is None or not self._shown else self._shown[self.highlighted][0]

    def show(self, rows: Sequence[tuple[str, str]]) -> None:
        """Show rows: their keys, and their texts."""
        width = self.scrollable_content_region.width
        rows = [(key, "\n".join(line.ljust(width) for line in text.split("\n"))) for key, text in rows]
        before, position, top, selected = self._shown, self.highlighted, self.scroll_y, self.selected
        self._shown = rows
        keys = [key for key, _ in rows]
        if keys == [key for key, _ in before]:
            for index, (old, new) in enumerate(zip(before, rows, strict=True)):
                if old != new:
                    self.replace_option_prompt_at_index(index, new[1])
            return
        self.set_options([Option(text) for _, text in rows])
        if rows:
            self.highlighted = keys.index(selected) if selected in keys else min(position or 0, len(rows) - 1)
            self.call_after_refresh(self.scroll_to, y=top, animate=False)

    def get_visual_style(self, *component_classes: str, partial: bool = False) -> Style:
        """Return a style; that of the selected row is reversed, which can be seen without colours, too."""
        style = super().get_visual_style(*component_classes, partial=partial)
        return style + Style(reverse=True) if "option-list--option-highlighted" in component_classes else style


class _Question(ModalScreen[bool]):
    """A question before something is changed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape,q", "dismiss(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(f"{self._question}\n\ny  yes     n  no", id="question", markup=False)


class _Page(Screen[None]):
    """A screen.

    Attributes:
        read: Reads what is shown, in a thread.
        find: What was searched for.
        choice, has_chosen: The sort order or the state, and whether it is known which one.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("w", "why", "Why"),
        Binding("r", "change('retry')", "Retry"),
        Binding("m", "change('promote')", "Promote"),
        Binding("x", "change('remove')", "Remove"),
        Binding("c", "change('revoke')", "Cancel"),
        Binding("p", "pause", "Pause"),
        Binding("left", "choose(-1)", "State", key_display="←→"),
        Binding("right", "choose(1)", show=False),
        Binding("s", "sort", "Sort"),
        Binding("slash", "find(True)", "Find", key_display="/"),
        Binding("slash", "find(False)", show=False),
        Binding("2", "workers", "Workers"),
    ]

    def __init__(
        self, top: Top, title: str, read: Callable[[_Page], _Shown], queue: str | None = None, job: str | None = None
    ) -> None:
        super().__init__()
        self.top = top
        self.read = read
        self.find = ""
        self.choice = 0
        self.has_chosen = False
        self._title = in_one_line(title)
        self._queue = queue
        self._job = job
        self._states = frozenset[str]()
        self._is_list = read in {_queues, _jobs}
        self._rows = _Rows()

    @property
    def queue(self) -> str | None:
        """The queue that is shown, or selected; ``None`` if there is none."""
        if self.read is _queues:
            return None if (self._rows.selected or "\0").startswith("\0") else self._rows.selected
        return self._queue

    @property
    def job(self) -> str | None:
        """The id of the job that is shown, or selected."""
        return self._rows.selected if self.read is _jobs else self._job

    def compose(self) -> ComposeResult:
        with Horizontal(id="head"):
            yield Static(self._title, id="title", markup=False)
            yield Static(id="status", markup=False)
        for name in ("error", "about", "columns"):
            yield Static(id=name, markup=False)
        if self._is_list:
            yield self._rows
            yield Input(placeholder="text to find", compact=True)
        else:
            with VerticalScroll():
                yield Static(id="text", markup=False)
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        for name in ("error", "about", "columns"):
            self._set_text(name, "")
        if self._is_list:
            self.search("")

    def on_screen_resume(self) -> None:
        self.top.read_soon()

    def _set_text(self, widget: str, text: str) -> None:
        """Set the text of a widget, which takes no room without one."""
        static = self.query_one(f"#{widget}", Static)
        static.update(text)
        static.display = bool(text)

    def show(self, found: _Shown | None, error: str, status: str) -> None:
        """Show what was read, or why that was not possible."""
        self._set_text("error", error)
        if found is None:
            return
        self._set_text("status", status)
        self._states = found.states
        self.choice = found.choice
        self.has_chosen = True
        if not self._is_list:
            self._set_text("text", found.text)
        else:
            columns, *lines = found.table.split("\n")
            self._set_text("about", "\n".join([*found.about, *([f"with {self.find!r}"] if self.find else [])]))
            self._set_text("columns", columns)
            texts = [f"{line}\n  {note}" if note else line for line, (_, note) in zip(lines, found.rows, strict=True)]
            self._rows.show([(key, text) for (key, _), text in zip(found.rows, texts, strict=True)])
        self.refresh_bindings()

    # ---- keys ----

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether a key does something here; others are neither shown nor heeded."""
        if action == "change":
            is_possible = self.job is not None and not self._states.isdisjoint(_QUESTIONS[str(parameters[0])][1])
            return is_possible and not self.top.read_only
        possible = {
            "why": self.queue is not None and self.read is not _why,
            "pause": self.queue is not None and not self.top.read_only,
            "choose": self.read is _jobs,
            "sort": self.read is _queues,
            "find": self.read is (_queues if parameters[:1] == (True,) else _jobs),  # shown where there is room
            "workers": self.read is _queues,
        }
        return possible.get(action, True)

    def on_option_list_option_highlighted(self) -> None:
        self.refresh_bindings()

    def on_option_list_option_selected(self) -> None:
        if self.queue is None:
            self.top.say("The keys of this queue have another form: see the option --queue-hash-tag.", is_error=True)
        elif self.read is _queues:
            self.top.push_screen(_Page(self.top, f"Queue {self.queue}", _jobs, self.queue))
        else:
            self.top.push_screen(_Page(self.top, "Job", _details, self.queue, self.job))

    def action_workers(self) -> None:
        self.top.action_workers()

    def action_why(self) -> None:
        self.top.push_screen(_Page(self.top, "Why", _why, self.queue, self.job))

    def action_change(self, name: str) -> None:
        change = partial(JOB_CHANGES[name], self.top.queues.queue(str(self.queue)), str(self.job))
        self.top.change(_QUESTIONS[name][0].format(in_one_line(str(self.job), 100)), change)

    def action_pause(self) -> None:
        self.top.pause(self.top.queues.queue(str(self.queue)))

    def action_choose(self, step: int) -> None:
        self.choice = (self.choice + step) % len(STATES)
        self.has_chosen = True
        self._rows.show([])
        self.top.read_soon()

    def action_sort(self) -> None:
        self.choice = (self.choice + 1) % len(_SORTS)
        self.top.read_soon()

    # ---- searching ----

    @property
    def is_searching(self) -> bool:
        """Whether only some rows are shown, or the user types which."""
        return self._is_list and (bool(self.find) or bool(self.query_one(Input).display))

    def action_find(self, _is_shown: bool) -> None:
        line = self.query_one(Input)
        line.display = True
        line.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.search(event.value.strip())

    def search(self, text: str) -> None:
        """Show only rows with a text, or all if it is empty."""
        self.find = text
        line = self.query_one(Input)
        line.value = text
        line.display = False
        self._rows.focus()
        self.top.read_soon()


# ---- the program ----


async def _in_thread(function: Callable[[], T]) -> T:
    """Call a function in a thread that does not keep the process from ending; return its result."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def call() -> None:
        try:
            settle = partial(future.set_result, function())
        except Exception as exc:  # noqa: BLE001 - raised below
            settle = partial(future.set_exception, exc)
        with suppress(RuntimeError):  # the program has ended
            loop.call_soon_threadsafe(lambda: None if future.done() else settle())

    threading.Thread(target=call, name="bulltask-top", daemon=True).start()
    return await future


class Top(TerminalApp[None]):
    """The program in the terminal.

    Attributes:
        queues: The app whose queues are shown.
        pages: Reads what is shown.
        context, options: The command that runs, for the commands that mend something.
        read_only: Nothing can be changed.
    """

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "home", show=False),
        Binding("2", "workers", show=False),
        Binding("space", "read", show=False),
        Binding("escape", "leave", "Back", key_display="Esc"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False),
    ]
    CSS = """
    #head, #columns { height: 1; text-wrap: nowrap; text-overflow: ellipsis; text-style: bold; }
    #title { width: 1fr; }
    #status { width: auto; }
    #error { max-height: 3; text-style: bold; }
    #about { max-height: 8; }
    #columns { text-style: bold underline; }
    _Rows { height: 1fr; border: none; padding: 0; text-wrap: nowrap; text-overflow: ellipsis; }
    _Rows > .option-list--option { padding: 0; }
    _Rows > .option-list--option-highlighted, _Rows:focus > .option-list--option-highlighted {
        text-style: none; color: ansi_default; background: ansi_default; }
    _Rows, VerticalScroll { scrollbar-size-vertical: 1; background: ansi_default; }
    _Question { align: center middle; background: ansi_default; }
    Toast { width: 76; max-width: 100%; padding: 0 1; }
    #question { width: 60; height: auto; border: ascii ansi_default; padding: 0 1; }
    """

    def __init__(self, queues: App, context: click.Context, options: Mapping[str, Any], *, read_only: bool) -> None:
        super().__init__(ansi_color=True)  # before NO_COLOR is read: its filter depends on it
        self.theme = "ansi-dark"  # the terminal's own colours, light or dark
        self.queues = queues
        self.context = context
        self.options = options
        self.read_only = read_only
        self.pages = Pages(queues)
        self._is_due = asyncio.Event()

    def get_default_screen(self) -> Screen[None]:
        """Return the screen to begin with."""
        return _Page(self, "Queues", _queues)

    def on_mount(self) -> None:
        """Begin to read."""
        self._keep_reading()

    @property
    def page(self) -> _Page:
        """The screen that is seen, or on which a question is asked."""
        return next(screen for screen in reversed(self.screen_stack) if isinstance(screen, _Page))

    def read_soon(self) -> None:
        """Read the screen that is seen."""
        self._is_due.set()

    @work
    async def _keep_reading(self) -> None:
        while True:
            self._is_due.clear()
            page, started_s, found, error = self.page, mono_s(), None, ""
            wanted = (page.find, page.choice)
            try:
                found = await _in_thread(partial(page.read, page))
            except BulltaskError as exc:
                error = in_one_line(f"This cannot be read: {exc}", 300)
            if page.is_attached and (page.find, page.choice) == wanted:
                status = f"{'read-only  ' if self.read_only else ''}{datetime.now(UTC):%H:%M:%S} UTC"
                page.show(found, error, status)
            with suppress(TimeoutError):
                async with timeout(max(MIN_AGE_S, (mono_s() - started_s) / COST)):
                    await self._is_due.wait()

    def say(self, text: str, *, is_error: bool = False) -> None:
        """Show a sentence for some seconds."""
        self.notify(in_one_line(text, 300), severity="error" if is_error else "information", timeout=6, markup=False)

    @work
    async def pause(self, queue: Queue) -> None:
        """Ask, and pause or resume a queue."""
        name = in_one_line(queue.name)

        def resume() -> str:
            queue.resume()
            return f"Queue {name} runs again."

        def pause() -> str:
            queue.pause(by=this_user())
            return f"Queue {name} is paused."

        try:
            is_paused = await _in_thread(queue.is_paused)
        except BulltaskError as exc:
            self.say(str(exc), is_error=True)
        else:
            word, change = ("Resume", resume) if is_paused else ("Pause", pause)
            self.change(f"{word} queue {name}, for all its workers?", change)

    @work
    async def change(self, question: str, change: Callable[[], str]) -> None:
        """Ask a question; if the user says yes, make a change, and say what was done."""
        if isinstance(self.screen, _Question) or not await self.push_screen_wait(_Question(question)):
            return
        try:
            self.say(await _in_thread(change))
        except BulltaskError as exc:
            self.say(str(exc), is_error=True)
        self.action_read()

    # ---- keys ----

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002 - textual's
        """Return whether a key does something now; a question has keys of its own."""
        if isinstance(self.screen, _Question):
            return action in {"quit", "suspend_process"}
        return action != "leave" or len(self.screen_stack) > 1 or self.page.is_searching

    def action_home(self) -> None:
        """Show the queues."""
        while len(self.screen_stack) > 1:
            self.pop_screen()

    def action_workers(self) -> None:
        """Show the workers."""
        self.action_home()
        self.push_screen(_Page(self, "Workers", _workers))

    def action_help(self) -> None:
        """Explain the keys."""
        self.push_screen(_Page(self, "Keys", _help))

    def action_read(self) -> None:
        """Read the screen again."""
        self.pages.forget()
        self.read_soon()

    def action_leave(self) -> None:
        """Show all rows again, or else the screen before this one."""
        if self.page.is_searching:
            self.page.search("")
        elif len(self.screen_stack) > 1:
            self.pop_screen()
