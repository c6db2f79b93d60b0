"""Secrets of a user that readers of the user's run records and logs could see."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from hopsgpu.core.own_log import _StderrHandler
from hopsgpu.core.redaction import redact
from hopsgpu.core.run_record import encode, parse
from tests.unit.records import NEW, record_of

SECRET = "Zm9vYmFyc2VjcmV0"
NAMES = (
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_SAS_TOKEN",
    "CONTAINER_SAS",
    "sas",
    "SENTRY_DSN",
    "SLACK_WEBHOOK_URL",
    "DB_PASSWORD",
    "SSH_PASSPHRASE",
    "MY_SECRET",
)
TEXTS = (
    f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={SECRET}==;EndpointSuffix=x.net",
    f"Endpoint=sb://a.net/;SharedAccessKeyName=Root;SharedAccessKey={SECRET}=",
    f"https://a.blob.core.windows.net/c/f?sv=2024-01-01&se=2026&sr=c&sp=r&sig={SECRET}%3D",
    f"https://b.s3.amazonaws.com/k?X-Amz-Credential={SECRET}/eu/s3&X-Amz-Signature={SECRET}",
    f"http://nn:9870/webhdfs/v1/f?op=OPEN&delegation={SECRET}",
    f"https://hooks.slack.com/services/T0/B0/{SECRET}",
    f"https://discord.com/api/webhooks/12/{SECRET}",
    f"https://org.webhook.office.com/webhookb2/{SECRET}@x/IncomingWebhook/y",
    f"https://{SECRET}@github.com/org/repo.git",
    f"pip install --index-url=https://{SECRET}@pypi.corp/simple failed",
    f"postgres://ann:{SECRET}@db/x",
    f"postgres://ann:a/{SECRET}@db/x",
    f"amqp://ann:a?b#c/{SECRET}@db",
    f"redis://:{SECRET}@h1:6379/0,redis://:b/{SECRET}@h2",
    f"the server said: token=hf_{SECRET}{SECRET}",
    f"ghp_{SECRET}{SECRET}",
)
HARMLESS = (
    "hdfs://nn:8020/a@b",
    "mongodb://h1:27017,h2:27017/a@b",
    "abfss://container@account.dfs.core.windows.net/models",
    "https://host:8080/path?mail=a@b.c&page=2",
    "https://example.org/a@b",
    "batch=32, lr=0.1, tokens seen: 12, monkey=1, design=x",
    "ann@example.org",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_variable_with_the_name_of_a_secret_is_hidden(name: str) -> None:
    assert redact({name: SECRET}) == {name: "(redacted)"}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_with_a_secret_loses_it(text: str) -> None:
    shown = redact({"VALUE": text})["VALUE"]
    assert SECRET not in shown and "(redacted)" in shown


@pytest.mark.parametrize("text", HARMLESS)
def test_a_text_without_a_secret_stays(text: str) -> None:
    assert redact({"PLACE": text, "MODE": "fast"}) == {"PLACE": text, "MODE": "fast"}


def test_no_field_of_a_record_has_a_secret() -> None:
    begin = "x" * 63_990
    record = replace(
        record_of(NEW, "failed", 1e9),
        error="\n".join(TEXTS) + begin + TEXTS[8],
        warnings=TEXTS,
        waiting_details=TEXTS,
    )
    content = encode(record)
    assert SECRET.encode() not in content
    assert parse(content).warnings[0].startswith("DefaultEndpointsProtocol=https;")
    assert json.loads(content)["run_id"] == NEW


def test_no_message_of_the_log_has_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    for text in TEXTS:
        record = logging.LogRecord("hopsgpu", logging.INFO, "", 1, "read %s", (text,), None)
        _StderrHandler("info").emit(record)
    shown = capsys.readouterr().err
    assert SECRET not in shown and shown.count("read") == len(TEXTS)
