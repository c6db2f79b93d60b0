"""What a container's clients of the lake are told by variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopsgpu.control.peer import lake_environment


def test_shipped_certificates_are_used_where_the_node_names_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
    assert lake_environment(None, {"A": "b"}) == {"A": "b"}
    bundle = tmp_path / "hopsgpu-authorities.pem"
    bundle.touch()
    assert lake_environment(None, {}) == {"REQUESTS_CA_BUNDLE": str(bundle)}
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/etc/ca.pem")
    assert lake_environment("alice", {}) == {"HADOOP_USER_NAME": "alice"}
