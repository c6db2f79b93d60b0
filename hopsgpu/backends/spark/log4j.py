"""Single messages kept out of Spark's log, for a while: those of which hopsgpu tells itself."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from py4j.protocol import Py4JError


@contextlib.contextmanager
def silenced(jvm: Any, logger: str, *messages: str) -> Iterator[None]:
    """While inside, some messages are not logged, whoever has a cause for them.

    Where Spark logs by something else than Log4j 2 it goes on as before.

    Args:
        jvm: PySpark's view of the JVM.
        logger: name of the logger that has them.
        messages: what they begin with.
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
    """Return what the settings say for a logger: mostly the root's.

    One of its own would change its level: Spark takes it for the user's word.
    """
    # Whose code runs here may have another class loader, and with it another configuration.
    loader = jvm.java.lang.ClassLoader.getSystemClassLoader()
    context = jvm.org.apache.logging.log4j.LogManager.getContext(loader, False)
    return context.getConfiguration().getLoggerConfig(logger)


def _filter(jvm: Any, messages: Sequence[str]) -> Any:
    """Return a filter of messages that begin so."""
    core = jvm.org.apache.logging.log4j.core
    results = core.Filter.Result
    string = jvm.java.lang.Class.forName("java.lang.String")
    no_flags = jvm.java.lang.reflect.Array.newInstance(string, 0)
    pattern = f"(?s)(?:{'|'.join(map(re.escape, messages))}).*"
    return core.filter.RegexFilter.createFilter(
        pattern, no_flags, False, results.DENY, results.NEUTRAL
    )
