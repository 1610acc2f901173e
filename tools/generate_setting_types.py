"""Writes bulltask/config/setting_types.py: the types of all settings, for type checkers and editors.

``.venv/bin/python tools/generate_setting_types.py``; run it after changing a setting.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bulltask.config.celery_settings import CELERY_SETTINGS
from bulltask.config.config import SETTINGS

FILE: Final = Path(__file__).parent.parent / "bulltask/config/setting_types.py"

TYPES: Final = {
    "accepted_serializers": "Iterable[str]",
    "autoscale": "str | Sequence[int]",
    "choice": "str",
    "compression": "str",
    "cores": "int | str",
    "credential_provider": "object",
    "duration": "Duration",
    "entries": "Mapping[str, Any] | None",
    "flag": "bool",
    "integer": "int",
    "jitter_fraction": "bool | float",
    "key_prefix": "str",
    "keys_by_queue": "Any",
    "max_reconnects": "int | None",
    "memory": "int | str",
    "parse_annotations": "Any",
    "parse_names": "str | Iterable[str]",
    "plain_text": "str",
    "buckets": "str | Iterable[float]",
    "queue_name": "str",
    "queue_names": "Any",
    "rate_limits": "Any",
    "retention": "Any",
    "routes": "Any",
    "serializer": "str",
    "signing_keys": "Any",
    "spark_settings": "str | Mapping[str, Any]",
    "task_rate": "str | float",
    "time_zone": "str | tzinfo | None",
    "url": "str | SecretUrl",
    "worker_name": "str | None",
    "worker_pool": "str",
}
"""The type of the values that a parser accepts in Python code; strings in the environment are parsed, too."""

HEAD: Final = '''"""The types of all settings, for type checkers and editors; by tools/generate_setting_types.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import tzinfo
from typing import Any, TypedDict

from bulltask.config.urls import SecretUrl
from bulltask.jobs.clock import Duration

__all__ = ["AppOptions", "SettingOptions", "SettingTypes"]
'''

CONSTRUCTOR: Final = {
    "backend": "Any",
    "broker": "str | SecretUrl | None",
    "changes": "Mapping[str, Any] | None",
    "config_source": "object",
    "namespace": "str | None",
    "set_as_current": "bool",
    "task_cls": "Any",
}
"""The other arguments of ``App``, which are Celery's."""


def type_of(parse: Callable[..., Any]) -> str:
    """Return the type of the values that a parser accepts."""
    name = parse.__qualname__.partition(".")[0]
    if name == "optional":
        [inner] = [cell.cell_contents for cell in parse.__closure__ or () if callable(cell.cell_contents)]
        return f"{type_of(inner)} | None".replace("Any | None", "Any").replace("object | None", "object")
    return TYPES[name]


def text() -> str:
    """Return the content of the file."""
    types = {setting.name: type_of(setting.parse) for setting in SETTINGS.values()}
    celery = dict.fromkeys(sorted(CELERY_SETTINGS.keys() - types.keys()), "Any")
    settings = "".join(f"    {name}: {kind}\n" for name, kind in {**types, **celery}.items())
    url, _, rest = settings.partition("\n")  # a parameter of ``App``
    others = "".join(f"    {name}: {kind}\n" for name, kind in CONSTRUCTOR.items())
    classes = {
        "SettingTypes": f'    """The settings of bulltask, then those that only Celery has."""\n\n{settings}',
        "AppSettings(TypedDict, total=False)": f'    """Settings as arguments of ``App``."""\n\n{rest}',
        "AppOptions(AppSettings, total=False)": f'    """The keyword arguments of ``App``."""\n\n{others}',
        "SettingOptions(AppSettings, total=False)": f'    """Settings as keyword arguments."""\n\n{url}\n',
    }
    return HEAD + "".join(f"\n\nclass {name}:\n{body}" for name, body in classes.items())


if __name__ == "__main__":
    FILE.write_text(text())
