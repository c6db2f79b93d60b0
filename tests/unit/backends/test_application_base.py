"""What is known of an application while its JVM is there, and afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hopsgpu.backends.spark.application_base import SparkApplication


def test_who_and_what_it_was_is_known_after_its_jvm_has_ended() -> None:
    """The record of the run that ended with the JVM shows it."""
    context: Any = SimpleNamespace(applicationId="application_1_1")
    jvm: Any = SimpleNamespace(user=lambda: "ann")
    application = SparkApplication(context, jvm)
    assert (application.id, application.user) == ("application_1_1", "ann")
    del context.applicationId, jvm.user
    assert (application.id, application.user) == ("application_1_1", "ann")
