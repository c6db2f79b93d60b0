"""The level of Spark's log if the driver is a command that a person started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# The property by which Spark 3.5 and later sets the level; it overrides a user's own configuration.
LOG_LEVEL = "spark.log.level"
QUIET = "WARN"
_ENDINGS = ("properties", "xml", "yaml", "yml", "json", "jsn")
_OPTIONS = ("spark.driver.extraJavaOptions", "spark.driver.defaultJavaOptions")
_VARIABLES = ("SPARK_SUBMIT_OPTS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS")
# The environment variable from which Log4j 2 reads the name of its configuration file.
_FILE_VARIABLE = "LOG4J_CONFIGURATION_FILE"
# The beginning of -Dlog4j2.configurationFile=, -Dlog4j.configurationFile= and
# -Dlog4j.configuration=.
_PROPERTY = "-Dlog4j"


def quiet(properties: Mapping[str, str], environ: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return the property that makes a driver log only warnings; none if a user configures logging.

    spark-submit would log at INFO, 260 lines for a job of one stage; a driver in `python script.py`
    logs at WARN by Spark's default.
    """
    conf = Path(environ.get("SPARK_CONF_DIR") or home / "conf")
    has_own = (
        LOG_LEVEL in properties
        or environ.get(_FILE_VARIABLE)
        or any(_PROPERTY in properties.get(name, "") for name in _OPTIONS)
        or any(_PROPERTY in environ.get(name, "") for name in _VARIABLES)
        or any((conf / f"log4j2.{ending}").is_file() for ending in _ENDINGS)
    )
    return {} if has_own else {LOG_LEVEL: QUIET}
