"""Configuration of Sphinx, which builds the site from the Markdown files (``make docs``).

The source directory is the repository, so that relative links work both on GitHub and on the site. A link to a file
that is not a page, such as a module, downloads that file. Warnings, including dead links and anchors, fail the build.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

project = "bulltask"
extensions = ["myst_parser"]
include_patterns = ["*.md", "docs/**.md", "examples/*/README.md", "benchmarks/*.md"]
exclude_patterns = [".*", "build", "bulltask", "tests", "**/node_modules", "history-demo"]
root_doc = "docs/index"
html_theme = "furo"
html_title = "bulltask"
html_copy_source = False
highlight_language = "text"
myst_heading_anchors = 4
suppress_warnings = [
    "toc.not_included"
]  # for the examples' READMEs; tests/unit/test_docs.py checks that the index links all pages

_LINK = re.compile(r"^(?:\*|\d+\.) \[.*?\]\((\S+?\.md)\)", re.MULTILINE)


def setup(app: Sphinx) -> None:
    """Connect the handlers that create the navigation."""
    app.connect("source-read", _add_contents)
    app.connect("build-finished", _add_entry)


def _add_contents(_app: Sphinx, page: str, source: list[str]) -> None:
    # The links in an index page are also the site's navigation.
    if page not in (root_doc, "docs/adr/README"):
        return
    for section in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:] or [f"\n{source[0]}"]:
        caption, _, text = section.partition("\n")
        lines = [":hidden:", *([f":caption: {caption}"] if caption else []), "", *_LINK.findall(text)]
        source[0] += "\n\n```{toctree}\n" + "\n".join(lines) + "\n```\n"


def _add_entry(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        Path(app.outdir, "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n')
