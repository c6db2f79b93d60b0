"""session() on a real cluster."""

from __future__ import annotations

import subprocess
import sys
import textwrap

SCRIPT = """
    from pyspark import SparkContext
    import hopsgpu

    start = SparkContext._initialize_context
    starts = []

    def tripping(self, conf):
        '''The first context is up, and is stopped as Spark does when its UI trips over itself.'''
        context = start(self, conf)
        starts.append(context)
        if len(starts) == 1:
            interface = context.sc().ui().get()
            context.stop()
            interface.attachHandler(None)
        return context

    SparkContext._initialize_context = tripping
    spark = hopsgpu.session("trips")
    print("starts", len(starts), "rows", spark.range(5).count())
"""


def test_a_start_that_tripped_over_sparks_own_race_is_repeated(
    cluster_env: dict[str, str],
) -> None:
    """Seen in CI: the application master's UI filter came while Spark attached its pages."""
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        env=cluster_env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "starts 2 rows 5" in ran.stdout, ran.stderr
