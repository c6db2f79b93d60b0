"""Every row of an epoch is trained once, whatever worlds train it."""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.data import reader
from hopsgpu.data import shuffle as order
from hopsgpu.data.position import Leg, Position, are_in_step, common_position
from hopsgpu.data.rank_data import RankData
from hopsgpu.data.rank_shards import open_datasets
from hopsgpu.data.shard import Slice
from hopsgpu.data.shard_plan import plan_epoch, reader_ends, remove_rows
from hopsgpu.data.source import ParquetSource
from hopsgpu.errors import ConfigError, StoreError
from tests.unit.data.worlds import Way, Worlds, written

ROWS = 2_003
SIZE = 16


@pytest.fixture
def source(tmp_path: Path) -> ParquetSource:
    return written(tmp_path / "lake", ROWS)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces, windows and record batches of the size of the tests' data."""
    monkeypatch.setattr(order, "_PIECE_BYTES", 3_000)
    monkeypatch.setattr(order, "_WINDOW_ROWS", 150)
    monkeypatch.setattr(reader, "_CHUNK_BYTES", 1_000)


def lists(shuffle: bool) -> Way:
    return lambda data, epoch: data.batches(SIZE, ["id", "x"], shuffle=shuffle, epoch=epoch)


def columns(shuffle: bool) -> Way:
    return lambda data, epoch: data.batches(SIZE, ["y", "id"], shuffle=shuffle, epoch=epoch)


def torch(shuffle: bool) -> Way:
    def read(data: RankData, epoch: int) -> Iterator[Mapping[str, Any]]:
        dataset = data.torch(SIZE, ["id", "x"], shuffle=shuffle)
        dataset.set_epoch(epoch)
        return iter(dataset)

    return read


def torch_loader(shuffle: bool) -> Way:
    def read(data: RankData, epoch: int) -> Iterator[Mapping[str, Any]]:
        from torch.utils.data import DataLoader

        dataset = data.torch(SIZE, ["id"], shuffle=shuffle, epoch=epoch)
        return iter(DataLoader(dataset, batch_size=None))

    return read


def tensorflow(shuffle: bool) -> Way:
    def read(data: RankData, epoch: int) -> Iterator[Mapping[str, Any]]:
        dataset = data.tensorflow(SIZE, ["id", "y"], shuffle=shuffle, epoch=epoch)
        return iter(dataset.map(lambda batch: batch).prefetch(3))

    return read


def one_iterator(shuffle: bool) -> Way:
    """All epochs from one call, which the first epoch of a world makes."""

    def read(data: RankData, epoch: int) -> Iterator[Mapping[str, Any]]:
        if epoch > data.epoch:
            return iter(())
        return data.batches(SIZE, ["id"], shuffle=shuffle, epochs=2)

    return read


WAYS = [lists, columns, torch, torch_loader, pytest.param(tensorflow, marks=pytest.mark.soak)]


@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("remainder", ["drop", "pad", "keep"])
def test_a_growth_a_loss_and_a_giving_way(
    source: ParquetSource, tmp_path: Path, way: Any, shuffle: bool, remainder: str
) -> None:
    """Two ranks, then three, of which one is lost after a checkpoint, then three, then two."""
    run = Worlds(source, tmp_path, remainder)
    read = way(shuffle)
    run.train(2, read, epochs=2, save_at=20)
    assert not run.lost
    run.train(3, read, epochs=2, save_at=9, then=4)
    repeated = run.lost.pop(0)
    assert sum(repeated.values()) == 3 * 4 * SIZE
    run.train(3, read, epochs=2, save_at=5)
    run.train(2, read, epochs=2)
    assert not run.lost
    assert_trained_once(run.kept, remainder, worlds=(2, 3, 3, 2))
    # What the lost world trained after its checkpoint is trained again, and nothing else is.
    assert set(repeated) <= set(run.kept[0])


def assert_trained_once(
    kept: dict[int, Counter[int]], remainder: str, worlds: Sequence[int]
) -> None:
    assert set(kept) == {0, 1}
    # Each world repeats rows for its own ranks, and the last one leaves rows out.
    repeated = sum(ranks - 1 for ranks in worlds)
    for ids in kept.values():
        assert set(ids) <= set(range(ROWS))
        assert ROWS - len(ids) <= (worlds[-1] - 1 if remainder == "drop" else 0)
        assert sum(ids.values()) - len(ids) <= (repeated if remainder == "pad" else 0)


def some_way(chance: random.Random, size: int) -> Way:
    shuffle, seed, drop_last = chance.random() < 0.6, chance.randrange(9), chance.random() < 0.3

    def read(data: RankData, epoch: int) -> Iterator[Mapping[str, Any]]:
        return data.batches(
            size, ["id"], shuffle=shuffle, seed=seed, epoch=epoch, drop_remainder=drop_last
        )

    return read


