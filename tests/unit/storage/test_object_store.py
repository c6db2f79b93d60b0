"""URLs on object stores, and the errors of their libraries."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from hopsgpu.errors import ConfigError
from hopsgpu.storage.error_messages import explain
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.object_store import as_exception


class NoCredentialsError(Exception):
    """Of botocore."""


class Answer(Exception):
    """An error with the attributes of the libraries' errors."""

    def __init__(self, text: str, **found: Any) -> None:
        super().__init__(text)
        for name, value in found.items():
            setattr(self, name, value)


def of_s3(code: str, status: int, text: str = "") -> Answer:
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return Answer(text or f"An error occurred ({code})", response=answer)


@pytest.mark.parametrize(
    ("error", "kind", "retryable", "advice"),
    [
        (of_s3("AccessDenied", 403), "permission", False, "policy of the bucket"),
        (of_s3("NoSuchBucket", 404), "absent", False, ""),
        (of_s3("PreconditionFailed", 412), "exists", False, ""),
        (of_s3("SlowDown", 503), "unreachable", True, "AWS_ENDPOINT_URL"),
        (of_s3("ConditionalRequestConflict", 409), "unreachable", True, "AWS_ENDPOINT_URL"),
        (of_s3("InvalidRequest", 400), "", False, ""),
        (of_s3("400", 400, "Bad Request"), "permission", False, "credentials have expired"),
        (ValueError("Invalid endpoint: minio:9000"), "", False, "http:// or https://"),
        (Answer("of gcsfs", code=429), "unreachable", True, "AWS_ENDPOINT_URL"),
        (OSError("Forbidden: b/o/k\nno access"), "permission", False, "policy of the bucket"),
        (Answer("of azure.core", status_code=409), "unreachable", True, "AWS_ENDPOINT_URL"),
        (NoCredentialsError("Unable to locate"), "permission", False, ""),
        (ConnectionResetError("reset by peer"), "unreachable", True, "AWS_ENDPOINT_URL"),
        (TimeoutError(), "unreachable", True, "no answer in time"),
    ],
)
def test_kinds_of_errors(error: Exception, kind: str, retryable: bool, advice: str) -> None:
    meaning = explain(as_exception(error))
    assert (meaning.kind, meaning.is_retryable) == (kind, retryable)
    assert advice in str(meaning) and "HDFS" not in str(meaning)


def test_first_cause_with_an_answer_counts() -> None:
    try:
        try:
            raise of_s3("AccessDenied", 403)
        except Answer as cause:
            raise PermissionError("Access Denied") from cause
    except PermissionError as error:
        assert explain(as_exception(error)).kind == "permission"


def test_urls_of_object_stores() -> None:
    assert (LakePath("s3://bucket") / "models").url == "s3://bucket/models"
    azure = LakePath("abfss://box@account.dfs.core.windows.net/lake/")
    assert (azure / "x").path == "/lake/x" and azure.is_object_store
    assert not LakePath("hdfs://host/x").is_object_store
    with pytest.raises(ConfigError, match="s3://bucket/x"):
        LakePath("s3:///x")


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for url, name, extra in (
        ("s3://b/x", "s3fs", "s3"),
        ("gs://b/x", "gcsfs", "gcs"),
        ("abfss://c@a.dfs.core.windows.net/x", "adlfs", "azure"),
    ):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError, match=rf"{name}: .*hopsgpu\[{extra}\]"):
            LakePath(url).stat()
