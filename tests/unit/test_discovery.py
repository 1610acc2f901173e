from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bulltask import App
from bulltask.errors import AppNotFoundError, ConfigError
from bulltask.registry.tasks import add_to_import_path, find_app, import_related

APP = "from bulltask import App\n"

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write modules into the working directory, which is on ``sys.path``: ``write(shop="…", shop__tasks="…")``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write_modules(**modules: str) -> None:
        for name, text in modules.items():
            path = tmp_path.joinpath(*name.split("__")).with_suffix(".py")
            if any(other.startswith(f"{name}__") for other in modules):
                path = path.with_suffix("") / "__init__.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    yield write_modules
    for name in set(sys.modules) - before:
        del sys.modules[name]


def app_name(spec: str) -> str:
    return find_app(spec, App).name


def error_message(spec: str) -> str:
    with pytest.raises(AppNotFoundError) as caught:
        find_app(spec, App)
    return str(caught.value)


# --- every form of -A -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["app", "bulltask", "application", "celery", "whatever"])
def test_the_only_app_of_a_module_may_have_any_name(write: Write, name: str) -> None:
    write(shop=f"{APP}{name} = App('wanted')")
    assert app_name("shop") == "wanted"


@pytest.mark.parametrize("name", ["app", "bulltask", "application"])
def test_an_app_with_a_conventional_name_takes_precedence(write: Write, name: str) -> None:
    write(shop=f"{APP}aaa = App('other')\n{name} = App('wanted')\nzzz = App('other')")
    assert app_name("shop") == "wanted"


def test_one_app_under_two_names_is_one_app(write: Write) -> None:
    write(shop=f"{APP}first = second = App('wanted')")
    assert app_name("shop") == "wanted"


@pytest.mark.parametrize(
    "spec", ["shop:main", "shop:make()", "shop:make", "shop:Holder.main", "shop:Holder.make()", "shop.main"]
)
def test_an_app_is_found_by_name_factory_or_attribute(write: Write, spec: str) -> None:
    write(
        shop=f"{APP}main = App('wanted')\nother = App('other')\ndef make(): return main\n"
        "class Holder:\n    main = main\n    make = staticmethod(make)\n"
    )
    assert app_name(spec) == "wanted"


@pytest.mark.parametrize("sub", ["app", "bulltask", "celery", "tasks", "main", "worker"])
def test_a_package_without_an_app_is_searched_for_usual_submodules(write: Write, sub: str) -> None:
    write(shop="", **{f"shop__{sub}": f"{APP}app = App('wanted')"})
    assert app_name("shop") == "wanted"


def test_a_submodule_can_be_named_with_dots_or_a_colon(write: Write) -> None:
    write(shop="", shop__jobs=f"{APP}queue = App('wanted')")
    assert app_name("shop.jobs") == app_name("shop.jobs:queue") == app_name("shop.jobs.queue") == "wanted"


def test_a_namespace_package_is_searched_for_usual_submodules(write: Write) -> None:
    write(shop__tasks=f"{APP}app = App('wanted')")
    assert app_name("shop") == "wanted"


# --- error messages ---------------------------------------------------------------------------------------------------


def test_a_module_that_does_not_exist_is_reported_with_the_directory(write: Write, tmp_path: Path) -> None:
    text = error_message("shop")
    assert text.startswith(f"no bulltask App found for 'shop'; tried, from {tmp_path}:")
    assert "\n  - shop: cannot be imported (No module named 'shop')" in text


def test_the_error_lists_every_submodule_that_was_tried(write: Write) -> None:
    write(shop="", shop__tasks="x = 1")
    lines = error_message("shop").splitlines()[1:]
    assert lines == [
        "  - shop: has no App",
        "  - shop.app: does not exist",
        "  - shop.bulltask: does not exist",
        "  - shop.celery: does not exist",
        "  - shop.tasks: has no App",
        "  - shop.main: does not exist",
        "  - shop.worker: does not exist",
    ]


def test_several_apps_raise_an_error_that_lists_them(write: Write) -> None:
    write(shop=f"{APP}one = App('1')\ntwo = App('2')", shop__tasks="from shop import one")
    assert error_message("shop") == "shop has several apps (one, two): choose one with -A shop:NAME"


def test_an_unknown_name_raises_an_error_that_lists_the_apps(write: Write) -> None:
    write(shop=f"{APP}one = App('1')\ntwo = App('2')", empty="")
    assert "shop: has no 'three'; it has the apps one, two" in error_message("shop:three")
    assert "empty: has no 'app'; it has no App" in error_message("empty:app")
    assert "shop: has no 'py'; it has the apps one, two" in error_message("shop.py")


def test_a_module_that_has_only_a_factory_is_reported_with_what_works(write: Write) -> None:
    write(shop="from os import makedirs\ndef helper(): ...\ndef create_app(): ...\ndef make_celery(): ...")
    hint = "if this is a factory of one, use -A shop:create_app or -A shop:make_celery"
    assert f"shop: has no App; {hint}" in error_message("shop")
    assert f"shop: has no 'app'; it has no App; {hint}" in error_message("shop:app")


