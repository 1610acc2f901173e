"""The site that ``make docs`` builds: no warning, no dead link, every public name, and a short way to each answer."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest
from sphinx.util.inventory import InventoryFile

from tools.public_surface import PUBLIC

ROOT = Path(__file__).parent.parent.parent
HOME = "docs/index.html"

build = pytest.mark.extended  # one build of the site, for all of these tests; ``make docs`` fails on warnings, too


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of the built site, and what Sphinx has printed."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-n", "-d", str(site / ".doctrees"), "-c", "docs", ".", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return site, done.stdout + done.stderr


@pytest.fixture(scope="module")
def pages(built: tuple[Path, str]) -> dict[str, str]:
    """The HTML of each page, by its path."""
    site, _ = built
    return {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}


def links(page: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the anchor of each link to the site itself."""
    for target in re.findall(r'<(?:a|link)\b[^>]*?\bhref="([^"]*)"', text):
        path, _, anchor = unquote(unescape(target)).partition("#")
        if not re.match(r"[a-z]+:|//", path):
            joined = (Path("/", page).parent / path).resolve().relative_to("/").as_posix() if path else page
            yield joined.partition("?")[0], anchor


@build
def test_the_site_builds_without_a_warning(built: tuple[Path, str]) -> None:
    assert built[1] == ""


@build
def test_every_link_of_the_site_leads_to_a_file_and_an_anchor(built: tuple[Path, str], pages: dict[str, str]) -> None:
    site, _ = built
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}
    checked = {(page, *link) for page, text in pages.items() for link in links(page, text)}
    dead = [
        (page, path, anchor)
        for page, path, anchor in checked
        if not (site / path.split("?")[0]).is_file() or (anchor and path in anchors and anchor not in anchors[path])
    ]
    assert len(checked) > 1000
    assert sorted(dead) == []


@pytest.fixture(scope="module")
def described(built: tuple[Path, str]) -> set[str]:
    """The names that the reference describes."""
    with (built[0] / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, path: path)
    return {name for kind, names in inventory.items() if kind.startswith("py:") for name in names}


@build
@pytest.mark.parametrize("module", PUBLIC)
def test_the_reference_describes_every_public_name(module: str, described: set[str], pages: dict[str, str]) -> None:
    page = pages[f"docs/reference/api/{module}.html"]
    names = getattr(importlib.import_module(module), "__all__", [])
    missing = [
        name
        for name in names
        if f"{module}.{name}" not in described and f">{name}</span></code>: the same as" not in page
    ]
    assert missing == []


def methods(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        if base.__module__.startswith("bulltask."):
            for name, value in vars(base).items():
                is_method = isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value)
                if is_method and not name.startswith("_"):
                    yield name


@build
def test_the_reference_describes_every_method_of_a_public_class(described: set[str]) -> None:
    values = [(module, name) for module in PUBLIC for name in getattr(importlib.import_module(module), "__all__", [])]
    classes = [(path, value) for path in values if inspect.isclass(value := getattr(sys.modules[path[0]], path[1]))]
    assert len(classes) > 100
    by_class: dict[type, list[str]] = {}
    for (module, name), value in classes:
        by_class.setdefault(value, []).append(f"{module}.{name}")
    missing = [
        f"{paths[0]}.{method}"
        for value, paths in by_class.items()
        for method in methods(value)
        if not any(f"{path}.{method}" in described for base in value.__mro__ for path in by_class.get(base, []))
    ]
    assert missing == []


@build
def test_names_in_the_reference_link_to_their_source(pages: dict[str, str]) -> None:
    app = pages["docs/reference/api/bulltask.App.html"]
    source, anchor = re.findall(r'href="\.\./\.\./\.\./(_modules/bulltask/app\.html)#([\w.]+)"', app)[0]
    assert f'id="{anchor}"' in pages[source]


@pytest.fixture(scope="module")
def near(pages: dict[str, str]) -> set[tuple[str, str]]:
    """What one or two clicks lead to from the home page."""
    assert f"url={HOME}" in pages["index.html"]
    first = set(links(HOME, pages[HOME]))
    return first | {link for path in {path for path, _ in first} & pages.keys() for link in links(path, pages[path])}


@build
@pytest.mark.parametrize(
    ("page", "anchor"),
    [
        ("docs/tutorial/first-steps.html", "install-bulltask"),
        ("docs/tutorial/first-steps.html", "write-tasks"),
        ("docs/how-to/my-job-does-not-run.html", ""),
        ("docs/how-to/deploy.html", ""),
        ("docs/how-to/coming-from-celery.html", ""),
        ("docs/reference/api/bulltask.App.html", "bulltask.App"),
    ],
)
def test_two_clicks_lead_from_the_home_page_to(
    page: str, anchor: str, near: set[tuple[str, str]], pages: dict[str, str]
) -> None:
    assert (page, anchor) in near
    assert not anchor or f'id="{anchor}"' in pages[page]


@build
def test_the_sidebar_has_the_groups_of_the_home_page(pages: dict[str, str]) -> None:
    groups = re.findall(r"^## (.*)$", (ROOT / "docs/index.md").read_text(), re.MULTILINE)
    sidebar = pages["docs/how-to/deploy.html"]
    assert [unescape(caption) for caption in re.findall(r'class="caption-text">([^<]*)<', sidebar)] == groups


@build
def test_pages_have_a_search_copy_buttons_and_a_preview(pages: dict[str, str]) -> None:
    page = pages["docs/tutorial/first-steps.html"]
    assert "copybutton.js" in page
    assert 'role="search"' in page
    assert '<meta property="og:title" content="First steps"' in page
    assert re.search(r'<meta property="og:description" content="In this tutorial[^"]+"', page)


def test_the_description_on_pypi_has_no_relative_link() -> None:
    command = [sys.executable, "-m", "hatchling", "metadata"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    metadata = json.loads(done.stdout)
    text, site = metadata["readme"]["text"], metadata["urls"]["Documentation"]
    assert re.findall(r"\]\((?!https://)[^)]*\)", text) == []
    assert f"]({site}/docs/tutorial/first-steps.html)" in text
    assert f"]({site}/docs/how-to/observability.html#metrics)" in text


def test_only_pyproject_has_the_addresses_of_the_site_and_the_repository() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    urls = re.findall(r'^(?:Documentation|Source) = "https://([^/"]+)', text, re.MULTILINE)
    assert len(urls) == 2
    command = ["git", "grep", "-lE", "|".join(map(re.escape, urls)), "--", ":!tests/unit/test_site.py"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert files.stdout.split() == ["pyproject.toml"]
