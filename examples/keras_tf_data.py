"""Keras 3's `fit` on a table of the lake, as a tf.data pipeline.

One rank with any number of GPUs: `fit` splits each batch among them. Several ranks need another
loop (examples/tensorflow_workers.py) or Keras 2 (docs/tensorflow.md).

    pip install hopsgpu tensorflow
    eval "$(hopsgpu cluster env)"          # or your own cluster's HADOOP_CONF_DIR
    python examples/keras_tf_data.py
"""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import hopsgpu


def points(spark: SparkSession, rows: int) -> DataFrame:
    """Return points of four clusters, with the number of the cluster."""
    label = (F.col("id") % 4).alias("label")
    x = F.array(F.randn(1) + label % 2 * 6, F.randn(2) + F.floor(label / 2) * 6).alias("x")
    return spark.range(rows).select(x, label)


def train(epochs: int) -> dict[str, list[float]]:
    """Return what `fit` measured in each epoch."""
    import keras
    import tensorflow as tf

    ctx = hopsgpu.context()
    shapes = {"x": (2,)}  # unknown from Spark's arrays
    training, testing = (
        data.tensorflow(128, shuffle=True, shapes=shapes)
        .map(lambda batch: (tf.cast(batch["x"], tf.float32), batch["label"]))
        .prefetch(tf.data.AUTOTUNE)
        for data in (ctx.data["training"], ctx.data["testing"])
    )
    gpus = tf.config.list_logical_devices("GPU")
    strategy = tf.distribute.MirroredStrategy() if gpus else tf.distribute.get_strategy()
    with strategy.scope():
        layers = keras.layers.Dense(16, "relu"), keras.layers.Dense(4)
        model = keras.Sequential([keras.Input((2,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    report = keras.callbacks.LambdaCallback(on_epoch_end=lambda n, logs: ctx.report(n, **logs))
    stop = keras.callbacks.EarlyStopping("val_loss", patience=3)
    fitted = model.fit(
        training, validation_data=testing, epochs=epochs, callbacks=[report, stop], verbose=0
    )
    model.export(ctx.model_dir, verbose=False)  # as TensorFlow Serving reads it
    return {name: [float(value) for value in values] for name, values in fitted.history.items()}


def main() -> None:
    spark = hopsgpu.session("keras")
    rows = points(spark, 5000)
    training, testing = rows.randomSplit([0.8, 0.2], seed=0)
    data = {"training": training, "testing": testing}
    result = hopsgpu.launch(train, kwargs={"epochs": 10}, data=data, model="clusters")
    spark.stop()
    print(f"loss {result.value['loss'][0]:.4f} -> {result.value['loss'][-1]:.4f}")
    print(f"accuracy {result.value['val_accuracy'][-1]:.4f}, {result.model.url}")


if __name__ == "__main__":
    main()
