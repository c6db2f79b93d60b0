"""JAX, Keras and XGBoost, each in one rank."""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import jax
import jax.numpy as jnp
import keras
import numpy as np
import xgboost


def with_jax() -> float:
    values = jnp.arange(12.0).reshape(4, 3) / 10
    return float(jax.jit(lambda weights: jnp.mean((values @ weights - 1) ** 2))(jnp.ones(3)))


def with_keras() -> float:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    values = np.arange(64.0).reshape(16, 4).astype("float32") / 64
    return float(model.fit(values, values.sum(1), epochs=2, verbose=0).history["loss"][-1])


def with_xgboost() -> float:
    values = np.random.RandomState(0).rand(100, 4)
    table = xgboost.DMatrix(values, values.sum(1))
    results: dict[str, dict[str, list[float]]] = {}
    parameters = {"nthread": 1, "max_depth": 2}
    xgboost.train(
        parameters, table, 5, evals=[(table, "train")], evals_result=results, verbose_eval=False
    )
    return results["train"]["rmse"][-1]


if __name__ == "__main__":
    for train in (with_jax, with_keras, with_xgboost):
        print(f"{train.__name__} loss {train():.6f}", flush=True)
