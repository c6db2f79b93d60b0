"""The environment variable of Hugging Face Accelerate, which Hugging Face's Trainer uses too.

Without a GPU, Accelerate connects the ranks only if it must use CPUs. Otherwise each rank trains
alone, without a warning.

Source: `AcceleratorState` and `PartialState._prepare_backend` of accelerate.state 1.15,
`TrainingArguments._setup_devices` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Collection


def environment(gpus: Collection[str]) -> dict[str, str]:
    """Return `ACCELERATE_USE_CPU` for a rank without real GPUs. A user's value takes precedence."""
    return {} if gpus else {"ACCELERATE_USE_CPU": "true"}
