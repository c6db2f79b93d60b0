"""Two processes of JAX that find each other by the environment. They run the example."""

from __future__ import annotations

import pytest

from tests.contract.framework_ranks import EXAMPLES, local_gang, results


def test_a_psum_over_processes() -> None:
    example = EXAMPLES / "jax_processes.py"
    ranks = results(local_gang(2), example, "train", steps=20)
    (alone,) = results(local_gang(1), example, "train", steps=20)
    assert alone["losses"][-1] < 0.01 * alone["losses"][0]
    for rank in ranks:
        assert rank["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        assert rank["weights"] == pytest.approx(alone["weights"], abs=1e-5)
