"""Recognition of files that torch or Keras wrote, by their structure.

Nothing is unpickled: the operations of a pickle are followed with kinds in place of values. The
number of bytes read is bounded, because files may be hostile.
"""

from __future__ import annotations

import io
import logging
import lzma
import pickletools
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

log = logging.getLogger(__name__)

TORCHSCRIPT = "TorchScript"
STATE_DICT = "state_dict"
CHECKPOINT = "torch checkpoint"
LIGHTNING = "Lightning checkpoint"
PICKLED_MODULE = "pickled module"
TORCH_EXPORT = "torch.export"
PICKLE = "pickle"
KERAS = "Keras"

_ZIP, _PICKLE_HEAD = b"PK\x03\x04", b"\x80"
# torch.save's old format, without an archive, begins with a pickle of this number.
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
# In the old format, the number, a version and facts of the machine precede the object.
_LEGACY_PICKLES = 3
_HEAD_BYTES = 64
# A state_dict of ten thousand tensors has a pickle of 2 MiB.
_MAX_PICKLE = 8 * 2**20
# For the list of an archive's files, and the pickle.
_MAX_ARCHIVE = 24 * 2**20
# A state_dict of ten thousand tensors has 300,000 operations.
_MAX_OPERATIONS = 1_000_000

# NotImplementedError, of an unknown compression, is a RuntimeError.
_DAMAGE_ERRORS = (
    *(ValueError, OSError, EOFError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError),
)
_LIGHTNING_KEY = "pytorch-lightning_version"
_MODULE_KEYS = {"_parameters", "_modules"}
_KERAS_FILES = {"config.json", "metadata.json", "model.weights.h5"}

_TENSOR, _MAPPING, _LIST = "tensor", "mapping", "list"
_SCALAR, _OBJECT, _OTHER = "scalar", "object", "other"
_IGNORED_OPERATIONS = ("STOP", "PROTO", "FRAME")
_SCALARS = {"int", "bool", "int_or_bool", "float", "str", "bytes", "bytes_or_str", "None"}
_TENSOR_FUNCTIONS = ("torch._utils _rebuild_", "torch._tensor _rebuild_", "torch.nn.parameter ")
_MAPPING_CLASSES = {"collections OrderedDict", "collections defaultdict", "builtins dict"}
# Functions in torch's own files that return neither tensors nor objects of classes.
_PLAIN_FUNCTIONS = (
    *("torch ", "torch.serialization ", "torch._utils "),
    *("_codecs encode", "builtins "),
)


@dataclass(eq=False)
class _Value:
    """The known facts about a value in a pickle.

    Attributes:
        kind: `_TENSOR`, `_MAPPING` and so on.
        text: a string's value, or a global's "module name"; otherwise None.
        entries: a mapping's values by key, for keys that are strings.
        is_module: whether an object has the attributes of a torch.nn.Module.
    """

    kind: str
    text: str | None = None
    entries: dict[str, _Value] = field(default_factory=dict)
    is_module: bool = False


