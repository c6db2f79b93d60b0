"""Lightning's environment, and its Trainer's callback.

Lightning finds the ranks by torchrun's variables. Its Trainer has to be told of them again: with
its defaults each rank would train alone.

Source: `_parse_env_variables` of lightning.pytorch.utilities.argparse, `TorchElasticEnvironment` of
lightning.fabric.plugins.environments; 2.6.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from hopsgpu.core.gang import World
from hopsgpu.frameworks.callbacks import Gang, numbers

# Defaults of its Trainer's arguments, by their names.
VARIABLES = ("PL_TRAINER_DEVICES", "PL_TRAINER_NUM_NODES")


def environment(world: World) -> dict[str, str]:
    """What `devices` and `num_nodes` of a Trainer are where the code says nothing else.

    Nothing for a rank that is alone, which may have several GPUs.
    """
    if world.size == 1:
        return {}
    return {
        "PL_TRAINER_DEVICES": str(world.ranks_per_container),
        "PL_TRAINER_NUM_NODES": str(world.size // world.ranks_per_container),
    }


def gang_callback(gang: Gang) -> Any:
    """A Callback: metrics to the driver at each epoch's end, and each checkpoint to the lake.

    Go on with `trainer.fit(..., ckpt_path=gang.latest_checkpoint())`. Checkpoints of weights alone
    and FSDP's sharded ones are not brought.

    Args:
        gang: `hopsgpu.context()`.
    """
    # The function has imported one of its two packages, whose classes are not the same.
    old = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    package = "pytorch_lightning" if old else "lightning.pytorch"
    lightning = importlib.import_module(package)
    to_the_lake = _to_the_lake(package, gang)

    class GangCallback(lightning.Callback):  # type: ignore[name-defined,misc]
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if not isinstance(trainer.strategy.checkpoint_io, to_the_lake):
                trainer.strategy.checkpoint_io = to_the_lake(trainer.strategy.checkpoint_io)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            gang.report(trainer.global_step, **numbers(trainer.callback_metrics))

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking:
                gang.report(trainer.global_step, **numbers(trainer.callback_metrics))

    return GangCallback()


def _to_the_lake(package: str, gang: Gang) -> Any:
    """A CheckpointIO that saves by way of another, and then on the lake."""
    plugins = importlib.import_module(f"{package}.plugins")

    class ToTheLake(plugins.CheckpointIO):  # type: ignore[name-defined,misc]
        def __init__(self, own: Any) -> None:
            self._own = own

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            self._own.save_checkpoint(checkpoint, path, storage_options)
            # One of weights alone is a model: no training goes on from it.
            if "optimizer_states" in checkpoint:
                gang.save_checkpoint(Path(path), checkpoint["global_step"])

        def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            return self._own.load_checkpoint(*args, **kwargs)

        def remove_checkpoint(self, path: Any) -> None:
            self._own.remove_checkpoint(path)

        def teardown(self) -> None:
            self._own.teardown()

    return ToTheLake
