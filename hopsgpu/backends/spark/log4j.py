"""Spark's log: messages that hopsgpu suppresses for a time, and messages that hopsgpu reads."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# A character that Spark does not log.
_SEPARATOR = "\x1e"


class Log4jFilters:
    """Filters that are installed in Spark's log; `remove` them.

    Args:
        regexes_by_logger: regular expressions of the beginnings of messages that are not logged.
    """

    def __init__(self, jvm: Any, regexes_by_logger: Mapping[str, Sequence[str]]) -> None:
        # Import it only here: py4j may belong to a cluster's own Spark, which a session finds
        # first.
        from py4j.protocol import Py4JError

        self._errors = (Py4JError, OSError)
        self._installed: list[tuple[Any, Any]] = []
        # If Spark does not log with Log4j 2, py4j takes a missing class for a package, without
        # methods. Other code reports the end of the JVM or of the interpreter.
        with contextlib.suppress(TypeError, *self._errors):
            for config, regexes in _by_config(jvm, regexes_by_logger):
                results = jvm.org.apache.logging.log4j.core.Filter.Result
                deny = _filter(jvm, regexes, results.DENY, results.NEUTRAL)
                config.addFilter(deny)
                self._installed.append((config, deny))

    def remove(self) -> None:
        with contextlib.suppress(*self._errors):
            for config, deny in self._installed:
                config.removeFilter(deny)


@contextlib.contextmanager
def suppressed(jvm: Any, logger: str, *messages: str) -> Iterator[None]:
    """Suppress some messages of a logger while inside the context, whatever their cause.

    If Spark does not log with Log4j 2, nothing changes.

    Args:
        messages: prefixes of the messages.
    """
    filters = Log4jFilters(jvm, {logger: [re.escape(message) for message in messages]})
    try:
        yield
    finally:
        filters.remove()


class CapturedLog:
    """The messages of one logger that match a regular expression, for as long as it is open.

    A message whose level is not logged is not captured. If Spark does not log with Log4j 2, no
    message is captured.

    Args:
        regex: regular expression of the beginning of the messages.
    """

    def __init__(self, jvm: Any, logger: str, regex: str) -> None:
        from py4j.protocol import Py4JError

        self._errors = (Py4JError, OSError)
        self._config: Any = None
        # Log4j identifies an appender by its name.
        self._name = f"hopsgpu-{uuid.uuid4().hex}"
        with contextlib.suppress(TypeError, *self._errors):
            self._writer = jvm.java.io.StringWriter()
            core = jvm.org.apache.logging.log4j.core
            builder = core.layout.PatternLayout.newBuilder().withPattern(f"%m{_SEPARATOR}")
            layout = builder.withAlwaysWriteExceptions(False).build()
            results = core.Filter.Result
            accept = _filter(jvm, [regex], results.ACCEPT, results.DENY)
            appender = core.appender.WriterAppender.createAppender(
                layout, accept, self._writer, self._name, False, True
            )
            appender.start()
            ((config, _),) = _by_config(jvm, {logger: ()})
            config.addAppender(appender, None, None)
            self._config = config

    def __enter__(self) -> CapturedLog:
        return self

    def __exit__(self, *error: object) -> None:
        if self._config is not None:
            with contextlib.suppress(*self._errors):
                self._config.removeAppender(self._name)

    def drain(self) -> list[str]:
        """Return the messages since the last call."""
        if self._config is None:
            return []
        with contextlib.suppress(*self._errors):
            buffer = self._writer.getBuffer()
            if length := int(buffer.length()):
                text = str(buffer.substring(0, length))
                buffer.delete(0, length)
                return [message for message in text.split(_SEPARATOR) if message]
        return []


def _by_config(
    jvm: Any, regexes_by_logger: Mapping[str, Sequence[str]]
) -> Iterator[tuple[Any, Sequence[str]]]:
    """Yield the configurations that apply to loggers, mostly the root's alone, with all regexes.

    A separate configuration of a logger would change its level, which Spark would take for the
    user's choice.
    """
    # The current thread may have another class loader and so another configuration.
    loader = jvm.java.lang.ClassLoader.getSystemClassLoader()
    context = jvm.org.apache.logging.log4j.LogManager.getContext(loader, False)
    configuration = context.getConfiguration()
    configs: dict[str, Any] = {}
    regexes: dict[str, list[str]] = defaultdict(list)
    for logger, of_logger in regexes_by_logger.items():
        config = configuration.getLoggerConfig(logger)
        name = str(config.getName())
        configs[name] = config
        regexes[name] += of_logger
    for name, config in configs.items():
        yield config, regexes[name]


def _filter(jvm: Any, regexes: Sequence[str], match: Any, mismatch: Any) -> Any:
    core = jvm.org.apache.logging.log4j.core
    string = jvm.java.lang.Class.forName("java.lang.String")
    no_flags = jvm.java.lang.reflect.Array.newInstance(string, 0)
    pattern = f"(?s)(?:{'|'.join(regexes)}).*"
    return core.filter.RegexFilter.createFilter(pattern, no_flags, False, match, mismatch)
