"""The error for modules that the ranks' Python lacks."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

from hopsgpu.errors import ConfigError


def missing_modules_error(names: Sequence[str], where: str, env: str | None = None) -> ConfigError:
    """Return the error for modules that the Python `where` lacks; `env` names its `python_env=`."""
    packages = [package for package in map(_requirement, names) if package is not None]
    if env is not None:
        what = f" ({', '.join(packages)})" if packages else ""
        remedy = f"add {'it' if len(names) == 1 else 'them'}{what} to python_env={env}"
    else:
        named = repr(packages) if len(packages) == len(names) else "[...]"
        remedy = (
            f"pass python_env={named}, or install {'it' if len(names) == 1 else 'them'} there"
            " (spark.pyspark.python)"
        )
    return ConfigError(
        f"train_fn or its arguments refer to {', '.join(names)}, which {where} lacks: {remedy}."
        " hopsgpu sends modules to the ranks only from your own directories, up to 20 MiB per"
        " package, not from site-packages"
    )


def _requirement(name: str) -> str | None:
    """Return a module's package and version for pip; None if pip did not install the module."""
    distributions = metadata.packages_distributions().get(name)
    if not distributions:
        return None
    return f"{distributions[0]}=={metadata.version(distributions[0])}"
