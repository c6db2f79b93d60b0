"""A callback for Hugging Face's Trainer in a gang.

The Trainer needs no settings: it finds the ranks by torchrun's variables.

Source: `Trainer._save_checkpoint` of transformers 5.24.
"""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hopsgpu.frameworks.callbacks import CallbackContext, MetricReporter

_RANDOM_STATE = re.compile(r"rng_state_(\d+)\.pth")
# Values of accelerate's DistributedType for which each rank saves its own shards.
_SHARDED = frozenset({"FSDP", "DEEPSPEED", "MEGATRON_LM"})


def gang_callback(context: CallbackContext) -> Any:
    """Return a TrainerCallback that reports metrics and saves checkpoints to the lake.

    Each rank saves its own files (the state of its random numbers, its shard). Rank 0 saves files
    that several ranks have, as with `save_on_each_node=True`. Resume with
    `trainer.train(resume_from_checkpoint=context.latest_checkpoint(all_ranks=True))`.

    Args:
        context: `hopsgpu.context()`.
    """
    transformers = importlib.import_module("transformers")
    reporter = MetricReporter(context, "Transformers")

    class GangCallback(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **_: object
        ) -> None:
            reporter.report(state.global_step, logs)

        def on_save(self, args: Any, state: Any, control: Any, **_: object) -> None:
            saved = Path(args.output_dir, f"checkpoint-{state.global_step}").absolute()
            names = _names_below(saved)
            names_to_save = own_names(names, args.process_index)
            if _is_sharded() or _are_connected(args.world_size):
                names_to_save = _names_of_no_lower_rank(names, args.process_index, args.world_size)
            # With save_only_model=True only rank 0 has files.
            if names_to_save:
                _save(context, saved, names_to_save, state.global_step)

    return GangCallback()


def own_names(names: Iterable[str], rank: int) -> list[str]:
    """Return the files of a checkpoint that a rank saves if ranks have no process group.

    Ranks, which may share the directory, save the state of their random numbers, rank 0 the rest.
    """
    owners = {name: _RANDOM_STATE.fullmatch(name) for name in names}
    return [name for name, match in owners.items() if (int(match[1]) if match else 0) == rank]


def _are_connected(world_size: int) -> bool:
    distributed = importlib.import_module("torch.distributed")
    return bool(
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() == world_size
    )


def _is_sharded() -> bool:
    state = importlib.import_module("accelerate.state").AcceleratorState._shared_state
    return str(getattr(state.get("distributed_type"), "value", "")) in _SHARDED


def _names_of_no_lower_rank(names: list[str], rank: int, world_size: int) -> list[str]:
    """Return the files that no lower rank has; a collective call.

    After the call, all ranks have written their files.
    """
    if world_size == 1:
        return names
    distributed = importlib.import_module("torch.distributed")
    names_by_rank: list[list[str]] = [[] for _ in range(world_size)]
    distributed.all_gather_object(names_by_rank, names)
    lower = {name for other_names in names_by_rank[:rank] for name in other_names}
    return [name for name in names if name not in lower]


def _names_below(directory: Path) -> list[str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(directory)) for path in files)


def _save(context: CallbackContext, directory: Path, names: Iterable[str], step: int) -> None:
    with tempfile.TemporaryDirectory(prefix="hopsgpu-checkpoint-") as temporary:
        chosen = Path(temporary, directory.name)
        for name in names:
            link = chosen / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(directory / name)
        context.save_checkpoint(chosen, step)
