"""Enum classes of a script are in another process what they are in the script."""

from __future__ import annotations

import pytest

from tests.unit.script_ranks import printed

SCRIPT = """
import enum, io, pickle, sys
from hopsgpu.packaging.reducers import ReducingPickler

def dumps(value):
    buffer = io.BytesIO()
    ReducingPickler(buffer).dump(value)
    return buffer.getvalue()

class Color(enum.Enum):
    RED = 1
    CRIMSON = 1
    BLUE = "b"
    def low(self): return self.name.lower()
    @classmethod
    def _missing_(cls, value): return cls.BLUE

class Access(enum.Flag):
    READ = 1
    WRITE = 2
    BOTH = READ | WRITE

class Port(enum.IntFlag):
    A = 11
    B = 37

class Kept(enum.Flag, boundary=enum.KEEP):
    A = 11

class Planet(enum.Enum):
    EARTH = (1.0, 2.0)
    MARS = (3.0, 4.0)
    def __init__(self, mass, radius): self.mass, self.radius = mass, radius
    @property
    def density(self): return self.mass / self.radius

class Status(enum.IntEnum):
    OK = 200, "fine"
    def __new__(cls, value, phrase):
        made = int.__new__(cls, value)
        made._value_, made.phrase = value, phrase
        return made

class Activation(enum.Enum):
    ABS = enum.member(abs)
    NEXT = enum.member(lambda x: x + 1)
    def __call__(self, x): return self.value(x)

class Mode(str, enum.Enum):
    TRAIN = "train"

class Level(enum.StrEnum):
    LOW = enum.auto()

class Lists(enum.Enum):
    ONE = [1]

CASES = {
    "aliases": lambda: (Color.CRIMSON is Color.RED, list(Color), list(Color.__members__)),
    "methods": lambda: (Color.RED.low(), Color("b"), Color(7)),
    "flags": lambda: (Access.BOTH is Access.READ | Access.WRITE, list(Access.BOTH), ~Access.READ),
    "flags of several bits": lambda: (Port.A, Port.B | 1, Kept.A, Kept(64)),
    "attributes": lambda: (Planet.EARTH.mass, Planet.MARS.density, Planet((3.0, 4.0))),
    "a __new__": lambda: (Status.OK.phrase, Status(200), Status.OK == 200),
    "functions": lambda: (Activation.ABS(-1), Activation.NEXT(1)),
    "strings": lambda: (Mode.TRAIN == "train", Mode("train"), Level.LOW, Lists([1])),
}
MEMBERS = [Color.RED, Access.BOTH, Port.B, Planet.EARTH, Status.OK, Activation.ABS, Mode.TRAIN]

if __name__ == "__main__":
    with open(sys.argv[1], "wb") as file:
        file.write(dumps((CASES, MEMBERS)))
    print({name: case() for name, case in CASES.items()})
    # Of a rank's value at the driver.
    print([back is member for back, member in zip(pickle.loads(dumps(MEMBERS)), MEMBERS)])
"""
OTHER = """
import pickle, sys
content = open(sys.argv[1], "rb").read()
for _ in range(2):
    cases, members = pickle.loads(content)
    print({name: case() for name, case in cases.items()})
print([type(member)[member.name] is member for member in members])
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """What the script prints, and what a process that gets its classes does."""
    directory = tmp_path_factory.mktemp("enums")
    (directory / "script.py").write_text(SCRIPT)
    (directory / "other.py").write_text(OTHER)

    first, second = (
        printed(directory / script, directory / "pickled").splitlines()
        for script in ("script.py", "other.py")
    )
    return first, second


def test_members_are_whole(seen: tuple[list[str], list[str]]) -> None:
    there, elsewhere = seen
    assert elsewhere[0] == there[0]
    assert elsewhere[1] == there[0], "the second time too"


def test_a_member_is_the_classes_own(seen: tuple[list[str], list[str]]) -> None:
    for lines in seen:
        assert lines[-1] == str([True] * 7)
