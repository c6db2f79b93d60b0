"""Configurations of OmegaConf and Hydra in ranks, which have none of the script's resolvers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hopsgpu.packaging.pickling import pickle_call
from tests.bounds import HANG_SECONDS
from tests.unit.script_ranks import printed, run

CALLS: list[str] = []


def _count(word: str) -> str:
    CALLS.append(word)
    return f"{word}-{CALLS.count(word)}"


@pytest.fixture(autouse=True)
def resolvers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    CALLS.clear()
    monkeypatch.setenv("OWN_VARIABLE", "the driver's")
    monkeypatch.delenv("RANK", raising=False)
    OmegaConf.register_new_resolver("cached", _count, use_cache=True)
    OmegaConf.register_new_resolver("own.counted", _count)
    OmegaConf.register_new_resolver("double", lambda number: 2 * number)
    OmegaConf.register_new_resolver("table", lambda: {"p": 1, "q": ["${t}", 2]})
    OmegaConf.register_new_resolver("text", lambda: r"\${cached:x} ${t} ???")
    OmegaConf.register_new_resolver("path", lambda: Path("/a"))
    yield
    OmegaConf.clear_resolvers()


def plain(config: Any) -> Any:
    """What a rank reads, key by key; an error by its name."""
    if not OmegaConf.is_config(config):
        return config
    keys = range(len(config)) if isinstance(config, ListConfig) else config
    read: dict[Any, Any] = {}
    for key in keys:
        try:
            read[key] = plain(config[key])
        except OmegaConfBaseException as error:
            read[key] = type(error).__name__
    return read


def in_rank(config: Any) -> Any:
    return run(pickle_call(plain, (config,), {}))


def test_resolvers_are_called_by_the_driver_once() -> None:
    config = OmegaConf.create(
        {
            "t": "${cached:a}",
            "same": "${cached:a}",
            "refers": "out/${t}",
            "within": "x ${own.counted:b} ${double:4} y",
            "number": "${double:4}",
            "nested": {"deep": ["${cached:c}", {"up": "${t}"}], "relative": "${..t}"},
            "arguments": "${double:${number}}",
        }
    )
    expected = {
        "t": "a-1",
        "same": "a-1",
        "refers": "out/a-1",
        "within": "x b-1 8 y",
        "number": 8,
        "nested": {"deep": {0: "c-1", 1: {"up": "a-1"}}, "relative": "a-1"},
        "arguments": 16,
    }
    assert in_rank(config) == expected
    # What is cached is the same here.
    assert (config.t, config.nested.deep[0]) == ("a-1", "c-1")
    assert OmegaConf.is_interpolation(config, "t")


def test_interpolations_without_resolvers_stay_late() -> None:
    config = OmegaConf.create({"t": "${cached:a}", "refers": "${t}", "select": "${oc.select:t}"})

    def train() -> Any:
        late = OmegaConf.is_interpolation(config, "refers")
        config.t = "new"
        return late, config.refers, config.select

    assert run(pickle_call(train, (), {})) == (True, "new", "new")


def test_variables_of_ranks_are_the_ranks() -> None:
    config = OmegaConf.create(
        {
            "own": "${oc.env:OWN_VARIABLE}",
            "rank": "${oc.env:RANK,none}",
            "decoded": "${oc.decode:${oc.env:RANK,none}}",
            "absent": "${oc.env:ABSENT_VARIABLE}",
        }
    )

    def train() -> Any:
        os.environ["RANK"] = "7"
        os.environ.pop("OWN_VARIABLE", None)
        return plain(config)

    assert run(pickle_call(train, (), {})) == {
        "own": "the driver's",
        "rank": "7",
        "decoded": 7,
        "absent": "InterpolationResolutionError",
    }


def test_missing_values_flags_and_odd_values() -> None:
    config = OmegaConf.create(
        {
            "missing": "???",
            "to_missing": "${cached:${missing}}",
            "unknown": "${nowhere:1}",
            "table": "${table:}",
            "text": "${text:}",
            "escaped": r"\${cached:a}",
            "path": "${path:}",
            "none": None,
            "t": "${cached:t}",
            "part": {"t": "${cached:u}"},
        }
    )
    OmegaConf.set_readonly(config, True)
    OmegaConf.set_readonly(config.part, True)
    OmegaConf.set_struct(config.part, True)

    def train() -> Any:
        flags = (
            OmegaConf.is_readonly(config),
            OmegaConf.is_readonly(config.part),
            OmegaConf.is_struct(config.part),
            OmegaConf.is_struct(config),
            OmegaConf.is_missing(config, "missing"),
        )
        return flags, plain(config)

    assert run(pickle_call(train, (), {})) == (
        (True, True, True, None, True),
        {
            "missing": "MissingMandatoryValue",
            "to_missing": "InterpolationToMissingValueError",
            "unknown": "UnsupportedInterpolationType",
            "table": {"p": 1, "q": {0: "t-1", 1: 2}},
            "text": config.text,
            "escaped": "${cached:a}",
            "path": Path("/a"),
            "none": None,
            "t": "t-1",
            "part": {"t": "u-1"},
        },
    )


@dataclass
class Optimizer:
    lr: float = 0.1
    steps: int = MISSING
    name: str = "${cached:name}"


@dataclass
class Training:
    optimizer: Optimizer = field(default_factory=Optimizer)
    widths: list[int] = field(default_factory=lambda: [1, 2])
    size: int = "${double:4}"  # type: ignore[assignment]


@dataclass
class Holder:
    configs: list[Any]


GLOBAL = OmegaConf.create({"t": "${cached:global}"})


def test_structured_configurations_keep_their_types() -> None:
    config = OmegaConf.structured(Training)

    def train() -> Any:
        from omegaconf.errors import ValidationError

        with pytest.raises(ValidationError):
            config.size = "no number"
        config.optimizer.steps = "3"
        made = OmegaConf.to_object(config)
        return OmegaConf.get_type(config), made

    kind, made = run(pickle_call(train, (), {}))
    assert kind is Training
    assert made == Training(Optimizer(0.1, 3, "name-1"), [1, 2], 8)


def test_parts_stay_parts_wherever_they_are() -> None:
    config = OmegaConf.create({"t": "${cached:a}", "part": {"up": "${..t}", "list": ["${t}"]}})
    part, holder = config.part, Holder([config.part.list])

    def train(given: DictConfig, *, named: dict[str, Any]) -> Any:
        alike = (given is part, part is config.part, holder.configs[0] is part["list"])
        config.t = "new"
        return alike, part.up, holder.configs[0][0], named["c"].t, GLOBAL.t

    got = run(pickle_call(train, (part,), {"named": {"c": config}}))
    assert got == ((True, True, True), "new", "new", "new", "global-1")


def test_a_part_alone_travels_with_what_it_refers_to() -> None:
    config = OmegaConf.create({"t": "${cached:a}", "part": {"up": "${..t}"}})
    assert in_rank(config.part) == {"up": "a-1"}
    assert in_rank(config) == {"t": "a-1", "part": {"up": "a-1"}}


def test_a_configuration_without_resolvers_is_not_copied() -> None:
    config = OmegaConf.create({"a": 1, "b": "${a}", "c": {"d": [1, "${a}"]}})
    assert in_rank(config) == {"a": 1, "b": 1, "c": {"d": {0: 1, 1: 1}}}


def test_large_configurations_take_no_long_time() -> None:
    config = OmegaConf.create(
        {f"group{n}": {f"key{k}": "${cached:a}" for k in range(20)} for n in range(200)}
    )
    began = time.monotonic()
    pickle_call(lambda: [config[key] for key in config], (), {})
    assert time.monotonic() - began < HANG_SECONDS


SCRIPT = """
import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from tests.unit.script_ranks import drive

OmegaConf.register_new_resolver("shout", str.upper)


def train(cfg):
    assert not HydraConfig.initialized()
    made = hydra.utils.instantiate(cfg.model)
    return cfg.stamp, cfg.out, cfg.name, made


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    stamp, out, name, made = drive(train, cfg, hidden=False)
    assert (stamp, out) == (cfg.stamp, HydraConfig.get().runtime.output_dir), (stamp, out)
    assert name == "TINY" and made == {"a": 1}, (name, made)
    print("done", cfg.lr)


main()
"""


def test_a_script_of_hydra(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(
        "stamp: ${now:%H-%M-%S-%f}\nout: ${hydra:runtime.output_dir}\nname: ${shout:tiny}\nlr: 1\n"
        "model:\n  _target_: builtins.dict\n  a: 1\n"
    )
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    lines = printed(script, "--multirun", "lr=1,2", cwd=tmp_path).splitlines()
    assert [line for line in lines if line.startswith("done")] == ["done 1", "done 2"]
