"""A Valkey server for development and tests, started by bulltask: ``embedded://`` and :class:`EmbeddedServer`.

An app asks this module for its server. What starts one is imported when that is needed, which is never the case in
production.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from bulltask.config.urls import SecretUrl
from bulltask.jobs.errors import look_up

if TYPE_CHECKING:
    from bulltask.embedded.server import EmbeddedServer, ServerBinary, find_binary
    from bulltask.embedded.shared import server_of_tests, start_or_join

__all__ = [
    "EmbeddedServer",
    "ServerBinary",
    "calling_directory",
    "find_binary",
    "import_directory",
    "is_server_of_tests",
    "is_under_test",
    "resolve_url",
    "server_of_tests",
    "start_or_join",
]

_MODULES: Final = {
    **dict.fromkeys(("EmbeddedServer", "ServerBinary", "find_binary"), "bulltask.embedded.server"),
    **dict.fromkeys(("server_of_tests", "start_or_join"), "bulltask.embedded.shared"),
}
"""The module of each name that is not defined here."""


def __getattr__(name: str) -> Any:
    return look_up(__name__, name, _MODULES)


def resolve_url(broker_url: str | SecretUrl, directory: Path | None = None) -> SecretUrl:
    """Return a ``redis://`` URL for ``embedded://[NAME][/DB]``, and start or join its server; return others unchanged.

    ``NAME`` names one of the user's servers (default: that of the project that contains ``directory``, by default the
    current one), and ``DB`` a database (0). In a process that runs tests, the URL of its server is returned.
    """
    broker_url = SecretUrl(broker_url)
    if not broker_url.scheme.startswith("embedded") and not is_under_test(broker_url):
        return broker_url
    from bulltask.embedded.shared import shared_url  # noqa: PLC0415 - not in production

    return shared_url(broker_url, directory)


# A process runs tests while Django's test environment is set up (by ``manage.py test`` or pytest-django), and while
# pytest runs with the plugin's setting ``bulltask_app``. Without the setting, pytest replaces only ``embedded://``,
# because another URL may be that of a server for tests. Neither is imported here.
_PLUGIN: Final = "bulltask.testing.plugin"
_DJANGO: Final = "django.test.utils"


def is_under_test(broker_url: SecretUrl) -> bool:
    """Return whether this process runs tests, which must not use this server."""
    state = getattr(sys.modules.get(_DJANGO), "_TestState", None)  # setup_test_environment() saves the settings in it
    isolated: str | tuple[str, ...] = getattr(sys.modules.get(_PLUGIN), "isolated_urls", ())
    return hasattr(state, "saved_data") or broker_url.scheme.startswith(isolated)


def is_server_of_tests(url: SecretUrl) -> bool:
    """Return whether a URL is that of :func:`server_of_tests`, for which no worker runs."""
    shared: Any = sys.modules.get(f"{__name__}.shared")  # without it, there is no such server
    return shared is not None and bool(shared.is_server_of_tests(url))


_LIBRARIES: Final = tuple(
    f"{directory}{os.sep}"
    for directory in (
        Path(__file__).parent.parent,
        Path(os.__file__).parent,
        Path(sys.prefix, "Scripts" if sys.platform == "win32" else "bin"),
    )
)
"""The directories of bulltask, Python and programs. sysconfig knows them, too, but takes 0.2 MiB in each worker."""

_PACKAGES: Final = frozenset({"site-packages", "dist-packages"})
"""Names of the directories of installed packages. The modules of libraries belong to no project."""


def import_directory(module: Mapping[str, Any]) -> Path | None:
    """Return the directory from which a module is imported: that of a script, or of the top-level package.

    A program that sends jobs and the worker find the same directory, whatever their current directories are. ``None``:
    the module has no file, such as a notebook, or belongs to a library.
    """
    file, package = module.get("__file__"), module.get("__package__") or ""
    if not isinstance(file, str) or file.startswith(_LIBRARIES):
        return None
    path = Path(file).absolute()
    if not path.suffix or not _PACKAGES.isdisjoint(path.parts):  # a program such as ~/.local/bin/bulltask; a package
        return None
    depth = len(package.split(".")) if package else 0
    return path.parents[depth] if path.is_file() and depth < len(path.parents) else None


def calling_directory() -> Path | None:
    """Return :func:`import_directory` of the innermost caller for which there is one."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 # as logging does
    while frame is not None:
        if (found := import_directory(frame.f_globals)) is not None:
            return found
        frame = frame.f_back
    return None
