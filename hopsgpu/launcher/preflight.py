"""Preparations and checks before GPUs are requested."""

from __future__ import annotations

import threading
from collections.abc import Collection

from hopsgpu.attempts.rank_call import PackedFunction
from hopsgpu.backends.gang_application import GangApplication
from hopsgpu.backends.gang_request import Request, Watcher
from hopsgpu.core.gang import GangState
from hopsgpu.core.wait_reasons import preparing_environment
from hopsgpu.errors import ConfigError
from hopsgpu.packaging.python_env.builder import RequestedEnv, ensure_built
from hopsgpu.packaging.python_env.environment import PythonEnv
from hopsgpu.packaging.python_env.missing_modules import missing_modules_error
from hopsgpu.runs.active_run import ActiveRun
from hopsgpu.runs.status_board import StatusBoard
from hopsgpu.storage.lake import LakePath
from hopsgpu.storage.object_store import library_of


def prepare_request(
    active: ActiveRun[StatusBoard],
    function: PackedFunction,
    python_env: RequestedEnv | None,
    *,
    has_data: bool = False,
    is_held_gang: bool = False,
) -> Request:
    """Return the request for a run's executors, once their Python environment is on the lake.

    Args:
        is_held_gang: whether agents already run; these report missing modules themselves.

    Raises:
        ConfigError, StoreError, Cancelled: as `python_of` and `modules_to_check`.
    """
    root = active.plan.paths["root"]
    env = python_of(python_env, root, active.board, active.cancelled)
    application = None if is_held_gang else active.application
    return Request(
        active.run_id,
        active.plan,
        active.cancelled,
        active.board,
        frameworks=function.foreseen.imports,
        python_env=env,
        imports=modules_to_check(function.needs, env, application),
        has_data=has_data,
    )


def python_of(
    python_env: RequestedEnv | None, root: str, board: Watcher, cancelled: threading.Event
) -> PythonEnv | None:
    """Return the Python environment of the ranks, once it is on the lake; build it if needed.

    Raises:
        ConfigError, StoreError, Cancelled: as `python_env.builder.ensure_built`.
    """
    if python_env is None or isinstance(python_env, PythonEnv):
        return python_env
    board.state(GangState.PREPARING, (), preparing_environment(python_env.name))
    return ensure_built(python_env, LakePath(root), cancelled)


def modules_to_check(
    needs: Collection[str], env: PythonEnv | None, application: GangApplication | None
) -> tuple[str, ...]:
    """Return the top-level modules that the executors' Python must have to unpickle a call.

    Args:
        application: the application in which they run, which may know what its executors lack;
            None to leave the check to the gang's agents.

    Raises:
        ConfigError: modules are known to be missing, or the library of the object store on which
            the runs are.
    """
    if application is not None and application.missing_modules(library_of(application.root)):
        raise ConfigError(
            f"the runs are on {application.root}, for which the executors' Python lacks"
            f" {', '.join(library_of(application.root))}: install it on the nodes"
            " (spark.pyspark.python), or set spark.hopsgpu.root (HOPSGPU_ROOT) to another lake"
        )
    if env is not None and env.modules is None:
        return ()
    required = tuple(needs) if env is None else env.missing_modules(needs)
    name = None if env is None else env.name
    if env is not None and env.interpreter is not None:
        if required:
            raise missing_modules_error(required, f"python_env={name}", name)
        return ()
    missing = () if application is None else application.missing_modules(required)
    if missing:
        raise missing_modules_error(missing, "the executors' Python", name)
    return required
