"""``TaskDiscoveryMixin``: imports the modules that contain an app's tasks, with Celery's method."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bulltask.registry.discovery import import_related
from bulltask.registry.django import installed_packages, set_up_django

__all__ = ["TaskDiscoveryMixin"]


class TaskDiscoveryMixin:
    """Imports the modules that contain tasks: a base class of ``App``."""

    def __init__(self) -> None:
        self._autodiscover: list[Callable[[], list[str]]] = []

    def autodiscover_tasks(
        self,
        packages: Iterable[str] | Callable[[], Iterable[str]] | None = None,
        related_name: str | None = "tasks",
        force: bool = False,
    ) -> None:
        """Import ``package.tasks`` of each package when a worker starts (Celery's ``autodiscover_tasks``).

        Args:
            packages: Package names, or a function that returns them; default: Django's installed apps.
            related_name: The submodule with tasks; ``None`` imports the packages themselves.
            force: Import them now.
        """
        found = installed_packages if packages is None else packages
        self._autodiscover.append(lambda: import_related(found, related_name))
        if force:
            self._autodiscover[-1]()

    def import_modules(self, names: Iterable[str]) -> list[str]:
        """Set Django up if the environment names its settings; import the given modules, then those to discover.

        Returns:
            The names of the imported modules.
        """
        set_up_django()
        imported = import_related(names, None)
        for discover in self._autodiscover:
            imported += discover()
        return imported
