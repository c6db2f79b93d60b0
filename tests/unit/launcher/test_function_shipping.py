"""What of a function travels, and what is refused because it is nowhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hopsgpu.backends.spark import executor_probe
from hopsgpu.core import rank_requirements
from hopsgpu.errors import ConfigError
from hopsgpu.launcher.function_shipping import needs_of
from hopsgpu.launcher.preflight import modules_to_check
from hopsgpu.packaging.import_scan import ImportedModules
from hopsgpu.packaging.modules import PackedModules
from hopsgpu.packaging.python_env import missing_modules as missing_modules_module
from hopsgpu.packaging.python_env.builder import ensure_built
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.packaging.python_env.kinds import recipe_for
from hopsgpu.packaging.python_env.missing_modules import missing_modules_error
from hopsgpu.storage.lake import LakePath
from tests.travelling import make_wheel


def test_what_does_not_travel_must_be_there() -> None:
    packed = PackedModules(b"", 1, (), frozenset({"pkg"}))
    needed = {"pkg.train", "torch.nn", "torch", "json.decoder", "builtins", "cloudpickle.x"}
    needed |= {"pyspark.sql", "hopsgpu", "__main__", "_pickle"}
    assert needs_of(ImportedModules(frozenset(needed), frozenset({"optional"})), packed) == (
        "torch",
    )


class Application:
    """A `GangApplication` whose executors are known to lack some modules."""

    def __init__(self, *lacks: str, root: str = "hdfs:///user/ann/hopsgpu") -> None:
        self._missing = lacks
        self.root = root

    def missing_modules(self, modules: Collection[str]) -> tuple[str, ...]:
        return tuple(name for name in modules if name in self._missing)


def asked(modules: tuple[str, ...], env: PythonEnv | None, *lacks: str) -> tuple[str, ...]:
    application: Any = Application(*lacks)
    return modules_to_check(modules, env, application)


def test_executors_are_asked_for_what_nothing_else_brings() -> None:
    assert asked(("a", "b"), None) == ("a", "b")
    with pytest.raises(ConfigError, match=" b, .*executors"):
        asked(("a", "b"), None, "b")
    packages = PythonEnv("p", "file:///p", "", 0, modules=("b",))
    assert asked(("a", "b"), packages, "b") == ("a",)
    with pytest.raises(ConfigError, match=" a, .*python_env=p"):
        asked(("a", "b"), packages, "a")


def test_executors_need_the_library_of_the_store_that_has_the_runs() -> None:
    application: Any = Application("s3fs", root="s3://bucket/hopsgpu")
    with pytest.raises(ConfigError, match="s3://bucket/hopsgpu, .* s3fs"):
        modules_to_check((), None, application)
    elsewhere: Any = Application("s3fs")
    assert modules_to_check(("a",), None, elsewhere) == ("a",)


def test_an_environment_with_its_own_python_has_all_or_is_refused() -> None:
    whole = PythonEnv("w", "file:///w", "", 0, interpreter="bin/python3.11", modules=("a",))
    assert asked(("a",), whole, "a") == ()
    with pytest.raises(ConfigError, match=" b, c, .*python_env=w"):
        asked(("a", "b", "c"), whole)
    unknown = PythonEnv("u", "file:///u", "", 0, interpreter="bin/python3.11")
    assert asked(("a",), unknown, "a") == ()


def test_what_an_environment_has_is_known_once_it_is_on_the_lake(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "travelled", "1.0", "")
    root, stop = LakePath(f"file://{tmp_path}/lake"), threading.Event()
    for _ in range(2):  # made, and found
        env = ensure_built(recipe_for([str(wheel)]), root, stop)
        assert env.modules == ("travelled",)
        assert env.missing_modules(["travelled", "other"]) == ("other",)
        assert "modules" not in env.as_fields()
    assert PythonEnv.from_fields(env.as_fields()).missing_modules(["other"]) == ()


def test_the_remedy_names_what_pip_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    distributions = {"yaml": ["PyYAML"]}
    monkeypatch.setattr(
        missing_modules_module.metadata, "packages_distributions", lambda: distributions
    )
    monkeypatch.setattr(missing_modules_module.metadata, "version", lambda name: "6.0")
    assert "python_env=['PyYAML==6.0'], " in str(missing_modules_error(["yaml"], "it"))
    both = str(missing_modules_error(["yaml", "mine"], "it"))
    assert "python_env=[...], " in both
    text = str(missing_modules_error(["yaml"], "it", "env"))
    assert "(PyYAML==6.0) to python_env=env" in text


def test_a_module_that_was_made_without_a_spec_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        rank_requirements.importlib.util.sys.modules, "made", SimpleNamespace(__spec__=None)
    )
    assert rank_requirements.missing_modules(["made", "nowhere_at_all", "json"]) == [
        "nowhere_at_all"
    ]


class Executors:
    """Executors of the default profile, and a Spark that runs a task or does not."""

    def __init__(self, registered: tuple[str, ...], busy: tuple[str, ...] = ()) -> None:
        self.jvm = SimpleNamespace(
            registered_executors=lambda profile: registered,
            busy_executors=lambda profile: busy,
            cancel=self.cancel,
        )
        self.context = None
        self.cancelled: list[str] = []

    def cancel(self, tag: str) -> None:
        self.cancelled.append(tag)


def start_thread(name: str, body: Callable[[], None]) -> None:
    threading.Thread(target=body, name=name, daemon=True).start()


def test_only_an_idle_executor_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_probe, "start_daemon", start_thread)

    def ask(context: object, tag: str, modules: list[str]) -> list[list[str]]:
        return [[name for name in executor_probe.missing_modules_task(modules)(())][0]]

    def probed(
        executors: Executors, ask: Callable[..., list[list[str]]] = ask, seconds: float = 30.0
    ) -> list[str] | None:
        application: Any = executors
        return executor_probe.probe(application, ["json", "nowhere_at_all"], ask, seconds)

    assert probed(Executors(("1", "2"), ("1",))) == ["nowhere_at_all"]
    assert probed(Executors(())) is None
    assert probed(Executors(("1",), ("1",))) is None

    def fail(*_: object) -> list[list[str]]:
        raise RuntimeError("the executor has gone")

    assert probed(Executors(("1",)), fail) is None
    ended = threading.Event()

    def hang(*_: object) -> list[list[str]]:
        ended.wait()
        return [[]]

    late = Executors(("1",))
    assert probed(late, hang, 0.01) is None and len(late.cancelled) == 1
    ended.set()
