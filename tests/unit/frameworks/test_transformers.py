"""Which files of a checkpoint each rank saves for Hugging Face's Trainer; stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hopsgpu.artifacts.checkpoints import files_of
from hopsgpu.frameworks.transformers import gang_callback, own_names

SHARED = ["trainer_state.json", "model.safetensors", "optimizer.pt", "training_args.bin"]


class Gang:
    """Records what would be copied for each step."""

    def __init__(self) -> None:
        self.saved: dict[int, dict[str, str]] = {}

    def report(self, step: int, /, **metrics: Any) -> None:
        raise AssertionError

    def save_checkpoint(self, path: str | Path, step: int) -> None:
        self.saved[step] = {name: file.read_text() for name, file in files_of(Path(path)).items()}


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The state of accelerate."""
    shared: dict[str, Any] = {"distributed_type": SimpleNamespace(value="MULTI_GPU")}
    state, transformers = ModuleType("accelerate.state"), ModuleType("transformers")
    vars(state)["AcceleratorState"] = SimpleNamespace(_shared_state=shared)
    vars(transformers)["TrainerCallback"] = type("TrainerCallback", (), {})
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    return shared


def saved(directory: Path, rank: int, names: list[str], step: int = 5) -> Gang:
    """What a rank of two saves of the files that it finds."""
    for name in names:
        file = directory / f"checkpoint-{step}" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{name} of rank {rank}")
    gang = Gang()
    args = SimpleNamespace(output_dir=str(directory), process_index=rank, world_size=2)
    gang_callback(gang).on_save(args, SimpleNamespace(global_step=step), None)
    return gang


def test_what_several_ranks_have_is_saved_once(tmp_path: Path, accelerator: Any) -> None:
    first = saved(tmp_path / "0", 0, [*SHARED, "rng_state_0.pth"])
    second = saved(tmp_path / "1", 1, [*SHARED, "rng_state_1.pth"])
    expected = {f"checkpoint-5/{name}" for name in (*SHARED, "rng_state_0.pth")}
    assert first.saved[5].keys() == expected
    assert second.saved[5] == {"checkpoint-5/rng_state_1.pth": "rng_state_1.pth of rank 1"}


def test_a_rank_without_files_of_its_own_saves_nothing(tmp_path: Path, accelerator: Any) -> None:
    """With save_only_model=True the Trainer makes no directory in other ranks than the first."""
    assert saved(tmp_path / "1", 1, []).saved == {}
    assert saved(tmp_path / "0", 0, ["model.safetensors"]).saved[5].keys() == {
        "checkpoint-5/model.safetensors"
    }


def test_ranks_may_share_the_directory() -> None:
    names = [*SHARED, "rng_state_0.pth", "rng_state_1.pth", "rng_state_12.pth", "below/rng.pth"]
    assert own_names(names, 0) == [*SHARED, "rng_state_0.pth", "below/rng.pth"]
    assert own_names(names, 1) == ["rng_state_1.pth"]
    assert own_names(names, 12) == ["rng_state_12.pth"]
    # A rank that is alone.
    assert own_names([*SHARED, "rng_state.pth"], 0) == [*SHARED, "rng_state.pth"]


def test_shards_are_saved_by_the_ranks_that_have_them(
    tmp_path: Path, accelerator: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {
        rank: [*SHARED, f"rng_state_{rank}.pth", f"shards/__{rank}_0.distcp"] for rank in (0, 1)
    }

    def gather(found: list[list[str]], own: list[str]) -> None:
        assert own in [sorted(each) for each in names.values()]
        found[:] = [sorted(names[0]), sorted(names[1])]

    distributed = ModuleType("torch.distributed")
    vars(distributed)["all_gather_object"] = gather
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    for kind in ("FSDP", "DEEPSPEED"):
        accelerator["distributed_type"] = SimpleNamespace(value=kind)
        for rank, shared in ((0, SHARED), (1, [])):
            found = saved(tmp_path / kind / str(rank), rank, names[rank]).saved[5]
            own = [*shared, f"rng_state_{rank}.pth", f"shards/__{rank}_0.distcp"]
            assert found.keys() == {f"checkpoint-5/{name}" for name in own}
