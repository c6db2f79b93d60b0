"""Hugging Face Accelerate's environment, which its Trainer goes by too.

Without a GPU Accelerate connects the ranks only where it is told to use CPUs: else each of them
trains alone, and nothing says so.

Source: `AcceleratorState` and `PartialState._prepare_backend` of accelerate.state 1.15,
`TrainingArguments._setup_devices` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Collection


def environment(gpus: Collection[str]) -> dict[str, str]:
    """`ACCELERATE_USE_CPU` for a rank without GPUs. A user's own value goes first.

    Args:
        gpus: of the rank, those that a driver knows.
    """
    return {} if gpus else {"ACCELERATE_USE_CPU": "true"}
