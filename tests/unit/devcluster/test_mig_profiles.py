"""The MIG devices of simulated GPUs."""

from __future__ import annotations

import pytest

from hopsgpu.devcluster.config import ClusterSpec
from hopsgpu.devcluster.mig_profiles import memory_mib, parse_mig, simulated_gpu
from hopsgpu.errors import ConfigError


def test_profiles_and_the_gpu_that_has_room_for_them() -> None:
    assert parse_mig("1g.10gb:2") == ("1g.10gb",) * 2
    mixed = parse_mig("3g.20gb:1, 1g.5gb:2,1g.5gb+me:1")
    assert mixed == ("3g.20gb", "1g.5gb", "1g.5gb", "1g.5gb+me")
    assert simulated_gpu(()) == ("Simulated A100", 40960)
    assert simulated_gpu(mixed) == ("Simulated A100", 40960)
    assert simulated_gpu(("1g.10gb",) * 7) == ("Simulated A100 80GB", 81920)
    # As an A100's nvidia-smi shows them.
    assert (memory_mib("1g.5gb"), memory_mib("1g.10gb")) == (4864, 9728)


@pytest.mark.parametrize(
    "text", ["", "1g.10gb", "1g.10gb:0", "8g.10gb:1", "1g:1", "1g.5gb:1,", "x"]
)
def test_what_is_no_list_of_profiles(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must be PROFILE:COUNT"):
        parse_mig(text)


@pytest.mark.parametrize("text", ["3g.20gb:2,2g.10gb:1", "1g.99gb:2"])
def test_more_than_a_gpu_has(text: str) -> None:
    with pytest.raises(ConfigError, match=r"compute slices and .* GB: request fewer"):
        parse_mig(text)


def test_a_cluster_with_mig_devices() -> None:
    spec = ClusterSpec(gpus_per_node=2, mig="3g.20gb:1,1g.5gb:4")
    assert (spec.counted_gpus, ClusterSpec(gpus_per_node=3).counted_gpus) == (10, 3)
    with pytest.raises(ConfigError, match=r"no GPU to divide"):
        ClusterSpec(gpus_per_node=0, mig="1g.5gb:1")
