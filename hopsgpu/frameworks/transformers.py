"""A callback for Hugging Face's Trainer in a gang.

The Trainer itself needs no settings: it finds the ranks by torchrun's variables.
"""

from __future__ import annotations

import importlib
from typing import Any

from hopsgpu.frameworks.callbacks import Gang, MetricReporter


def gang_callback(gang: Gang) -> Any:
    """Return a TrainerCallback that reports metrics and saves checkpoints to the lake.

    It reports metrics to the driver, and saves each checkpoint. Each rank saves its part (for
    example the state of its random numbers, or its shard), so resume with
    `trainer.train(resume_from_checkpoint=gang.latest_checkpoint(all_ranks=True))`.

    Args:
        gang: `hopsgpu.context()`.
    """
    transformers = importlib.import_module("transformers")
    reporter = MetricReporter(gang, "Transformers")

    class GangCallback(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **_: object
        ) -> None:
            reporter.report(state.global_step, logs)

        def on_save(self, args: Any, state: Any, control: Any, **_: object) -> None:
            saved = f"{args.output_dir}/checkpoint-{state.global_step}"
            gang.save_checkpoint(saved, state.global_step)

    return GangCallback()
