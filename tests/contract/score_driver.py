"""A user's script that scores tables without a cluster: a line of JSON for each thing it did."""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

import hopsgpu

DIRECTORY = Path(sys.argv[1])
ROWS = 1000
Batch = dict[str, np.ndarray[Any, Any]]


def tell(step: str, **fields: Any) -> None:
    print("TOLD " + json.dumps({"step": step, **fields}), flush=True)


class Scaled:
    """Multiplies by what is in the model, and leaves a file for each object that is made."""

    def __init__(self, model_dir: Path) -> None:
        self.factor = float((model_dir / "factor").read_text())
        (DIRECTORY / "made").mkdir(exist_ok=True)
        (DIRECTORY / "made" / str(os.getpid())).write_text(str(model_dir))

    def __call__(self, batch: Batch) -> Batch:
        assert not batch["x"].flags.writeable
        both = np.stack([batch["x"], -batch["x"]], axis=1)
        return {"y": batch["x"] * self.factor, "pair": both}


def doubled(batch: Batch) -> pa.RecordBatch:
    return pa.record_batch({"y": 2 * batch["x"]})


class CannotBeMade:
    def __init__(self) -> None:
        raise LookupError("no weights")

    def __call__(self, batch: Batch) -> Batch:
        return batch


def loses_its_process_once(batch: Batch) -> Batch:
    lost = DIRECTORY / "lost"
    if 500 in batch["id"] and not lost.exists():
        lost.touch()
        os._exit(3)
    return {"y": batch["x"]}


def fails_on_row_500(batch: Batch) -> Batch:
    if 500 in batch["id"]:
        with (DIRECTORY / "failures").open("a") as file:
            file.write(f"{os.getpid()}\n")
        raise LookupError("no such row")
    return {"y": batch["x"]}


def squeezed(batch: Batch) -> Batch:
    with (DIRECTORY / "squeezed").open("a") as file:
        file.write(f"{len(batch['x'])}\n")
    return {"y": batch["x"][:, None].squeeze()}


def slow(batch: Batch) -> Batch:
    with (DIRECTORY / "pids").open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(0.2 if (DIRECTORY / "interrupted").exists() else 1.0)
    return {"y": batch["x"]}


def interrupt(table: str, output: str) -> str:
    """Press Ctrl-C once a part is kept; return the run's id."""
    runs: list[str] = []

    def press(status: hopsgpu.types.ScoreStatus) -> None:
        if status.done and not runs:
            runs.append(status.run_id)
            os.kill(os.getpid(), signal.SIGINT)

    try:
        hopsgpu.score(slow, table, columns=["x"], output=output, gpus_per_worker=0, progress=press)
    except KeyboardInterrupt as error:
        pids = {int(pid) for pid in (DIRECTORY / "pids").read_text().split()}
        alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        tell("interrupted", said=str(error), alive=alive, there=Path(output).exists())
    return runs[0]


