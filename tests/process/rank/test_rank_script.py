"""A script in a rank finds what it would find under `python SCRIPT`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.packaging.pickling import pickle_call
from hopsgpu.packaging.script import FILE, MODULE, PROGRAM, ScriptCall
from hopsgpu.rank import files
from hopsgpu.rank.rank_script import RankScript
from tests.bounds import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[3]
Ran = subprocess.CompletedProcess[str]
# Runs a script: its call, in its working directory.
Way = Callable[[Path, ScriptCall], Ran]

FRESH = """
import sys
from hopsgpu.packaging.script import ScriptCall
from hopsgpu.rank.rank_script import RankScript

print("before")
value = RankScript(ScriptCall({kind!r}, {target!r}, {args!r}))()
sys.exit(f"returned {{value!r}}" if value != 0 else 0)
"""


def run_python(work: Path, *words: str) -> Ran:
    return subprocess.run(
        [sys.executable, *words],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def fresh(work: Path, call: ScriptCall) -> Ran:
    """Runs a script in a process that has done nothing before."""
    return run_python(work, "-c", FRESH.format(**vars(call)))


def rank(work: Path, call: ScriptCall) -> Ran:
    """Runs a script as the agent does, in a process that has loaded the call."""
    (work.parent / files.CALL).write_bytes(pickle_call(RankScript(call), (), {}))
    return run_python(work, "-m", "hopsgpu.rank.entry", str(work.parent), str(os.getpid()))


def plain(work: Path, call: ScriptCall) -> Ran:
    """Runs a script without hopsgpu, which is what the others must agree with."""
    return run_python(work, *call.command)


WAYS = pytest.mark.parametrize("way", [fresh, rank])


@pytest.fixture
def work(tmp_path: Path) -> Path:
    directory = tmp_path / "rank-0" / files.WORK
    directory.mkdir(parents=True)
    return directory


def write(root: Path, name: str, text: str = "") -> Path:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def outcome_of(work: Path) -> dict[str, Any]:
    outcome: dict[str, Any] = json.loads((work.parent / files.OUTCOME).read_text())
    return outcome


def told(ran: Ran) -> Any:
    """What a script has printed last, as JSON."""
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


DESCRIBED = '''"""A script's text."""
import json, sys

def names(namespace):
    return sorted(name for name in namespace if not name.startswith("__"))

