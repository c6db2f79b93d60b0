"""A temporary filter for messages in Spark's log that hopsgpu replaces by its own."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def suppressed(jvm: Any, logger: str, *messages: str) -> Iterator[None]:
    """Suppress some messages of a logger while inside the context, whatever their cause.

    If Spark does not log with Log4j 2, nothing changes.

    Args:
        messages: prefixes of the messages.
    """
    # Import it only here: py4j may belong to a cluster's own Spark, which a session finds first.
    from py4j.protocol import Py4JError

    try:
        config, deny = _config_of(jvm, logger), _filter(jvm, messages)
        config.addFilter(deny)
    except (Py4JError, TypeError):  # py4j takes a missing class for a package, without methods
        yield
        return
    try:
        yield
    finally:
        # Other code reports the end of the JVM or of the interpreter.
        with contextlib.suppress(Py4JError, OSError):
            config.removeFilter(deny)


def _config_of(jvm: Any, logger: str) -> Any:
    """Return the configuration that applies to a logger: usually the root's.

    A separate configuration of the logger would change its level, which Spark would take for the
    user's choice.
    """
    # The current thread may have another class loader and so another configuration.
    loader = jvm.java.lang.ClassLoader.getSystemClassLoader()
    context = jvm.org.apache.logging.log4j.LogManager.getContext(loader, False)
    return context.getConfiguration().getLoggerConfig(logger)


def _filter(jvm: Any, messages: Sequence[str]) -> Any:
    core = jvm.org.apache.logging.log4j.core
    results = core.Filter.Result
    string = jvm.java.lang.Class.forName("java.lang.String")
    no_flags = jvm.java.lang.reflect.Array.newInstance(string, 0)
    pattern = f"(?s)(?:{'|'.join(map(re.escape, messages))}).*"
    return core.filter.RegexFilter.createFilter(
        pattern, no_flags, False, results.DENY, results.NEUTRAL
    )