@pytest.mark.parametrize("seed", range(25))
def test_any_sequence_of_worlds(source: ParquetSource, tmp_path: Path, seed: int) -> None:
    """Of any sizes, with batches of any size; the last world trains what remains."""
    chance = random.Random(seed)
    remainder = chance.choice(["drop", "pad", "keep"])
    run = Worlds(source, tmp_path, remainder)
    for _ in range(chance.randrange(1, 5)):
        ranks, size = chance.randrange(1, 6), chance.choice([1, 7, 50, 200])
        mine = run.dealt(ranks)[0]
        whole = mine.rests.get("data", mine.shards["data"]).num_rows // size
        if whole < 2:
            break
        save_at, then = chance.randrange(1, whole), chance.randrange(3)
        run.train(ranks, some_way(chance, size), epochs=1, save_at=save_at, then=then)
    run.train(3, lists(True), epochs=1)
    ids = run.kept[0]
    assert ROWS - len(ids) <= (2 if remainder == "drop" else 0)
    # Each world repeats rows for its own ranks.
    assert sum(ids.values()) - len(ids) <= (2 + 4 * 4 if remainder == "pad" else 0)


def test_the_order_is_the_same_for_the_same_worlds(source: ParquetSource, tmp_path: Path) -> None:
    orders = []
    for number in range(2):
        run = Worlds(source, tmp_path / str(number))
        (tmp_path / str(number)).mkdir()
        found = [run.train(2, lists(True), epochs=2, save_at=10)]
        found.append(run.train(3, lists(True), epochs=2))
        orders.append(found)
    assert orders[0] == orders[1]
    rest = orders[0][1][0]
    assert rest != sorted(rest)


