"""A temporary filter of single messages in Spark's log, about which hopsgpu reports itself."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from py4j.protocol import Py4JError


@contextlib.contextmanager
def silenced(jvm: Any, logger: str, *messages: str) -> Iterator[None]:
    """While inside, suppress some messages of a logger, whatever their cause.

    If Spark does not log with Log4j 2, nothing changes.

    Args:
        jvm: PySpark's view of the JVM.
        logger: name of the logger that writes them.
        messages: their prefixes.
    """
    try:
        config, deny = _config_of(jvm, logger), _filter(jvm, messages)
        config.addFilter(deny)
    except (Py4JError, TypeError):  # a class that is not there is a package, and is called in vain
        yield
        return
    try:
        yield
    finally:
        # That the JVM has ended meanwhile, or the interpreter does, is told by others.
        with contextlib.suppress(Py4JError, OSError):
            config.removeFilter(deny)


def _config_of(jvm: Any, logger: str) -> Any:
    """Return the configuration that applies to a logger: mostly the root's.

    Creating one of its own would change its level, which Spark takes for the user's choice.
    """
    # Whose code runs here may have another class loader, and with it another configuration.
    loader = jvm.java.lang.ClassLoader.getSystemClassLoader()
    context = jvm.org.apache.logging.log4j.LogManager.getContext(loader, False)
    return context.getConfiguration().getLoggerConfig(logger)


def _filter(jvm: Any, messages: Sequence[str]) -> Any:
    """Return a filter of messages with the given prefixes."""
    core = jvm.org.apache.logging.log4j.core
    results = core.Filter.Result
    string = jvm.java.lang.Class.forName("java.lang.String")
    no_flags = jvm.java.lang.reflect.Array.newInstance(string, 0)
    pattern = f"(?s)(?:{'|'.join(map(re.escape, messages))}).*"
    return core.filter.RegexFilter.createFilter(
        pattern, no_flags, False, results.DENY, results.NEUTRAL
    )
