"""A script in a rank: it becomes `__main__`, as if the rank were `python SCRIPT`."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from hopsgpu.packaging.main_module import start_main
from hopsgpu.packaging.script import MODULE, PROGRAM, ScriptCall

SUCCESS = 0


@dataclass(frozen=True)
class RankScript:
    """The function of a rank that runs a script; its value is the script's exit code, 0."""

    call: ScriptCall

    def __call__(self) -> int:
        try:
            if self.call.kind == PROGRAM:
                self._replace_process()
            elif self.call.kind == MODULE:
                self._run_module()
            else:
                self._run_file()
        except SystemExit as error:
            if error.code not in (None, SUCCESS):
                raise
        return SUCCESS

    def _run_file(self) -> None:
        file = Path(os.path.normpath(Path.cwd() / self.call.target))
        sys.argv[:] = [self.call.target, *self.call.args]
        _set_first_path(str(file.parent))
        main = start_main()
        loader = SourceFileLoader("__main__", str(file))
        main.update({"__file__": str(file), "__cached__": None, "__loader__": loader})
        # With the file's full path, tracebacks and `inspect` find its lines.
        code = compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
        exec(code, main)

    def _run_module(self) -> None:
        sys.argv[:] = [self.call.target, *self.call.args]
        _set_first_path(str(Path.cwd()))
        start_main()
        # As `python -m` does; the public functions of runpy remove the namespace at the end, which
        # processes of multiprocessing and pickles still need.
        run_module: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
        run_module(self.call.target)

    def _replace_process(self) -> None:
        name, beside = self.call.target, Path.cwd() / self.call.target
        program = str(beside) if beside.is_file() else shutil.which(name)
        if program is None:
            raise FileNotFoundError(
                f"there is no program {name!r}, neither in the working directory nor on the PATH"
                f" of this node ({os.environ.get('PATH', '')})"
            )
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(program, [name, *self.call.args])


def _set_first_path(directory: str) -> None:
    """Put a directory first on `sys.path`, in place of the one that Python itself put there."""
    if sys.path[:1] == [str(Path.cwd())]:
        sys.path[0] = directory
    else:
        sys.path.insert(0, directory)
