"""``bulltask top``: driven by keys, in tmux as by a user, and by textual's pilot."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from uuid import uuid4

import click
import pytest
import redis
from click.testing import CliRunner
from textual.pilot import Pilot

from bulltask import App
from bulltask.cli.main import main
from bulltask.cli.top import Top
from bulltask.jobs.clock import mono_s
from bulltask.testing.worker import wait_until

pytestmark = pytest.mark.redis

OPTIONS = {"app": None, "broker": None, "prefix": None, "hash_tag": None}


def add_failed(app: App, queue: str, error: str = "host 7 refused") -> str:
    """Add a job that has failed; return its id."""
    job = app.queue(queue).add("send", {"to": "ada@example.org"}, attempts=1)
    acquired = app.queue(queue).get_next_job("token")
    assert acquired is not None
    acquired.move_to_failed(ConnectionError(error))
    return job.id


# ---- in a terminal ----


class Terminal:
    """A terminal of 80 by 24, without colours, in tmux, that runs ``bulltask top``."""

    def __init__(self, *arguments: str) -> None:
        self._socket = f"bulltask-{uuid4().hex}"
        program = ["env", "NO_COLOR=1", sys.executable, "-m", "bulltask", "top", *arguments]
        shell = ["sh", "-c", '"$@"; echo "It has ended: $?"; read _', "sh", *program]
        self._tmux("-f", os.devnull, "new-session", "-d", "-x", "80", "-y", "24", *shell)

    def _tmux(self, *arguments: str) -> str:
        command = ["tmux", "-L", self._socket, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout

    def press(self, *keys: str) -> None:
        """Press keys."""
        self._tmux("send-keys", *keys)

    def screen(self, *options: str) -> str:
        """Return what is seen; with ``-e``, also the codes of styles and colours."""
        return self._tmux("capture-pane", "-p", *options)

    def shows(self, text: str) -> str:
        """Wait until a text is seen; return the whole screen."""
        seen = ""

        def is_seen() -> bool:
            nonlocal seen
            # Asking more often would slow the program down.
            seen = self._tmux("run-shell", "sleep 0.05", ";", "capture-pane", "-p")
            return text in seen

        try:
            wait_until(is_seen, 20, text)
        except Exception as exc:
            raise AssertionError(f"{text!r} is not in:\n{seen}") from exc
        return seen

    def close(self) -> None:
        """End it."""
        subprocess.run(["tmux", "-L", self._socket, "kill-server"], check=False, capture_output=True, timeout=30)


@pytest.fixture
def terminal(single_url: str) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        opened.append(Terminal("-b", single_url, *arguments))
        return opened[-1]

    assert shutil.which("tmux"), "apt-get install tmux"
    yield start
    for one in opened:
        one.close()


@pytest.mark.slow  # a process that imports textual
def test_in_a_terminal_a_stuck_queue_is_explained_a_failed_job_retried_and_a_queue_paused(
    terminal: Callable[..., Terminal], app: App
) -> None:
    failed = add_failed(app, "mail")
    stuck = app.queue("reports")
    stuck.add("make")
    stuck.pause(by="ann")
    top = terminal()
    top.shows("paused by ann")
    codes = top.screen("-e")
    assert re.search(r"\x1b\[(0;)?7m.*mail", codes), "the selected row is reversed"
    assert not re.search(r"\x1b\[[34][0-8][;m]", codes), "NO_COLOR is set"
    top.press("Down", "w")
    seen = top.shows("$ bulltask")  # the command that mends it
    assert "paused" in seen
    assert "queue resume reports" in seen
    top.press("Escape")
    top.shows("in/min")
    top.press("Up", "Enter")
    assert "host 7 refused" in top.shows(failed)
    top.press("r")
    top.shows(f"Retry job {failed}?")
    assert app.queue("mail").get_failed_count() == 1
    top.press("y")
    top.shows("[failed 0]")
    assert [job.id for job in app.queue("mail").get_waiting()] == [failed]
    top.press("p")
    top.shows("Pause queue mail")
    top.press("y")
    top.shows("is paused")
    assert app.queue("mail").is_paused()
    top.press("C-c")
    seen = top.shows("It has ended: 0")
    assert "Queue mail" not in seen, "the terminal is as before"


# ---- by a pilot ----


class Hands:
    """Hands on the keys of a program in this process, and eyes on its screen."""

    def __init__(self, pilot: Pilot[None], top: Top) -> None:
        self._pilot, self.top = pilot, top

    @property
    def screen(self) -> str:
        """What is seen."""
        return "\n".join(strip.text.rstrip() for strip in self.top.screen._compositor.render_strips())

    async def press(self, *keys: str) -> None:
        """Press keys."""
        await self._pilot.press(*keys)

    async def shows(self, text: str, *, is_gone: bool = False) -> str:
        """Wait until a text is seen, or no longer seen; return the whole screen."""
        until_s = mono_s() + 20
        while (text in self.screen) == is_gone:
            assert mono_s() < until_s, f"{text!r}:\n{self.screen}"
            await asyncio.sleep(0.01)
        return self.screen


@asynccontextmanager
async def opened(app: App, *, read_only: bool = False) -> AsyncIterator[Hands]:
    """Open the program on an app."""
    top = Top(app, click.Context(main, info_name="top", obj={}), OPTIONS, read_only=read_only)
    async with top.run_test(size=(80, 24), notifications=True) as pilot:
        yield Hands(pilot, top)


async def test_every_line_of_a_screen_fits_into_80_columns_and_the_keys_are_shown(app: App) -> None:
    for name in ("mail", "a-queue-whose-name-is-as-long-as-that-of-its-whole-department"):
        add_failed(app, name)
    async with opened(app) as hands:
        seen = await hands.shows("w Why p Pause s Sort / Find 2 Workers ? Help q Quit")
        assert "\na-queue-whose-n" in seen
        assert max(map(len, seen.split("\n"))) <= 80
        assert " workers\n" in seen
        await hands.press("enter")
        seen = await hands.shows("w Why r Retry x Remove p Pause ←→ State Esc Back ? Help q Quit")
        assert "host 7 refused" in seen


async def test_read_only_shows_no_key_that_changes_anything_and_heeds_none(app: App) -> None:
    failed = add_failed(app, "mail")
    async with opened(app, read_only=True) as hands:
        assert "Pause" not in await hands.shows("read-only")
        await hands.press("p", "enter")
        await hands.shows(failed)
        await hands.press("r", "x", "c", "m", "p", "enter")
        seen = await hands.shows("ConnectionError")
        assert not {"Retry", "Remove", "Cancel", "Promote", "Pause"} & set(seen.split())
        await hands.press("r", "x", "p")
        assert "ConnectionError" in hands.screen
    assert app.queue("mail").get_failed_count() == 1
    assert not app.queue("mail").is_paused()


async def test_a_no_changes_nothing_and_a_change_that_redis_refuses_is_said(app: App) -> None:
    failed = add_failed(app, "mail")
    async with opened(app) as hands:
        await hands.shows("mail")
        await hands.press("enter")
        await hands.shows(failed)
        for answer in ("n", "escape", "q"):
            await hands.press("x")
            await hands.shows("This cannot be undone")
            await hands.press("2", "p", answer)
            await hands.shows(failed)
        assert app.queue("mail").get_failed_count() == 1
        await hands.press("r")
        await hands.shows("Retry job")
        app.queue("mail").remove(failed)
        await hands.press("y")
        await hands.shows(f"job {failed} in queue {{mail}}: ")


async def test_a_delayed_job_is_promoted_a_waiting_one_cancelled_and_a_failed_one_removed(app: App) -> None:
    queue = app.queue("mail")
    delayed = queue.add("send", delay=3600).id
    async with opened(app) as hands:
        await hands.shows("mail")
        await hands.press("enter")
        await hands.shows(delayed)
        await hands.shows("m Promote")
        await hands.press("m")
        await hands.shows("Promote job")
        await hands.press("y")
        await hands.shows("waiting 1")
        await hands.press(*["left"] * 2)
        await hands.shows("[waiting 1]")
        await hands.shows("c Cancel")
        await hands.press("c")
        await hands.shows("Cancel job")
        await hands.press("y")
        await hands.shows("failed 1")
        await hands.press("left", "left")
        await hands.shows("[failed 1]")
        await hands.press("x")
        await hands.shows("Remove job")
        await hands.press("y")
        await hands.shows("[failed 0]")
    assert sum(queue.get_job_counts().values()) == 0


async def test_queues_are_sorted_and_found_by_their_names_and_jobs_by_their_data(app: App) -> None:
    for name, number in (("apples", 1), ("bananas", 3), ("cherries", 1)):
        app.queue(name).add_bulk([{"name": "send"}] * number)
    wanted = app.queue("cherries").add("send", {"to": "grace"}).id
    async with opened(app) as hands:
        seen = await hands.shows("cherries")
        assert seen.index("apples") < seen.index("bananas") < seen.index("cherries")
        await hands.press("s")
        seen = await hands.shows("sorted by waiting")
        assert seen.index("bananas") < seen.index("cherries") < seen.index("apples")
        await hands.press("slash", *"ERR", "enter")
        assert "bananas" not in await hands.shows("with 'ERR'")
        await hands.press("escape")
        await hands.shows("bananas")
        await hands.press("slash", *"q2p", "escape")  # these are no keys while one types
        await hands.shows("apples")
        await hands.press("enter")
        await hands.shows("[waiting 2]")
        await hands.press("slash", *"grace", "enter")
        assert wanted in await hands.shows("1 of 2; 2 were read")


async def test_the_selected_row_stays_selected_when_others_come_and_go(app: App) -> None:
    queue = app.queue("mail")
    ids = [queue.add("send").id for _ in range(3)]
    async with opened(app) as hands:
        await hands.shows("mail")
        await hands.press("enter")
        await hands.shows(ids[1])
        await hands.press("down")
        queue.remove(ids[0])
        await hands.press("space")
        await hands.shows(ids[0], is_gone=True)
        await hands.press("x")
        await hands.shows(f"Remove job {ids[1]}")


async def test_hostile_names_and_data_are_escaped(app: App, redis_client: redis.Redis) -> None:
    queue = app.queue("m[red]ail [/]")
    job = queue.add("[b]send", {"x": "\x1b]0;title\x07 [link=x]y[/link]"}, attempts=1)
    acquired = queue.get_next_job("token")
    assert acquired is not None
    acquired.move_to_failed(ConnectionError("\x1b[2J [bold]no[/bold] \N{RIGHT-TO-LEFT OVERRIDE}"))
    redis_client.hset(queue.context.keys.job(job.id), "name", "\x1b[31m[b]send")
    async with opened(app) as hands:
        await hands.shows("m[red]ail [/]")
        await hands.press("enter")
        seen = await hands.shows(job.id)
        assert "\\x1b[31m[b]send" in seen
        assert "\\x1b[2J [bold]no[/bold] \\u202e" in seen
        await hands.press("enter")
        seen = await hands.shows("Traceback")
        assert "[link=x]y[/link]" in seen
        assert "\x1b" not in seen


async def test_workers_and_help_can_be_seen_from_everywhere(app: App) -> None:
    app.queue("mail").add("send")
    async with opened(app) as hands:
        await hands.shows("mail")
        await hands.press("enter", "2")
        await hands.shows("There are no workers.")
        await hands.press("question_mark")
        await hands.shows("Jobs of a queue")
        await hands.press("1")
        await hands.shows("in/min")
        await hands.press("q")
        assert not hands.top.is_running


async def test_why_redis_cannot_be_read_is_shown() -> None:
    with closing(App("tested", "redis://127.0.0.1:1/0")) as unreachable:
        async with opened(unreachable) as hands:
            await hands.shows("This cannot be read: cannot connect to Redis")


def test_without_textual_it_says_what_to_install(single_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "bulltask.cli.top")
    monkeypatch.setitem(sys.modules, "textual", None)
    result = CliRunner().invoke(main, ["top", "-b", single_url])
    assert (result.exit_code, "pip install 'bulltask[top]'" in result.output) == (1, True)


def test_without_a_terminal_it_names_the_command_for_scripts(single_url: str) -> None:
    result = CliRunner().invoke(main, ["top", "-b", single_url])
    assert (result.exit_code, "bulltask queues --json" in result.output) == (1, True)
