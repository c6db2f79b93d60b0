"""Where the queues of gangs are."""

from __future__ import annotations

import pytest

from hopsgpu.backends.gang_queue_root import gang_queue_root
from hopsgpu.errors import ConfigError


def test_the_place_is_named_or_on_the_default_file_system() -> None:
    place, names = gang_queue_root("hdfs://other/locks", "hdfs://host", "blue")
    assert (place.url, names) == ("hdfs://other/locks", ("blue",))
    place, names = gang_queue_root(None, "hdfs://host", "blue")
    assert (place.url, names) == ("hdfs://host/tmp", ("hopsgpu", "locks", "blue"))


@pytest.mark.parametrize(
    ("locks", "files"), [("s3://bucket/locks", "hdfs://host"), (None, "s3a://bucket")]
)
def test_the_place_is_not_on_an_object_store(locks: str | None, files: str) -> None:
    with pytest.raises(ConfigError, match=r"queues of gangs must be on HDFS .*hopsgpu\.locks"):
        gang_queue_root(locks, files, "blue")