@pytest.mark.parametrize(
    ("spec", "needed"),
    [("shop:create_app", "mode, debug"), ("shop:create_app()", "mode, debug"), ("shop:create_app('x')", "those in")],
)
def test_a_factory_with_arguments_is_reported_with_what_works(write: Write, spec: str, needed: str) -> None:
    write(shop="def create_app(mode, size=1, *args, debug, **options): ...")
    text = error_message(spec)
    assert f"needs arguments ({needed}" in text
    assert "with a line such as app = create_app(…), and name that module" in text


def test_a_module_of_the_standard_library_is_reported_with_the_file_that_it_hides(write: Write) -> None:
    write(queue=APP)
    assert re.search(r"- queue \(/.*/queue.py, which hides queue.py: rename your module\):", error_message("queue"))
    assert re.search(r"- json \(/.*/json/__init__.py\): has no App", error_message("json"))


def test_an_object_that_is_not_an_app_raises_an_error_with_its_type(write: Write) -> None:
    write(shop="app = 5\ndef make(): return 'text'")
    assert "shop:app is int, not an App" in error_message("shop:app")
    assert "shop:make is str, not an App" in error_message("shop:make")


@pytest.mark.parametrize("spec", [":app", "", "..shop", "shop tasks", "shop/tasks.py"])
def test_an_invalid_module_name_raises_an_error(write: Write, spec: str) -> None:
    assert "is not a module name" in error_message(spec)


# --- errors in the user's code ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["shop", "shop:app", "shop.app"])
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import does_not_exist_xyz", ModuleNotFoundError),
        ("import shop.does_not_exist", ModuleNotFoundError),
        ("from os import nothing_of_that_name", ImportError),
        ("1 / 0", ZeroDivisionError),
        ("def", SyntaxError),
    ],
)
def test_an_error_in_the_users_module_is_raised_unchanged(
    write: Write, spec: str, code: str, error: type[Exception]
) -> None:
    write(shop=code)
    with pytest.raises(error) as raised:
        find_app(spec, App)
    assert not isinstance(raised.value, AppNotFoundError)


def test_an_error_in_a_submodule_is_raised_unchanged(write: Write) -> None:
    write(shop="", shop__tasks="import does_not_exist_xyz")
    with pytest.raises(ModuleNotFoundError, match="does_not_exist_xyz"):
        find_app("shop", App)


def test_an_error_in_a_factory_is_raised_unchanged(write: Write) -> None:
    write(shop="def make(): raise KeyError('from the factory')")
    with pytest.raises(KeyError, match="from the factory"):
        find_app("shop:make", App)


# --- other modules ----------------------------------------------------------------------------------------------------


def test_the_current_directory_is_importable_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    add_to_import_path()
    assert sys.path[0] == str(tmp_path.resolve())
    before = list(sys.path)
    add_to_import_path()
    assert sys.path == before, "the directory is added once"
    (tmp_path / "sub").mkdir()
    add_to_import_path("sub")
    assert sys.path[0] == str(tmp_path.resolve() / "sub")


def test_related_modules_are_imported_if_they_exist(write: Write) -> None:
    write(shop="", shop__tasks="x = 1", mail="")
    assert import_related(["shop", "mail"], "tasks") == ["shop.tasks"]
    assert "shop.tasks" in sys.modules
    assert import_related(lambda: ["mail"], None) == ["mail"]


def test_an_error_in_a_related_module_is_raised_unchanged(write: Write) -> None:
    write(shop="", shop__tasks="import does_not_exist_xyz")
    with pytest.raises(ModuleNotFoundError, match="does_not_exist_xyz"):
        import_related(["shop"], "tasks")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_related(["no_such_module"], "tasks")


def test_load_tasks_imports_included_and_discovered_modules(write: Write) -> None:
    write(shop="", shop__tasks="", mail__jobs="", stock="", more="")
    app = App("a", include="stock, more")
    app.autodiscover_tasks(["shop"])
    app.autodiscover_tasks(lambda: ["mail"], related_name="jobs")
    assert app._load_tasks() == ["stock", "more", "shop.tasks", "mail.jobs"]


def test_a_package_may_be_named_by_the_class_of_its_django_app(write: Write) -> None:
    write(shop__apps="class ShopConfig:\n    name = 'shop'", shop="", shop__tasks="x = 1")
    assert import_related(["shop.apps.ShopConfig"], "tasks") == ["shop.tasks"]
    for name in ("shop.apps.NoSuchConfig", "shop.nothing", "nothing.apps"):
        with pytest.raises(ModuleNotFoundError, match=name.split(".")[0]):
            import_related([name], "tasks")


def test_tasks_can_be_discovered_immediately(write: Write) -> None:
    write(shop="", shop__tasks="")
    App("a").autodiscover_tasks(["shop"], force=True)
    assert "shop.tasks" in sys.modules


def test_discovery_without_packages_needs_django(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write(shop="")
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE", raising=False)
    app = App("a")
    app.autodiscover_tasks()
    with pytest.raises(ConfigError, match=r"autodiscover_tasks\(\) without packages needs Django"):
        app._load_tasks()


def test_settings_of_the_app_may_change_while_tasks_are_imported(write: Write) -> None:
    write(shop=f"{APP}app = App('wanted', include=['late'])", late="from shop import app\napp.conf.max_crashes = 9")
    app = find_app("shop", App)
    app._load_tasks()
    assert app._config.max_crashes == 9
