"""Lightning's environment variables, and a callback for its Trainer.

Lightning finds the ranks by torchrun's variables, but its Trainer needs their number too: with the
Trainer's defaults, each rank would train alone.

Source: `_parse_env_variables` of lightning.pytorch.utilities.argparse, `TorchElasticEnvironment` of
lightning.fabric.plugins.environments; 2.6.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from hopsgpu.core.gang import World
from hopsgpu.frameworks.callbacks import CallbackContext, MetricReporter

# The defaults of two arguments of the Trainer.
DEVICES, NUM_NODES = VARIABLES = ("PL_TRAINER_DEVICES", "PL_TRAINER_NUM_NODES")


def environment(world: World) -> dict[str, str]:
    """Return the defaults of a Trainer's `devices` and `num_nodes`."""
    if world.size == 1:  # the rank may have several GPUs
        return {}
    return {
        DEVICES: str(world.ranks_per_container),
        NUM_NODES: str(world.size // world.ranks_per_container),
    }


def gang_callback(context: CallbackContext) -> Any:
    """Return a Callback that reports metrics and saves checkpoints to the lake.

    The callback reports metrics at each epoch's end, and saves each checkpoint. Resume with
    `trainer.fit(..., ckpt_path=context.latest_checkpoint())`. Checkpoints of weights alone and the
    sharded checkpoints of FSDP are not saved to the lake.

    Args:
        context: `hopsgpu.context()`.
    """
    # Lightning has two packages with separate classes: use the imported one.
    is_old_package = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    package = "pytorch_lightning" if is_old_package else "lightning.pytorch"
    lightning = importlib.import_module(package)
    lake_io_class = _make_lake_io_class(package, context)
    reporter = MetricReporter(context, "Lightning")

    class GangCallback(lightning.Callback):  # type: ignore[name-defined,misc]
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if not isinstance(trainer.strategy.checkpoint_io, lake_io_class):
                trainer.strategy.checkpoint_io = lake_io_class(trainer.strategy.checkpoint_io)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            reporter.report(trainer.global_step, trainer.callback_metrics)

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking:
                reporter.report(trainer.global_step, trainer.callback_metrics)

    return GangCallback()


def _make_lake_io_class(package: str, context: CallbackContext) -> Any:
    """Return a CheckpointIO class that saves with another CheckpointIO, and then to the lake."""
    plugins = importlib.import_module(f"{package}.plugins")

    class LakeCheckpointIO(plugins.CheckpointIO):  # type: ignore[name-defined,misc]
        def __init__(self, checkpoint_io: Any) -> None:
            self._checkpoint_io = checkpoint_io

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            self._checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
            # No training can resume from a checkpoint of weights alone.
            if "optimizer_states" in checkpoint:
                context.save_checkpoint(Path(path), checkpoint["global_step"])

        def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            return self._checkpoint_io.load_checkpoint(*args, **kwargs)

        def remove_checkpoint(self, path: Any) -> None:
            self._checkpoint_io.remove_checkpoint(path)

        def teardown(self) -> None:
            self._checkpoint_io.teardown()

    return LakeCheckpointIO
