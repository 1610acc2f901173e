"""``bulltask.celery``: bulltask under the name ``celery``, for a project whose modules import Celery.

If the module of your app contains ``from bulltask.celery import Celery`` instead of ``from celery import Celery``, the
other modules need no change: ``import celery`` imports bulltask in this process, even if Celery is installed. ``from
celery import shared_task``, ``from celery.utils.log import get_task_logger`` and so on import bulltask's names, and
``celery.signals`` is ``bulltask.signals``.

Import ``bulltask.celery`` before any module that imports ``celery``; otherwise it raises
:class:`bulltask.ConfigError`. It has all public names of bulltask. Importing anything else from ``celery`` raises
``ModuleNotFoundError``.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Final

import bulltask
from bulltask import exceptions, schedules, signals, states
from bulltask.jobs.errors import ConfigError

__all__ = ["replace_celery"]

_SAME_MODULES: Final = (exceptions, schedules, signals, states)
"""Modules that exist in Celery and in bulltask."""

_OTHER_MODULES: Final = ("app", "app.base", "app.task", "canvas", "result", "utils", "utils.log")
"""Celery's modules whose names are public names of bulltask."""

_GUIDE: Final = "see docs/how-to/coming-from-celery.md"


class _MissingNames(MetaPathFinder):
    """Raises an error for a name that bulltask does not have.

    Python also searches for a module when it executes ``from celery import name`` and ``celery`` has no such attribute.
    """

    def find_spec(self, fullname: str, *_: object) -> None:
        name = fullname.removeprefix("bulltask.")
        if name.startswith("celery."):
            raise ModuleNotFoundError(f"bulltask has no equivalent of {name}: {_GUIDE}", name=name)


def replace_celery(replacement: ModuleType) -> None:
    """Make ``bulltask.celery`` the module ``celery`` of this process.

    Raises:
        ConfigError: Celery has already been imported.
    """
    own = replacement.__name__
    found = sys.modules.get("celery")
    if found is not None and found.__name__ != own:
        raise ConfigError(
            f"bulltask cannot replace Celery, which has already been imported ({found.__file__}): uninstall Celery, or "
            f"import {own} before any module that imports celery; {_GUIDE}"
        )
    replacement.__path__ = []  # only a module with a path can have submodules
    vars(replacement).update(__all__=bulltask.__all__, __getattr__=vars(bulltask)["__getattr__"])
    for module in _SAME_MODULES:
        setattr(replacement, module.__name__.rpartition(".")[2], module)
    modules = {"celery": replacement}
    modules |= {module.__name__.replace("bulltask", "celery", 1): module for module in _SAME_MODULES}
    for name in _OTHER_MODULES:
        module = module_from_spec(ModuleSpec(f"{own}.{name}", None, is_package=True))
        vars(module)["__getattr__"] = vars(bulltask)["__getattr__"]
        parent, _, attribute = f"celery.{name}".rpartition(".")
        setattr(modules[parent], attribute, module)
        modules |= {f"celery.{name}": module, module.__name__: module}
    sys.modules.update(modules)
    sys.meta_path.insert(0, _MissingNames())