def write_table() -> str:
    """A table of 1,000 rows in two files, of row groups of 100."""
    home = DIRECTORY / "table"
    home.mkdir()
    for number in range(2):
        ids = np.arange(ROWS // 2) + number * ROWS // 2
        columns = {"id": ids, "x": ids / 10, "name": [f"row {n}" for n in ids], "odd": [{"a": 1}]}
        columns["odd"] = [{"a": int(n)} for n in ids]
        columns["at"] = [datetime.datetime.fromtimestamp(int(n), datetime.UTC) for n in ids]
        path = home / f"part-{number}.parquet"
        # As Spark writes timestamps.
        parquet.write_table(
            pa.table(columns), path, row_group_size=100, use_deprecated_int96_timestamps=True
        )
    return str(home)


def rows_of(result: hopsgpu.types.ScoreResult) -> dict[str, list[Any]]:
    """The output in the order of its files."""
    files = sorted(Path(result.url.removeprefix("file://")).iterdir())
    found: dict[str, list[Any]] = pa.concat_tables(map(parquet.read_table, files)).to_pydict()
    return found


def failed(step: str, predict: Any, table: str, **options: Any) -> hopsgpu.types.ScoreResult:
    try:
        hopsgpu.score(predict, table, progress="off", gpus_per_worker=0, **options)
    except hopsgpu.HopsGpuError as error:
        result = getattr(error, "result", None)
        tell(step, said=str(error), result=repr(result))
        return result
    raise AssertionError("it did not fail")


def main() -> None:
    spark = hopsgpu.session("scores")
    store = hopsgpu.ModelStore(f"file://{DIRECTORY}/hopsgpu/models")
    model = DIRECTORY / "model"
    model.mkdir()
    (model / "factor").write_text("3")
    store.publish(model, "scaled", tags=["production"])
    table = write_table()
    statuses: list[hopsgpu.types.ScoreStatus] = []
    result = hopsgpu.score(
        Scaled,
        table,
        model="scaled@production",
        output=str(DIRECTORY / "scored"),
        columns=["x"],
        keep=["name", "id", "odd", "at"],
        batch_size=64,
        max_concurrent=2,
        gpus_per_worker=0,
        progress=statuses.append,
    )
    found = rows_of(result)
    made = {path.name: path.read_text() for path in (DIRECTORY / "made").iterdir()}
    tell(
        "scored",
        url=result.url,
        rows=result.rows,
        columns=result.schema.names,
        ids=found["id"],
        names=found["name"][:2],
        odd=found["odd"][-1],
        y=found["y"],
        pair=found["pair"][7],
        made=made,
        left=[path.name for path in DIRECTORY.iterdir() if path.name.startswith(".")],
        repr=repr(result),
        html=result._repr_html_(),
        spark=result.df(spark).count(),
        at=result.df(spark)
        .selectExpr("typeof(at)", "unix_timestamp(at) = id")
        .distinct()
        .collect(),
        last=[statuses[-1].scored, statuses[-1].parts, statuses[-1].done, statuses[-1].state],
        run=result.run_id,
    )
    frame = spark.range(300).selectExpr("id", "id * 0.5 AS x").coalesce(1)
    result = hopsgpu.score(doubled, frame, keep=["id"], gpus_per_worker=0, progress="off")
    found = rows_of(result)
    tell("frame", ids=found["id"], y=found["y"], url=result.url, run=result.run_id)
    lost = hopsgpu.score(
        loses_its_process_once, table, columns=["id", "x"], gpus_per_worker=0, progress="off"
    )
    tell("lost", y=rows_of(lost)["y"], warnings=lost.warnings)
    columns = ["id", "x"]
    abandoned = str(DIRECTORY / "abandoned")
    options: dict[str, Any] = {"columns": columns, "output": abandoned}
    failed("failed", fails_on_row_500, table, max_concurrent=1, **options)
    tries = (DIRECTORY / "failures").read_text().splitlines()
    left = [sorted(p.name for p in path.iterdir()) for path in DIRECTORY.glob(".abandoned-*")]
    skipped = hopsgpu.score(
        fails_on_row_500,
        table,
        keep=["id"],
        on_error="skip",
        gpus_per_worker=0,
        progress="off",
        **options,
    )
    tell(
        "skipped",
        ids=rows_of(skipped)["id"],
        parts=[[part.first, part.rows, part.place] for part in skipped.failed_parts],
        tries=len(set(tries)),
        left=left,
        later=[str(path) for path in DIRECTORY.glob(".abandoned-*")],
    )
    output = str(DIRECTORY / "slow")
    run = interrupt(table, output)
    (DIRECTORY / "interrupted").touch()
    failed("other columns", slow, table, columns=["x"], keep=["name"], resume=run)
    before = time.time()
    result = hopsgpu.score(
        slow, table, columns=["x"], resume=run, gpus_per_worker=0, progress="off"
    )
    files = list(Path(output).iterdir())
    new = [path for path in files if path.stat().st_mtime > before]
    tell(
        "continued",
        y=rows_of(result)["y"],
        url=result.url,
        run=result.run_id,
        was=run,
        new=len(new),
        files=len(files),
    )
    unmade = str(DIRECTORY / "unmade")
    failed("not made", CannotBeMade, table, columns=["x"], on_error="skip", output=unmade)
    tell("nothing left", names=[path.name for path in DIRECTORY.glob("*unmade*")])
    failed(
        "squeezed", squeezed, table, columns=["x"], batch_size=33, on_error="skip", max_concurrent=1
    )
    tell("squeezed sizes", sizes=(DIRECTORY / "squeezed").read_text().split())
    failed("exists", doubled, table, columns=["x"], output=str(DIRECTORY / "scored"))
    failed("within", doubled, table, columns=["x"], output=f"{table}/scored")
    failed("complete", slow, table, columns=["x"], resume=run)
    failed("no column", doubled, table, columns=["y"])
    failed("odd", doubled, table, columns=["odd"])
    failed("no model", Scaled, table, columns=["x"], model="scaled@9")
    failed("no class", Scaled, table, columns=["x"])


main()