class _BoundedReader(io.RawIOBase):
    """A reader of a seekable file that raises ValueError above a number of bytes in all."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        super().__init__()
        self._file, self._remaining = file, limit

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(self._remaining + 1 if size is None or size < 0 else size)
        self._remaining -= len(content)
        if self._remaining < 0:
            raise ValueError("it has too large a table of contents, or too large a pickle")
        return content

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True


def torch_format(path: str, file: BinaryIO, can_be_pickle: bool) -> str | None:
    """Return the format of a file that torch may have written; None for other files.

    With `can_be_pickle`, the result for a pickle that torch did not write is PICKLE.
    """
    head = file.read(_HEAD_BYTES)
    try:
        if head.startswith(_ZIP):
            file.seek(0)
            return _archive_format(file)
        if head.startswith(_PICKLE_HEAD) and _is_legacy(head):
            content = io.BytesIO(head + file.read(_MAX_PICKLE))
            for _ in range(_LEGACY_PICKLES):
                _read_pickle(content)
            return _format_of(_read_pickle(content))
    except _DAMAGE_ERRORS as error:
        log.warning("%s is not recognised as a model: %s", path, error)
        return None
    return PICKLE if can_be_pickle and head.startswith(_PICKLE_HEAD) else None


def is_keras_archive(file: BinaryIO) -> bool:
    try:
        with zipfile.ZipFile(_reader(file)) as archive:
            return set(archive.namelist()) >= _KERAS_FILES
    except _DAMAGE_ERRORS:
        return False


def _is_legacy(head: bytes) -> bool:
    """Return whether the first number in a pickle is `_LEGACY_MAGIC`."""
    try:
        arguments = (argument for _, argument, _ in pickletools.genops(head))
        numbers = (number for number in arguments if isinstance(number, int) and number > 0xFF)
        return next(numbers) == _LEGACY_MAGIC
    except (StopIteration, ValueError):
        return False


def _reader(file: BinaryIO) -> Any:
    return _BoundedReader(file, _MAX_ARCHIVE)


def _archive_format(file: BinaryIO) -> str | None:
    with zipfile.ZipFile(_reader(file)) as archive:
        places = {name.partition("/")[2]: name for name in archive.namelist()}
        if "constants.pkl" in places:
            return TORCHSCRIPT
        if _is_export(archive.namelist()):
            return TORCH_EXPORT
        if "data.pkl" not in places:
            return None
        if archive.getinfo(places["data.pkl"]).compress_type != zipfile.ZIP_STORED:
            raise ValueError("its pickle is compressed, which torch never does")
        # The size in the archive's index may be false.
        with archive.open(places["data.pkl"]) as pickled:
            content = pickled.read(_MAX_PICKLE + 1)
    if len(content) > _MAX_PICKLE:
        raise ValueError(f"its pickle has more than {_MAX_PICKLE} bytes")
    return _format_of(_read_pickle(io.BytesIO(content)))


def _is_export(names: Iterable[str]) -> bool:
    return any(
        name.endswith("serialized_exported_program.json")
        or ("models/" in name and name.endswith(".json"))
        for name in names
    )


def _format_of(value: _Value) -> str:
    if value.kind == _OBJECT:
        return PICKLED_MODULE if value.is_module else PICKLE
    if value.kind != _MAPPING:
        return CHECKPOINT
    if _LIGHTNING_KEY in value.entries:
        return LIGHTNING
    # Quantized modules have types and tuples among their tensors. Under "_extra_state", modules may
    # have any value.
    is_state = all(
        entry.kind in (_TENSOR, _OTHER) or name.endswith("_extra_state")
        for name, entry in value.entries.items()
    )
    return STATE_DICT if is_state else CHECKPOINT


def _read_pickle(content: io.BytesIO) -> _Value:
    """Follow the next pickle in a stream; raise ValueError if it is not a pickle."""
    machine = _Machine()
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if number == _MAX_OPERATIONS:
                raise ValueError(f"its pickle has more than {_MAX_OPERATIONS} operations")
            machine.step(opcode, argument)
        return machine.stack[-1]
    except (LookupError, AttributeError, TypeError) as error:
        raise ValueError(f"it has a damaged pickle ({error!r})") from error


class _Machine:
    """A machine that runs a pickle's operations on kinds instead of values."""

    def __init__(self) -> None:
        self.stack: list[_Value] = []
        self._marks: list[int] = []
        self._memo: dict[int, _Value] = {}

    def step(self, opcode: Any, argument: Any) -> None:
        follow = self._OPERATIONS.get(opcode.name)
        if follow is not None:
            follow(self, argument)
        elif opcode.name not in _IGNORED_OPERATIONS:
            self._step_by_table(opcode, argument)

    def _push_mark(self, _: Any) -> None:
        self._marks.append(len(self.stack))

    def _memoize(self, number: Any) -> None:
        # MEMOIZE has no number.
        self._memo[len(self._memo) if number is None else number] = self.stack[-1]

    def _recall(self, number: Any) -> None:
        self.stack.append(self._memo[number])

    def _global(self, name: Any) -> None:
        self.stack.append(_Value(_OTHER, name))

    def _stack_global(self, _: Any) -> None:
        module, name = self._pop(2)
        self._global(f"{module.text} {name.text}")

    def _set_item(self, _: Any) -> None:
        self._set(self._pop(2))

    def _set_items(self, _: Any) -> None:
        self._set(self._pop_marked())

    def _dict(self, _: Any) -> None:
        items = self._pop_marked()
        self.stack.append(_Value(_MAPPING))
        self._set(items)

    def _call(self, _: Any) -> None:
        function, _ = self._pop(2)
        self.stack.append(_call_result(function.text or ""))

    def _new_object(self, _: Any) -> None:
        cls, _ = self._pop(2)
        self.stack.append(_Value(_MAPPING if cls.text in _MAPPING_CLASSES else _OBJECT))

    def _build(self, _: Any) -> None:
        (state,) = self._pop(1)
        if self.stack[-1].kind == _OBJECT and state.entries.keys() >= _MODULE_KEYS:
            self.stack[-1].is_module = True

    def _append(self, _: Any) -> None:
        self._pop(1)

    def _append_marked(self, _: Any) -> None:
        self._pop_marked()

    def _pop_one(self, _: Any) -> None:
        if self._marks and self._marks[-1] == len(self.stack):
            self._marks.pop()
        else:
            self._pop(1)

    def _duplicate(self, _: Any) -> None:
        self.stack.append(self.stack[-1])

    _OPERATIONS: Mapping[str, Callable[[_Machine, Any], None]] = {
        "MARK": _push_mark,
        **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _memoize),
        **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _recall),
        "GLOBAL": _global,
        "STACK_GLOBAL": _stack_global,
        "SETITEM": _set_item,
        "SETITEMS": _set_items,
        "DICT": _dict,
        "REDUCE": _call,
        "NEWOBJ": _new_object,
        "BUILD": _build,
        "APPEND": _append,
        **dict.fromkeys(("APPENDS", "ADDITEMS"), _append_marked),
        "POP": _pop_one,
        "DUP": _duplicate,
    }

    def _step_by_table(self, opcode: Any, argument: Any) -> None:
        """Follow an operation that only pushes a value of a known kind."""
        before = [item.name for item in opcode.stack_before]
        if "mark" in before:
            self._pop_marked()
            before = before[: before.index("mark")]
        self._pop(len(before))
        for item in opcode.stack_after:
            self.stack.append(_value_of_kind(item.name, opcode.name, argument))

    def _set(self, items: list[_Value]) -> None:
        target = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            if key.text is not None:
                target.entries[key.text] = value
            else:
                # Keys of a state_dict are strings: this entry makes it a checkpoint.
                target.entries[""] = _Value(_SCALAR)

    def _pop(self, count: int) -> list[_Value]:
        if count > len(self.stack) - (self._marks[-1] if self._marks else 0):
            raise LookupError("the stack is empty")
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def _pop_marked(self) -> list[_Value]:
        first = self._marks.pop()
        values = self.stack[first:]
        del self.stack[first:]
        return values


def _call_result(function: str) -> _Value:
    if function in _MAPPING_CLASSES:
        return _Value(_MAPPING)
    if function.startswith(_TENSOR_FUNCTIONS):
        return _Value(_TENSOR)
    return _Value(_OTHER if function.startswith(_PLAIN_FUNCTIONS) else _OBJECT)


def _value_of_kind(kind: str, opcode: str, argument: Any) -> _Value:
    if kind in _SCALARS:
        return _Value(_SCALAR, argument if isinstance(argument, str) else None)
    if kind == "dict":
        return _Value(_MAPPING)
    if kind in ("list", "set", "frozenset"):
        return _Value(_LIST)
    return _Value(_OBJECT if opcode in ("INST", "OBJ", "NEWOBJ_EX") else _OTHER)
