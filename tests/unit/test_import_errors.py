"""Errors in the user's modules are reported as one message with file and line, without bulltask's frames."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from bulltask.cli.main import main

APP = "from bulltask import App\napp = App('shop', 'redis://127.0.0.1:1')\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory that is the working directory and on ``sys.path``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(project: Path, **modules: str) -> None:
    for name, text in modules.items():
        path = project.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def output(*args: str) -> str:
    result = CliRunner().invoke(main, ["worker", *args])
    assert result.exit_code in {1, 2}
    assert "Traceback" not in result.output
    assert "bulltask/" not in result.output
    return result.output


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import json\ndef broken(:\n", "SyntaxError: invalid syntax\n  shop.py:2: def broken(:\n"),
        (
            "import no_such_library",
            "ModuleNotFoundError: No module named 'no_such_library'\n  shop.py:1: import no_such_library\n",
        ),
        ("from json import nothing", "ImportError: cannot import name 'nothing' from 'json'"),
        ("\nx = unknown", "NameError: name 'unknown' is not defined\n  shop.py:2: x = unknown\n"),
        (
            f"{APP}@app.task(retrys=3)\ndef f(): ...",
            "TypeError: unknown task option 'retrys'",
        ),
        (f"{APP}@app.task(max_retries=-1)\ndef f(): ...", "shop.py:3: @app.task(max_retries=-1)\n"),
        ("from bulltask import App\nApp('shop', lock_durration=3)", "did you mean 'lock_duration'?\n  shop.py:2: App("),
        ("def fail():\n    raise ValueError('no')\nfail()", "shop.py:3: fail()\n  shop.py:2: raise ValueError('no')\n"),
        (
            "try:\n    {}['URL']\nexcept KeyError as exc:\n    raise RuntimeError('set URL') from exc",
            "RuntimeError: set URL\n  caused by KeyError: 'URL'\n  shop.py:4: raise",
        ),
    ],
)
def test_an_error_in_the_apps_module_is_reported_in_one_message_with_file_and_line(
    project: Path, code: str, message: str
) -> None:
    write(project, shop=code)
    text = output("-A", "shop")
    assert text.startswith("Error: cannot import the app 'shop' (-A): ")
    assert message in text


def test_the_lines_that_led_to_the_error_are_listed_outermost_first(project: Path) -> None:
    write(project, shop__tasks="import shop.models", shop__models="1 / 0", shop__app=APP)
    text = output("-A", "shop", "-I", "shop.tasks")
    assert text == (
        "Error: cannot import the modules with tasks (-I, include, imports, autodiscover_tasks): "
        "ZeroDivisionError: division by zero\n  shop/tasks.py:1: import shop.models\n  shop/models.py:1: 1 / 0\n"
    )


def test_a_long_chain_of_imports_is_shortened(project: Path) -> None:
    modules = {f"m{number}": f"import m{number + 1}" for number in range(20)}
    write(project, **modules, m20="1 / 0")
    lines = output("-A", "m0").splitlines()
    assert len(lines) == 10
    assert lines[5] == "  … 13 more"
    assert lines[-1] == "  m20.py:1: 1 / 0"


def test_a_module_to_include_that_does_not_exist_is_reported_in_one_line(project: Path) -> None:
    write(project, shop=APP)
    assert output("-A", "shop", "-I", "nosuch") == (
        "Error: cannot import the modules with tasks (-I, include, imports, autodiscover_tasks): "
        "ModuleNotFoundError: No module named 'nosuch'\n"
    )


def test_a_password_in_the_users_line_is_masked(project: Path) -> None:
    write(project, shop="from bulltask import App\napp = App('shop', 'redis://:s3cret@host/0', nothing=1)")
    text = output("-A", "shop")
    assert "shop.py:2: app = App('shop', 'redis://***@host/0'" in text
    assert "s3cret" not in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-Q", "a:b"), "queue name 'a:b' contains a ':'"),
        (("-b", "redis://host/shop"), "the database in broker_url must be a number"),
        (("-A", "nosuch"), "no bulltask App found for 'nosuch'"),
    ],
)
def test_a_wrong_option_is_reported_in_one_message(project: Path, args: tuple[str, str], message: str) -> None:
    write(project, shop=APP)
    assert message in output("-A", "shop", *args)
