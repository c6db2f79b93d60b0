"""Where modules are imported from that are the user's."""

from __future__ import annotations

import contextlib
import importlib
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy
import pytest

from hopsgpu.packaging.module_finder import (
    ImportReader,
    ModuleSource,
    is_in_environment,
    module_sources,
    modules_bound_in_main,
    users_module_sources,
)
from tests import in_ranks

Write = Callable[..., Path]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes files into a directory of `sys.path`, which it gives."""
    src = tmp_path / "src"

    def write(**sources: str) -> Path:
        """`a__b` is a/b.py, and `a__` is a/__init__.py."""
        for name, source in sources.items():
            file = src / (name.replace("__", "/") + ("__init__.py" if name[-1] == "_" else ".py"))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
        importlib.invalidate_caches()
        return src

    src.mkdir()
    monkeypatch.syspath_prepend(src)
    before = set(sys.modules)
    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def named(*names: str) -> dict[str, Path]:
    return {source.name: source.path for source in users_module_sources(names, ImportReader())}


def test_modules_and_packages_of_the_user(project: Write) -> None:
    src = project(u_pkg__="", u_pkg__train="", u_mod="")
    assert named("u_pkg.train", "u_mod") == {"u_pkg": src / "u_pkg", "u_mod.py": src / "u_mod.py"}
    assert "u_pkg" not in sys.modules
    importlib.import_module("u_pkg.train")
    assert module_sources("u_pkg") == (ModuleSource("u_pkg", src / "u_pkg"),)
    assert module_sources("u_pkg")[0].root == src


def test_modules_of_others_are_not_the_users() -> None:
    for name in ("json", "sys", "zlib", "numpy", "pytest", "hopsgpu", "__main__", "not_there"):
        assert module_sources(name) == (), name
    assert is_in_environment(Path(sysconfig.get_paths()["stdlib"], "json"))
    assert is_in_environment(Path("/opt/conda/lib/python3.11/site-packages/x"))
    assert is_in_environment(Path("/usr/lib/python3/dist-packages/x"))
    assert is_in_environment(Path("/"))
    assert not is_in_environment(Path("/home/me/site/packages"))


def test_imports_are_followed_from_module_to_module(project: Write) -> None:
    project(
        u_a__="",
        u_a__train="import u_b\ndef later():\n    from u_c import thing\n",
        u_a__other="import u_unused",
        u_b="from u_a import train\n",
        u_c="import json, numpy, not_there\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import u_types\n",
        u_unused="",
        u_types="",
    )
    assert named("u_a.train").keys() == {"u_a", "u_b.py", "u_c.py"}
    assert named("u_a.other").keys() == {"u_a", "u_unused.py"}


def test_relative_imports_are_followed(project: Write) -> None:
    project(u_a__="from . import train", u_a__train="from .sub import x", u_far="")
    project(u_a__sub__="from ..deep import y", u_a__deep="import u_far")
    assert named("u_a").keys() == {"u_a", "u_far.py"}


def test_sources_are_read_again_where_they_have_changed(project: Write) -> None:
    project(u_a="import u_b", u_b="", u_c="")
    sources = ImportReader()
    assert len(users_module_sources(["u_a"], sources)) == 2
    project(u_a="import u_b, u_c")
    assert len(users_module_sources(["u_a"], sources)) == 3


def test_a_namespace_package_has_several_portions(
    project: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = project(u_ns__one="")
    other, installed = tmp_path / "other", tmp_path / "site-packages"
    for root in (other, installed):
        (root / "u_ns").mkdir(parents=True)
        (root / "u_ns" / "two.py").touch()
        monkeypatch.syspath_prepend(root)
    assert {source.path for source in module_sources("u_ns")} == {src / "u_ns", other / "u_ns"}
    importlib.import_module("u_ns.one")
    assert {source.path for source in module_sources("u_ns")} == {src / "u_ns", other / "u_ns"}


def test_a_zip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "libs.zip"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("u_zip/__init__.py", "import u_single")
        archive.writestr("u_single.py", "")
        archive.writestr("lib/u_below.py", "")
    monkeypatch.syspath_prepend(file)
    monkeypatch.syspath_prepend(file / "lib")
    sources = users_module_sources(["u_zip", "u_below"], ImportReader())
    assert set(sources) == {
        ModuleSource("u_zip", file, "u_zip"),
        ModuleSource("u_single.py", file, "u_single.py"),
        ModuleSource("u_below.py", file, "lib/u_below.py"),
    }
    assert {source.root for source in sources} == {file, None}


class Finder:
    """As an editable installation's (setuptools), which has no directory on `sys.path`."""

    def __init__(self, **places: Path) -> None:
        self.places = places

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        place = self.places.get(name)
        if place is None:
            return None
        return spec_from_file_location(name, place / "__init__.py" if place.is_dir() else place)


def test_an_editable_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, project: Write
) -> None:
    (tmp_path / "lib").mkdir()
    for name in ("lib/__init__.py", "module.py"):
        (tmp_path / name).touch()
    finder = Finder(u_edited=tmp_path / "lib", module=tmp_path / "module.py")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    (source,) = module_sources("u_edited")
    assert (source, source.root) == (ModuleSource("u_edited", tmp_path / "lib"), None)
    assert module_sources("module")[0].root == tmp_path
    importlib.import_module("u_edited")
    assert module_sources("u_edited") == (source,)


def test_modules_that_were_loaded_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, project: Write
) -> None:
    """As pytest's --import-mode=importlib loads tests, and a script a file by its path."""
    project(u_own="")
    file = tmp_path / "file_v2.py"
    file.write_text("import u_own")
    for name in ("u_hand", "u_none.unit.test_x"):
        spec = spec_from_file_location(name, file)
        assert spec is not None
        monkeypatch.setitem(sys.modules, name, module_from_spec(spec))
    monkeypatch.setitem(sys.modules, "u_none", ModuleType("u_none"))
    assert named("u_hand").keys() == {"u_hand.py", "u_own.py"}
    assert named("u_hand")["u_hand.py"] == file
    assert named("u_none.unit.test_x").keys() == {"u_none/unit/test_x.py", "u_own.py"}


def test_modules_that_are_odd(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"{name} was asked for")

    lazy = Lazy("u_lazy")
    for attribute in ("__spec__", "__file__", "__path__"):
        with contextlib.suppress(AttributeError):
            delattr(lazy, attribute)
    monkeypatch.setitem(sys.modules, "u_lazy", lazy)
    monkeypatch.setitem(sys.modules, "u_object", object())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "u_forbidden", None)  # type: ignore[arg-type]
    assert named("u_lazy.x", "u_object", "u_forbidden.y", "", "builtins") == {}


def test_modules_that_the_script_has_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Proxy:
        """As werkzeug's, which raises when nothing stands behind it."""

        @property
        def __class__(self) -> type:  # type: ignore[override]
            raise RuntimeError("nobody is there")

    main = ModuleType("__main__")
    vars(main).update(np=numpy, f=in_ranks.where, o=Path(), K=ModuleSource, proxy=Proxy(), one=1)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert {"numpy", "tests.in_ranks", "pathlib", "hopsgpu.packaging.module_finder"} <= set(
        modules_bound_in_main()
    )


def test_a_module_of_the_users_with_the_name_of_a_standard_one(project: Write) -> None:
    src = project(this="")
    assert module_sources("this") == (), "not imported, so the standard one is meant"
    importlib.import_module("this")
    assert module_sources("this") == (ModuleSource("this.py", src / "this.py"),)
