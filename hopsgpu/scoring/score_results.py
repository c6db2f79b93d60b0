"""The result of `score`: a frozen value with a readable repr."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hopsgpu.core.gpu_losses import time_not_training
from hopsgpu.core.scores import ScoreOutcome
from hopsgpu.display.cards import score_card
from hopsgpu.units import count_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class ScoreResult(ScoreOutcome):
    """The result of a score.

    Attributes:
        run_id: names the score's directory on the lake; `score(resume=run_id)` resumes a score that
            ended early.
        url: URL of the output, a directory of Parquet files whose names have the order of the rows;
            "" if the score ended early: then there is no output.
        rows: number of rows of the output; of a score that ended early, of the parts that it kept.
        schema: the output's pyarrow.Schema; None if no part was scored.
        failed_parts: with `on_error="skip"`, what is left out of the output.
        gpu_seconds: how the GPU time of this run was spent; `training` is that of scoring.
        timeline: `granted` is when the first executor was ready, `started` when the first process
            ran, `returned` when the last part was scored, `published` when the output was there.
        moments: GPUs held and used over time.
        warnings: warnings for the user.
        application: ID of the Spark application.
        queue: its YARN queue; "" without YARN.
    """

    __module__ = "hopsgpu.types"

    def df(self, spark: SparkSession) -> DataFrame:
        """Return the output as a DataFrame of a session.

        As with any directory of Parquet, Spark may return the rows in another order than that of
        the files; keep a column to sort by.
        """
        return spark.read.parquet(self.url)

    @property
    def time_not_training(self) -> str:
        """Most of the GPU time that was not spent training, and how to reduce it.

        The text is "" if little was lost, or if the run held GPUs for less than a minute of GPU
        time.
        """
        return time_not_training(self.gpu_seconds)

    def __repr__(self) -> str:
        parts = [f"run_id={self.run_id!r}", f"url={self.url!r}", count_of(self.rows, "row")]
        if self.schema is not None:
            parts.append(f"columns={self.schema.names!r}")
        if self.failed_parts:
            parts.append(f"{count_of(len(self.failed_parts), 'failed part')}")
        parts += [f"warnings={self.warnings!r}"] if self.warnings else []
        parts += [str(self.timeline), str(self.gpu_seconds)]
        return f"ScoreResult({', '.join(parts)})"

    def _repr_html_(self) -> str:
        return score_card(self)
