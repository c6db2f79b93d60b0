"""Trainings with other people's libraries, as the examples have them, on the real cluster.

What they need is the extra "libraries", which `make soak` installs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import hopsgpu
from hopsgpu.cluster_managers.manager import ClusterManager
from tests.conftest import EXAMPLES, gpus_become

Example = Callable[[str], ModuleType]
quiet = functools.partial(hopsgpu.launch, progress="off")


@pytest.fixture(scope="module")
def gang(spark: SparkSession, manager: ClusterManager) -> Iterator[hopsgpu.Gang]:
    """Two ranks, in two containers; their GPUs are back once all tests have used them."""
    before = manager.gpus()[0]
    with hopsgpu.hold(workers=2, cores_per_worker=1, progress="off") as held:
        yield held
    assert gpus_become(manager, before), manager.gpus()


def alike(result: hopsgpu.GangResult, *names: str) -> dict[str, Any]:
    """The value of rank 0; the other ranks have the same under these names."""
    first, *others = result.values
    assert others
    for other in others:
        for name in names:
            assert other[name] == first[name], name
    return dict(first)


def test_lightning_in_one_container(
    spark: SparkSession, gpus_back: Callable[[], int], example: Example
) -> None:
    """Where the ranks of a container are Lightning's devices.

    It comes before the tests that hold a gang: that one may have a GPU of each node, and then no
    node has two left.
    """
    train = example("lightning_callbacks").train
    result = quiet(train, kwargs={"epochs": 50}, workers=2, placement="pack", cores_per_worker=1)
    assert alike(result, "weights")["world"] == 2


def test_hugging_faces_trainer_is_distributed_and_goes_on_from_its_checkpoint(
    gang: hopsgpu.Gang, example: Example
) -> None:
    train = example("transformers_trainer").train
    result = gang.launch(train, kwargs={"epochs": 4}, model="sentences")
    value = alike(result, "weights", "first", "last", "eval_accuracy")
    assert value["last"] < 0.5 * value["first"]
    assert value["eval_accuracy"] > 0.9
    assert not value["resumed"]
    # 512 rows, 16 a batch, by two ranks, four times: not each rank all rows.
    assert [measured["step"] for measured in result.metrics] == [64, 64]
    assert result.metrics[0]["eval_accuracy"] == value["eval_accuracy"]
    assert result.model is not None
    assert {"config.json", "model.safetensors"} <= set(result.model.manifest["files"])
    later = gang.launch(train, kwargs={"epochs": 5}, resume=result.run_id)
    assert alike(later, "weights")["resumed"]
    assert later.metrics[1]["step"] == 80
    assert later.value["weights"] != value["weights"]


@pytest.fixture
def fitted(gang: hopsgpu.Gang, example: Example) -> hopsgpu.GangResult:
    train = example("lightning_callbacks").train
    return gang.launch(train, kwargs={"epochs": 50}, model="plane")


def test_lightnings_trainer_takes_all_ranks_by_itself_and_stops_early(
    gang: hopsgpu.Gang, example: Example, fitted: hopsgpu.GangResult
) -> None:
    value = alike(fitted, "weights", "epochs", "val_loss")
    assert value["world"] == 2
    assert value["epochs"] < 50
    assert value["weights"] == pytest.approx([1.0, -2.0, 3.0], abs=0.05)
    assert fitted.metrics[1]["val_loss"] == pytest.approx(value["val_loss"])
    assert fitted.model is not None and set(fitted.model.manifest["files"]) == {"plane.ckpt"}
    train = example("lightning_callbacks").train
    later = gang.launch(train, kwargs={"epochs": 50}, resume=fitted.run_id)
    assert alike(later, "weights")["resumed"]


def test_accelerate_gives_each_rank_its_part(gang: hopsgpu.Gang, example: Example) -> None:
    result = gang.launch(example("accelerate_loop").train, kwargs={"epochs": 5}, model="plane")
    value = alike(result, "weights", "losses")
    assert (value["world"], value["steps"]) == (2, 512 // 16 // 2)
    assert value["losses"][-1] < 1e-2 < value["losses"][0]
    assert value["weights"] == pytest.approx([1.0, -2.0, 3.0], abs=0.05)
    assert result.model is not None and "model.safetensors" in result.model.manifest["files"]


def prepared() -> int:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    data = hopsgpu.context().data
    assert data is not None and not isinstance(data, dict)
    loader = Accelerator().prepare(DataLoader(data.torch(10), batch_size=None))
    return sum(len(batch["id"]) for batch in loader)


def test_accelerate_prepares_no_loader_over_a_ranks_own_rows(
    spark: SparkSession, gang: hopsgpu.Gang
) -> None:
    with pytest.raises(hopsgpu.RankFailed, match=r"ConfigError: a loader over context\(\)\.data"):
        gang.launch(prepared, data=spark.range(1000))


def test_images_of_parquet_by_a_dataloaders_workers(
    spark: SparkSession, gang: hopsgpu.Gang, example: Example
) -> None:
    images = example("images_from_parquet")
    # To Spark's own tasks nothing travels by itself.
    spark.sparkContext.addPyFile(str(EXAMPLES / "images_from_parquet.py"))
    # One task: each imports torch, of which an executor of two cores has no memory for two.
    numbers = spark.range(0, 512, 1, 1)
    frame = numbers.mapInPandas(images.pictures, "png binary, label long")
    result = gang.launch(images.train, kwargs={"epochs": 6}, data=frame)
    assert [value["rows"] for value in result.values] == [256, 256]
    value = alike(result, "weights")
    assert value["losses"][-1] < 0.5 * value["losses"][0]


def test_xgboost_trains_one_model_of_all_rows_and_spark_scores_with_it(
    spark: SparkSession, gang: hopsgpu.Gang, example: Example
) -> None:
    xgb = example("xgboost_gang")
    frame = xgb.customers(spark, 4000)
    result = gang.launch(xgb.train, kwargs={"rounds": 20}, data=frame, model="leavers")
    value = alike(result, "trees", "losses")
    assert [one["rows"] for one in result.values] == [2000, 2000]
    assert value["losses"][-1] < 0.1 < value["losses"][0]
    assert result.metrics[1]["train-logloss"] == pytest.approx(value["losses"][-1])
    scored = xgb.score(xgb.customers(spark, 1000), result.model)
    right = F.avg(((F.col("probability") > 0.5) == (F.col("leaves") == 1)).cast("int"))
    assert scored.agg(right).first()[0] > 0.98


def connect(times: int, failing: int | None = None) -> list[tuple[int, int, int]]:
    """What XGBoost says of the ranks, and the sum of them, each time they are connected."""
    from xgboost import collective

    from hopsgpu.frameworks.xgboost import communicator

    seen = []
    for _ in range(times):
        with communicator():
            if hopsgpu.context().rank == failing:
                raise LookupError("nothing to train on")
            own = np.array([collective.get_rank() + 1])
            total = int(collective.allreduce(own, collective.Op.SUM)[0])
            seen.append((collective.get_rank(), collective.get_world_size(), total))
    return seen


def test_xgboosts_ranks_are_those_of_the_gang_each_time(gang: hopsgpu.Gang) -> None:
    assert gang.launch(connect, args=(2,)).values == ([(0, 2, 3)] * 2, [(1, 2, 3)] * 2)


@pytest.mark.parametrize("failing", [0, 1])
def test_whoever_fails_among_xgboosts_ranks_is_the_first_failure(
    gang: hopsgpu.Gang, failing: int
) -> None:
    """And not the one that lost its connection to it."""
    with pytest.raises(hopsgpu.RankFailed, match="LookupError: nothing to train on") as caught:
        gang.launch(connect, args=(1, failing))
    assert caught.value.rank == failing
    assert gang.launch(connect, args=(1,)).value == [(0, 2, 3)]


def cores() -> int:
    import joblib

    return int(joblib.cpu_count())


def test_scikit_learn_by_rank_with_the_ranks_cores(spark: SparkSession, example: Example) -> None:
    sklearn = example("sklearn_grid")
    # What such a rank has by default is here only once idle executors of ETL have gone.
    few = {"gpus_per_worker": 0, "memory_per_worker": "1g"}
    with hopsgpu.hold(workers=2, cores_per_worker=2, progress="off", **few) as gang:
        assert gang.launch(cores).values == (2, 2)
        result = gang.launch(sklearn.validate, args=(sklearn.GRID,))
    assert [len(rank) for rank in result.values] == [3, 3]
    parameters = [parameters for rank in result.values for _, parameters in rank]
    assert len({str(one) for one in parameters}) == 6
    accuracy, best = max((one for rank in result.values for one in rank), key=lambda one: one[0])
    assert accuracy > 0.95
    fitted = quiet(sklearn.fit, args=(best,), model="digits-svc", **few)
    assert fitted.model is not None and set(fitted.model.manifest["files"]) == {"digits.joblib"}


def test_keras_fits_a_table_of_the_lake(
    spark: SparkSession, gpus_back: Callable[[], int], example: Example
) -> None:
    keras = example("keras_tf_data")
    training, testing = keras.points(spark, 2000).randomSplit([0.8, 0.2], seed=0)
    data = {"training": training, "testing": testing}
    result = quiet(keras.train, kwargs={"epochs": 8}, data=data, model="clusters")
    assert result.value["loss"][-1] < 0.2 * result.value["loss"][0]
    assert result.value["val_accuracy"][-1] > 0.95
    assert result.metrics[0]["val_loss"] == pytest.approx(result.value["val_loss"][-1])
    assert result.model is not None and "saved_model.pb" in result.model.manifest["files"]
