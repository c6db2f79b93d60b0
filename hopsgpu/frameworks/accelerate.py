"""The environment variable of Hugging Face Accelerate, which Hugging Face's Trainer uses too.

Without a GPU, Accelerate connects the ranks only if it is told to use CPUs. Otherwise each of them
trains alone, and nothing reports it.

Source: `AcceleratorState` and `PartialState._prepare_backend` of accelerate.state 1.15,
`TrainingArguments._setup_devices` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Collection


def environment(gpus: Collection[str]) -> dict[str, str]:
    """Return `ACCELERATE_USE_CPU` for a rank without GPUs. A user's own value takes precedence.

    Args:
        gpus: GPUs of the rank that an NVIDIA driver knows, without simulated ones.
    """
    return {} if gpus else {"ACCELERATE_USE_CPU": "true"}
