"""Small searches of real models on real data, which do better than their defaults."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import optuna
import pytest
from pyspark.sql import SparkSession

import hopsgpu

# Far from good, so that a search has something to find.
DEFAULTS = {"lr": 1e-4, "hidden": 8}
SPACE = {
    "lr": optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True),
    "hidden": optuna.distributions.IntDistribution(8, 64, step=8),
}
EPOCHS = 8


def digits() -> Any:
    """8×8 images of handwritten digits, in [0, 1], and which they are: to train with, to test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    return train_test_split((images / 16).astype("float32"), labels, random_state=0)


def with_torch(lr: float, hidden: int) -> dict[str, float]:
    import torch

    context = hopsgpu.context()
    torch.manual_seed(0)
    seen, kept, labels, kept_labels = map(torch.as_tensor, digits())
    model = torch.nn.Sequential(
        torch.nn.Linear(64, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr)
    accuracy = 0.0
    for epoch in range(EPOCHS):
        for rows in torch.randperm(len(seen)).split(64):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(seen[rows]), labels[rows]).backward()
            optimizer.step()
        accuracy = float((model(kept).argmax(1) == kept_labels).float().mean())
        context.report(epoch, accuracy=accuracy)
        if context.should_prune():
            break
    return {"accuracy": accuracy}


def with_tensorflow(lr: float, hidden: int) -> dict[str, float]:
    import tensorflow as tf

    context = hopsgpu.context()
    tf.keras.utils.set_random_seed(0)
    seen, kept, labels, kept_labels = digits()
    model = tf.keras.Sequential(
        [tf.keras.layers.Dense(hidden, activation="relu"), tf.keras.layers.Dense(10)]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(lr), loss, metrics=["accuracy"])
    accuracy = 0.0
    for epoch in range(EPOCHS):
        model.fit(seen, labels, batch_size=64, verbose=0)
        accuracy = float(model.evaluate(kept, kept_labels, verbose=0)[1])
        context.report(epoch, accuracy=accuracy)
        if context.should_prune():
            break
    return {"accuracy": accuracy}


@pytest.mark.soak
@pytest.mark.parametrize("train", [with_torch, with_tensorflow])
def test_the_best_of_a_search_beats_the_defaults(
    train: Callable[..., dict[str, float]], spark: SparkSession, gpus_back: Callable[[], int]
) -> None:
    # Outside a gang, in a process that imports what only ranks want.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        alone = process.submit(train, **DEFAULTS)
        result = hopsgpu.search(
            train,
            SPACE,
            trials=8,
            max_concurrent=1,
            direction="maximize",
            metric="accuracy",
            pruner="median",
            seed=0,
            cores_per_worker=1,
            progress="off",
        )
        before = alone.result()["accuracy"]
    assert result.best is not None
    assert result.best.value > before + 0.1, (result.best, before)
    assert {trial.state for trial in result.trials} <= {"complete", "pruned"}
    assert all(trial.step is not None for trial in result.trials)