def test_the_ranks_of_a_world_have_equal_parts_of_the_rest(
    source: ParquetSource, tmp_path: Path
) -> None:
    run = Worlds(source, tmp_path)
    run.train(2, lists(True), epochs=1, save_at=30)
    rest = ROWS - 2 * 30 * SIZE
    assert {mine.rests["data"].num_rows for mine in run.dealt(4)} == {rest // 4}
    assert {mine.shards["data"].num_rows for mine in run.dealt(4)} == {ROWS // 4}


def test_a_later_epoch_begins_anew(source: ParquetSource, tmp_path: Path) -> None:
    run = Worlds(source, tmp_path, "keep")
    run.train(2, lists(True), epochs=2, save_at=20)
    run.train(3, lists(True), epochs=2, save_at=40)
    assert run.position is not None
    (leg,) = run.position.legs["data"]
    assert (leg.ranks, leg.epoch) == (3, 1)
    run.train(2, lists(True), epochs=2)
    assert_trained_once(run.kept, "keep", (2, 3, 2))


def test_a_checkpoint_at_the_end_of_an_epoch_continues_with_the_next(
    source: ParquetSource, tmp_path: Path
) -> None:
    run = Worlds(source, tmp_path, "keep")
    batches = -(-(ROWS // 2 + 1) // SIZE)
    run.train(2, lists(True), epochs=1, save_at=batches)
    for mine in run.dealt(3):
        assert (dict(mine.epochs), mine.rests) == ({"data": 1}, {})
    run.train(3, lists(True), epochs=2)
    assert_trained_once(run.kept, "keep", (2, 3))


def test_batches_of_several_epochs_in_one_call(source: ParquetSource, tmp_path: Path) -> None:
    run = Worlds(source, tmp_path, "keep")
    once = Counter(range(ROWS))
    batches = -(-(ROWS // 2 + 1) // SIZE)
    run.train(2, one_iterator(True), epochs=2, save_at=batches + 20)
    run.train(3, one_iterator(True), epochs=2)
    assert sum(run.kept.values(), Counter()) == once + once


def test_a_loop_that_begins_at_0_skips_what_is_trained(
    source: ParquetSource, tmp_path: Path
) -> None:
    run = Worlds(source, tmp_path)
    batches = ROWS // 2 // SIZE + 1
    run.train(2, lists(False), epochs=2, save_at=batches + 20)
    with open_datasets(run.dealt(1)[0], tmp_path / "one", 1).named["data"] as data:
        lengths = [
            sum(len(batch["id"]) for batch in data.batches(SIZE, epoch=epoch)) for epoch in range(3)
        ]
    assert lengths == [0, ROWS - 2 * 20 * SIZE, ROWS]


def test_passes_without_a_number(source: ParquetSource, tmp_path: Path) -> None:
    """A pass that was interrupted is continued, and one that ended begins again."""

    def read(data: RankData, epoch: int) -> Iterator[Mapping[str, Any]]:
        return data.batches(SIZE, ["id"])

    run = Worlds(source, tmp_path, "keep")
    run.train(2, read, epochs=1, save_at=20)
    run.train(3, read, epochs=1)
    assert run.kept[0] == Counter(range(ROWS))
    for mine in Worlds(source, tmp_path, position=run.position).dealt(1):
        with open_datasets(mine, tmp_path / "rest", 1).named["data"] as data:
            passes = [sum(len(b["id"]) for b in read(data, 0)) for _ in range(2)]
    assert passes == [ROWS - 2 * 20 * SIZE, ROWS]


def rank_of(source: ParquetSource, directory: Path) -> RankData:
    return open_datasets(Worlds(source, directory).dealt(2)[0], directory / "kept", 1).named["data"]


def test_an_evaluation_without_a_number_does_not_count(
    source: ParquetSource, tmp_path: Path
) -> None:
    with rank_of(source, tmp_path) as data:
        training = data.batches(SIZE, epoch=4)
        next(training)
        before = data.legs
        assert (before[-1].epoch, before[-1].batches) == (4, 1)
        list(data.batches(SIZE))
        assert data.legs == before
        next(training)
        assert data.legs[-1].batches == 2


def test_two_loops_in_turn_begin_the_epoch_again_with_a_warning(
    source: ParquetSource, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with rank_of(source, tmp_path) as data:
        both = zip(data.batches(SIZE, epoch=1), data.batches(SIZE, epoch=2), strict=True)
        list(itertools.islice(both, 3))
        assert [(leg.epoch, leg.batches) for leg in data.legs] == [(1, 0)]
        assert "start of the epoch" in caplog.text
        del both
        next(data.batches(SIZE, epoch=3))
        assert [(leg.epoch, leg.batches) for leg in data.legs] == [(3, 1)]


@pytest.mark.parametrize("way", WAYS)
def test_an_evaluation_within_an_epoch_does_not_pass_for_its_end(
    source: ParquetSource,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    way: Callable[[bool], Way],
) -> None:
    with rank_of(source, tmp_path) as data:
        training = way(False)(data, 4)
        next(training)
        list(data.torch(SIZE, ["id"], epoch=6))
        assert [(leg.epoch, leg.batches) for leg in data.legs] == [(4, 0)]
        assert "start of the epoch" in caplog.text


@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_that_is_left_early_is_over(
    source: ParquetSource, tmp_path: Path, way: Callable[[bool], Way]
) -> None:
    with rank_of(source, tmp_path) as data:
        training = way(False)(data, 4)
        next(training)
        del training
        next(iter(way(False)(data, 5)))
        assert [(leg.epoch, leg.batches) for leg in data.legs] == [(5, 1)]


def test_a_graph_of_tensorflow_begins_the_epoch_again_with_a_warning(
    source: ParquetSource, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import tensorflow as tf

    caplog.set_level(logging.WARNING)

    @tf.function
    def count(dataset: Any) -> Any:
        rows = tf.constant(0, tf.int64)
        for batch in dataset:
            rows += tf.size(batch["id"], tf.int64)
        return rows

    with rank_of(source, tmp_path) as data:
        assert int(count(data.tensorflow(SIZE, ["id"]))) == data.num_rows
        assert [(leg.epoch, leg.batches) for leg in data.legs] == [(0, 0)]
        assert "completed(epoch)" in caplog.text
        data.completed(0)
        assert [(leg.epoch, leg.batches) for leg in data.legs] == [(1, 0)]
        with pytest.raises(ConfigError, match="epoch=-1"):
            data.completed(-1)


def test_a_fit_of_keras(source: ParquetSource, tmp_path: Path) -> None:
    """It begins iterators that it does not use, which are no epochs."""
    import keras

    run = Worlds(source, tmp_path)
    run.train(2, lists(False), epochs=1, save_at=20)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    seen: list[tuple[int, int]] = []

    class Steps(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            seen.append((epoch, 0))

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            seen[-1] = (seen[-1][0], batch + 1)
            assert data.legs[-1].epoch <= seen[-1][0]

    with open_datasets(run.dealt(1)[0], tmp_path / "keras", 1).named["data"] as data:
        pairs = data.tensorflow(SIZE, ["x", "y"]).map(lambda batch: (batch["x"], batch["y"]))
        for epoch in range(data.epoch, 3):
            model.fit(pairs, initial_epoch=epoch, epochs=epoch + 1, verbose=0, callbacks=[Steps()])
            assert data.legs[-1].epoch <= epoch + 1
            data.completed(epoch)
            assert [(leg.epoch, leg.batches) for leg in data.legs] == [(epoch + 1, 0)]
    whole = -(-ROWS // SIZE)
    assert seen == [(0, -(-(ROWS - 2 * 20 * SIZE) // SIZE)), (1, whole), (2, whole)]
    with rank_of(source, tmp_path) as data:
        pairs = data.tensorflow(SIZE, ["x", "y"]).map(lambda batch: (batch["x"], batch["y"]))
        seen.clear()
        model.fit(pairs, epochs=3, verbose=0, callbacks=[Steps()])
    assert [epoch for epoch, _ in seen] == [0, 1, 2]


def test_a_world_that_reads_nothing_keeps_the_position(
    source: ParquetSource, tmp_path: Path
) -> None:
    run = Worlds(source, tmp_path)
    run.train(2, lists(True), epochs=2, save_at=20)
    for ranks in (3, 1):
        for mine in run.dealt(ranks):
            view = open_datasets(mine, tmp_path / f"{ranks}", 1)
            with view.named["data"]:
                assert view.position() == run.position


LEG = Leg(2, epoch=1, batches=10, size=4)


def test_ranks_in_step() -> None:
    assert are_in_step([LEG, LEG])
    assert not are_in_step([LEG, replace(LEG, batches=11)])
    assert are_in_step([replace(LEG, ended=True), replace(LEG, batches=11)])
    assert not are_in_step([LEG, replace(LEG, batches=11, ended=True)])
    assert not are_in_step([LEG, replace(LEG, size=8)])


def test_the_position_of_ranks_that_were_not_in_step_is_the_least(
    caplog: pytest.LogCaptureFixture,
) -> None:
    positions = [Position({"a": (replace(LEG, batches=n),), "b": (LEG,)}) for n in (10, 8, 9)]
    assert common_position(positions) == positions[1]
    assert "'a' in step" in caplog.text
    ended = Position({"a": (replace(LEG, batches=9, ended=True),)})
    whole = Position({"a": (LEG,)})
    assert common_position([ended, whole]) == whole
    assert common_position([whole]) == whole


def test_a_position_travels_as_json() -> None:
    position = Position({"a": (LEG, replace(LEG, seed=4)), "b": ()})
    assert Position.from_fields(position.as_fields()) == position
    for damaged in ({}, {"version": 9}, {"version": 1, "datasets": {"a": [{"x": 1}]}}):
        with pytest.raises(StoreError, match="version that saved"):
            Position.from_fields(damaged)


@pytest.mark.parametrize(
    ("rows", "size", "readers"), [(100, 10, 3), (105, 10, 3), (5, 10, 2), (0, 1, 2), (64, 8, 1)]
)
def test_readers_have_whole_batches_in_turn(rows: int, size: int, readers: int) -> None:
    ends = reader_ends(rows, size, readers)
    assert (ends[0], ends[-1], len(ends)) == (0, rows, readers + 1)
    lengths = [end - begin for begin, end in itertools.pairwise(ends)]
    batches = [-(-length // size) for length in lengths]
    assert batches == [len(range(n, -(-rows // size), readers)) for n in range(readers)]
    assert sum(length % size > 0 for length in lengths) <= 1


@pytest.mark.parametrize("seed", range(50))
def test_rows_are_left_out(seed: int) -> None:
    chance = random.Random(seed)
    bundles = [(Slice(0, group, 0, 40),) for group in range(3)]
    gone = [
        Slice(0, chance.randrange(3), chance.randrange(30), chance.randrange(1, 10))
        for _ in range(chance.randrange(12))
    ]
    left = remove_rows(bundles, gone)

    def rows(parts: Any) -> list[tuple[int, int]]:
        return [(p.group, n) for p in parts for n in range(p.first, p.first + p.rows)]

    found = rows(itertools.chain.from_iterable(left))
    assert found == sorted(set(rows(itertools.chain(*bundles))) - set(rows(gone)))
    assert all(part.rows for bundle in left for part in bundle)


def test_few_rows_of_an_epoch_remain(source: ParquetSource) -> None:
    """With `drop` the epoch is over; with `pad` the rows repeat; with `keep` a rank has none."""
    leg = Leg(1, batches=ROWS - 2, size=1)
    assert plan_epoch(source, 5, [leg]).epoch == 1
    padded = plan_epoch(source, 5, [leg], remainder="pad")
    assert [shard.num_rows for shard in padded.rests] == [1] * 5
    kept = plan_epoch(source, 5, [leg], remainder="keep")
    assert [shard.num_rows for shard in kept.rests] == [1, 1, 0, 0, 0]
    with pytest.raises(ConfigError, match="use fewer workers"):
        plan_epoch(source, ROWS + 1, [leg])