main = sys.modules["__main__"]
spec = __spec__ and [__spec__.name, __spec__.origin]
print(json.dumps({
    "doc": __doc__,
    "name": __name__,
    "file": __file__,
    "package": __package__,
    "spec": spec,
    "loader": type(__loader__).__name__,
    "builtins": type(__builtins__).__name__,
    "argv": sys.argv,
    "path": sys.path[0],
    "is main": vars(main) is globals(),
    "names": [name for name in names(globals()) if name != "spec"],
}))
'''


@WAYS
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("work/train.py", "train.py"),
        ("work/deep/er/train.py", "deep/er/train.py"),
        ("script/fit model.py", "../script/fit model.py"),
    ],
)
def test_a_file_finds_what_it_finds_under_python(
    work: Path, way: Way, name: str, target: str
) -> None:
    file = write(work.parent, name, DESCRIBED)
    call = ScriptCall(FILE, target, ("--epochs", "3", "a b", ""))
    found = told(way(work, call))
    assert found["file"] == str(file) and found["path"] == str(file.parent)
    assert found["argv"] == [target, "--epochs", "3", "a b", ""]
    assert found["is main"] and found["spec"] is found["package"] is None
    assert found["names"] == ["json", "main", "names", "sys"]
    expected = told(plain(work, call))
    # Python itself does not remove `..` from the path.
    assert found == {**expected, "file": str(file), "path": str(file.parent)}


@WAYS
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("own_package/train.py", "own_package.train"),
        ("own_package/__main__.py", "own_package"),
        ("own_train.py", "own_train"),
    ],
)
def test_a_module_finds_what_it_finds_under_python(
    work: Path, way: Way, name: str, target: str
) -> None:
    write(work, "own_package/__init__.py")
    file = write(work, name, DESCRIBED)
    call = ScriptCall(MODULE, target, ("-m", "3"))
    found = told(way(work, call))
    assert found["argv"] == [str(file), "-m", "3"] and found["path"] == str(work)
    assert found["package"] == ("own_package" if "package" in name else "")
    assert found["spec"][0] == name.removesuffix(".py").replace("/", ".")
    assert found == told(plain(work, call))


IMPORTING = """
import json
from . import beside
from own_package.beside import VALUE
print(json.dumps([beside.VALUE, VALUE]))
"""


@WAYS
def test_a_module_imports_from_its_package(work: Path, way: Way) -> None:
    write(work, "own_package/__init__.py")
    write(work, "own_package/beside.py", "VALUE = 1\n")
    write(work, "own_package/train.py", IMPORTING)
    assert told(way(work, ScriptCall(MODULE, "own_package.train"))) == [1, 1]


@WAYS
def test_a_file_imports_from_its_directory(work: Path, way: Way) -> None:
    write(work, "deep/helper.py", "VALUE = 1\n")
    write(work, "helper.py", "VALUE = 2\n")
    write(work, "deep/train.py", "import json, helper\nprint(json.dumps(helper.VALUE))\n")
    assert told(way(work, ScriptCall(FILE, "deep/train.py"))) == 1


PICKLING = """
import copy, dataclasses, inspect, json, pickle

@dataclasses.dataclass
class State:
    step: int
    names: list[str]

class Model:
    '''A model.'''
    def forward(self):
        return 1

def train():
    return "trained"

state = pickle.loads(pickle.dumps(State(1, ["a"])))
assert state == State(1, ["a"]) and type(state) is State
assert pickle.loads(pickle.dumps(train)) is train
print(json.dumps({
    "class": inspect.getsource(Model),
    "method": inspect.getsource(Model.forward),
    "function": inspect.getsource(train),
    "module": Model.__module__,
    "pickle": pickle.dumps(Model, 0).decode(),
}))
"""


@WAYS
@pytest.mark.parametrize(("kind", "target"), [(FILE, "train.py"), (MODULE, "train")])
def test_definitions_of_a_script_are_found_by_name(
    work: Path, way: Way, kind: str, target: str
) -> None:
    write(work, "train.py", PICKLING)
    found = told(way(work, ScriptCall(kind, target)))
    assert found["class"].startswith("class Model:") and found["class"].endswith("return 1\n")
    assert found["function"] == 'def train():\n    return "trained"\n'
    assert found["module"] == "__main__"
    assert found == told(plain(work, ScriptCall(kind, target)))


PARALLEL = """
import concurrent.futures, json, multiprocessing, sys

class Result:
    def __init__(self, name):
        self.name, self.file, self.argv = name, __file__, sys.argv[1:]

def result(value):
    assert type(value) is Result
    return Result(__name__)

print(__name__)
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    # Unlike a pool of multiprocessing, this one notices that a process was killed.
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        found = pool.submit(result, Result("")).result(SECONDS)
    modules = [name for name in ("__main__", "__mp_main__") if name in sys.modules]
    mine = all(vars(sys.modules[name]) is globals() for name in modules)
    print(json.dumps([found.name, found.file, found.argv, type(found) is Result, modules, mine]))
""".replace("SECONDS", str(HANG_SECONDS))


@WAYS
@pytest.mark.parametrize(("kind", "target"), [(FILE, "train.py"), (MODULE, "own_package.train")])
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_processes_of_multiprocessing_have_the_scripts_definitions(
    work: Path, way: Way, kind: str, target: str, method: str
) -> None:
    for name in ("train.py", "own_package/train.py"):
        write(work, name, PARALLEL)
    call = ScriptCall(kind, target, (method, "more"))
    ran = way(work, call)
    found = told(ran)
    name = "__main__" if method == "fork" else "__mp_main__"
    # A process that is not forked runs the script again, under another name.
    assert ran.stdout.splitlines().count("__mp_main__") == (method != "fork")
    assert found[0] == name and found[2] == [method, "more"]
    assert found == told(plain(work, call))


EXITING = """
import atexit, sys
atexit.register(print, "at exit")
print("in the script")
sys.exit({code!r})
"""


@WAYS
@pytest.mark.parametrize(("kind", "target"), [(FILE, "train.py"), (MODULE, "train")])
@pytest.mark.parametrize(
    ("code", "status"), [(None, 0), (0, 0), (3, 3), (255, 255), ("out of data", 1), ("", 1)]
)
def test_the_exit_code_of_a_script_is_the_ranks(
    work: Path, way: Way, kind: str, target: str, code: object, status: int
) -> None:
    write(work, "train.py", EXITING.format(code=code))
    ran = way(work, ScriptCall(kind, target))
    assert ran.returncode == status, ran.stderr
    assert ran.stdout.splitlines()[-2:] == ["in the script", "at exit"]
    assert (str(code) in ran.stderr) == isinstance(code, str)
    if way is rank:
        outcome = outcome_of(work)
        assert outcome["status"] == ("exited" if status else "returned")
        assert outcome.get("error") == (code if isinstance(code, str) else None)


@WAYS
@pytest.mark.parametrize(("kind", "target"), [(FILE, "train.py"), (MODULE, "train")])
def test_a_script_that_ends_returns_success(work: Path, way: Way, kind: str, target: str) -> None:
    write(work, "train.py", "1\n")
    ran = way(work, ScriptCall(kind, target))
    assert (ran.returncode, ran.stderr) == (0, "")
    if way is rank:
        assert outcome_of(work)["status"] == "returned"


@WAYS
@pytest.mark.parametrize(("kind", "target"), [(FILE, "train.py"), (MODULE, "train")])
def test_an_error_of_a_script_has_its_lines(work: Path, way: Way, kind: str, target: str) -> None:
    write(work, "train.py", "def step():\n    raise ValueError('no batch')\n\nstep()\n")
    ran = way(work, ScriptCall(kind, target))
    assert ran.returncode == 1
    file = f'File "{work}/train.py", line'
    assert f"{file} 2, in step" in ran.stderr and f"{file} 4, in <module>" in ran.stderr
    assert "raise ValueError('no batch')" in ran.stderr
    if way is rank:
        outcome = outcome_of(work)
        assert outcome["error"] == "ValueError: no batch"
        assert file in outcome["traceback"] and "hopsgpu" not in outcome["traceback"]


@WAYS
def test_an_error_of_syntax_names_the_line(work: Path, way: Way) -> None:
    write(work, "train.py", "x = 1\ndef broken(:\n")
    ran = way(work, ScriptCall(FILE, "train.py"))
    assert ran.returncode == 1
    assert f'File "{work}/train.py", line 2' in ran.stderr and "SyntaxError" in ran.stderr


@WAYS
def test_a_script_is_compiled_by_its_own_rules(work: Path, way: Way) -> None:
    # hopsgpu's own `from __future__ import annotations` is not the script's; its encoding is.
    text = (
        "# coding: latin-1\nimport json\nx: int = 'é'\nprint(json.dumps([x, str(__annotations__)]))"
    )
    (work / "train.py").write_bytes(text.encode("latin-1"))
    assert told(way(work, ScriptCall(FILE, "train.py"))) == ["é", "{'x': <class 'int'>}"]


@WAYS
def test_a_missing_module_is_named(work: Path, way: Way) -> None:
    ran = way(work, ScriptCall(MODULE, "own_missing"))
    assert ran.returncode == 1 and "No module named own_missing" in ran.stderr


@WAYS
def test_a_missing_file_is_named(work: Path, way: Way) -> None:
    ran = way(work, ScriptCall(FILE, "train.py"))
    assert ran.returncode == 1 and f"{work}/train.py" in ran.stderr


@WAYS
@pytest.mark.parametrize("target", ["./train.sh", "train.sh", "bin/train.sh"])
def test_a_program_takes_the_place_of_the_rank(work: Path, way: Way, target: str) -> None:
    program = write(work, target, '#!/bin/sh\necho "$#" "$1" "$2" "$PWD"\nexit 5\n')
    program.chmod(0o755)
    ran = way(work, ScriptCall(PROGRAM, target, ("a b", "-x")))
    assert ran.returncode == 5
    # What was printed before is not lost.
    before = ["before"] if way is fresh else []
    assert ran.stdout.splitlines() == [*before, f"2 a b -x {work}"]
    assert not (work.parent / files.OUTCOME).exists(), "the agent reads the exit code"


@WAYS
def test_a_program_of_the_path(work: Path, way: Way) -> None:
    ran = way(work, ScriptCall(PROGRAM, "printenv", ("PYTHONPATH",)))
    assert ran.returncode == 0 and ran.stdout.splitlines()[-1] == str(ROOT)


@WAYS
def test_a_program_in_the_working_directory_comes_first(work: Path, way: Way) -> None:
    write(work, "printenv", "#!/bin/sh\necho mine\n").chmod(0o755)
    assert way(work, ScriptCall(PROGRAM, "printenv")).stdout.splitlines()[-1] == "mine"


@WAYS
def test_a_missing_program_is_named(work: Path, way: Way) -> None:
    (work / "own-directory").mkdir()
    for name in ("own-program", "own-directory"):
        ran = way(work, ScriptCall(PROGRAM, name))
        assert ran.returncode == 1
        assert f"there is no program {name!r}, neither in the working directory nor" in ran.stderr
        assert os.environ["PATH"] in ran.stderr
