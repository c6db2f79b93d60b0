"""Warnings of results that tracking libraries leave in a rank's working directory."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

# (pattern, description of a match, what the user should do instead)
_KNOWN = (
    (
        "wandb/offline-run-*",
        "an offline run of wandb",
        "pass dir=hopsgpu.context().log_dir to wandb.init()",
    ),
    ("mlflow.db", "MLflow's database", "call mlflow.set_tracking_uri() in the function"),
    ("mlruns/*", "runs of MLflow", "call mlflow.set_tracking_uri() in the function"),
    # A SummaryWriter makes one directory below `runs`.
    (
        "runs/*/events.out.tfevents.*",
        "events of TensorBoard",
        "pass hopsgpu.context().log_dir to the SummaryWriter",
    ),
    (
        "lightning_logs/*",
        "Lightning's logs",
        "pass default_root_dir=hopsgpu.context().log_dir to the Trainer",
    ),
)


def unsaved_results(rank: int, work: Path, kept: Collection[str] = ()) -> list[str]:
    """Return warnings about results that will be removed with a rank's working directory.

    Args:
        kept: directories below it whose files are on the lake.

    Raises:
        OSError: the directory cannot be read.
    """
    return [
        f"rank {rank} left {what} in its working directory ({pattern.partition('/')[0]}), which is"
        f" removed: {remedy}"
        for pattern, what, remedy in _KNOWN
        if pattern.partition("/")[0] not in kept and next(work.glob(pattern), None) is not None
    ]
