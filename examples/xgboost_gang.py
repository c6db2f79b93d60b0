"""XGBoost on a gang, from a table of the lake to scores by a pandas UDF, in one application.

pip install 'hopsgpu[libraries]'
eval "$(hopsgpu cluster env)"          # or your own cluster's HADOOP_CONF_DIR
python examples/xgboost_gang.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import xgboost
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import hopsgpu
from hopsgpu.frameworks.xgboost import communicator, gang_callback

WORKERS = 2
FEATURES = ["amount", "age", "visits"]


def customers(spark: SparkSession, rows: int) -> DataFrame:
    """Return random numbers and who leaves, by a rule that trees can learn."""
    frame = spark.range(rows)
    for seed, name in enumerate(FEATURES):
        frame = frame.withColumn(name, F.rand(seed))
    leaves = (F.col("amount") > 0.5) & (F.col("visits") < 0.6)
    return frame.withColumn("leaves", leaves.cast("int"))


def train(rounds: int, device: str = "cpu") -> dict[str, Any]:
    """Train one model on all ranks' rows; give `device="cuda"` if each rank has a GPU."""
    ctx = hopsgpu.context()
    table = ctx.data.to_arrow()
    parameters = {"objective": "binary:logistic", "max_depth": 3, "device": device}
    history: dict[str, Any] = {}
    with communicator():
        rows = xgboost.QuantileDMatrix(table.select(FEATURES), table["leaves"].to_numpy())
        booster = xgboost.train(
            parameters,
            rows,
            rounds,
            evals=[(rows, "train")],
            evals_result=history,
            callbacks=[gang_callback(ctx)],
            verbose_eval=False,
        )
    if ctx.rank == 0:
        booster.save_model(ctx.model_dir / "model.ubj")
    losses = history["train"]["logloss"]
    return {"losses": losses, "rows": rows.num_row(), "trees": booster.get_dump()}


def score(frame: DataFrame, model: hopsgpu.ModelVersion) -> DataFrame:
    """Add the model's probability to each row, on CPU executors that have read the model."""

    @F.pandas_udf("double")
    def probability(batches: Iterator[pd.DataFrame]) -> Iterator[pd.Series]:
        with model.open("model.ubj") as file:
            booster = xgboost.Booster(model_file=bytearray(file.read()))
        for batch in batches:
            yield pd.Series(booster.inplace_predict(batch[FEATURES]))

    return frame.withColumn("probability", probability(F.struct(*FEATURES)))


def main() -> None:
    spark = hopsgpu.session("xgboost")
    frame = customers(spark, 20_000)
    # For GPUs, omit gpus_per_worker and pass device="cuda" to train.
    result = hopsgpu.launch(
        train,
        kwargs={"rounds": 20},
        workers=WORKERS,
        gpus_per_worker=0,
        data=frame,
        model="leavers",
    )
    scored = score(customers(spark, 1000), result.model)
    wrong = scored.where((F.col("probability") > 0.5) != (F.col("leaves") == 1)).count()
    spark.stop()
    print(f"loss {result.value['losses'][0]:.4f} -> {result.value['losses'][-1]:.4f}")
    print(f"{wrong} of 1000 customers scored wrong by {result.model.url}")


if __name__ == "__main__":
    main()
