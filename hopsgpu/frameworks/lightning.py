"""Lightning on a gang.

Its Trainer wants the ranks of a container for `devices` and the number of containers for
`num_nodes`: `LOCAL_WORLD_SIZE` and `GROUP_WORLD_SIZE`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from hopsgpu.frameworks.reporting import Gang, numbers


def gang_callback(gang: Gang) -> Any:
    """A Callback: metrics to the driver at each epoch's end, and each checkpoint to the lake.

    Go on with `trainer.fit(..., ckpt_path=gang.latest_checkpoint())`. Sharded checkpoints of FSDP
    are not brought.

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
            gang.save_checkpoint(Path(path), checkpoint["global_step"])

        def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            return self._own.load_checkpoint(*args, **kwargs)

        def remove_checkpoint(self, path: Any) -> None:
            self._own.remove_checkpoint(path)

        def teardown(self) -> None:
            self._own.teardown()

    return ToTheLake
