"""A model's signature: the names, types and shapes of its inputs and outputs.

The form is that of the Open Inference Protocol, which KServe, Triton and MLServer use:

    {"inputs": [{"name": "image", "datatype": "FP32", "shape": [-1, 28, 28]}], "outputs": [...]}

Source: https://github.com/kserve/open-inference-protocol, "Model Metadata" and "Tensor Data Types";
BF16 is Triton's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hopsgpu.errors import ConfigError

# The file of a version that has the signature.
FILE = "signature.json"
# The signature becomes a part of the manifest.
_MAX_BYTES = 2**20
_SIDES = ("inputs", "outputs")
_BATCH = -1
_DATATYPES = {
    "bool": "BOOL",
    "boolean": "BOOL",
    **{f"uint{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)},
    **{f"int{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
    "object": "BYTES",
    "string": "BYTES",
    "str": "BYTES",
    "bytes": "BYTES",
}
_EXPECTED = (
    "must be a sample array (of NumPy, torch, TensorFlow or JAX), or a mapping of names to sample"
    " arrays, a list of them, or a pandas DataFrame"
)


class Tensor(NamedTuple):
    """An input or an output; -1 in the shape is a variable size, such as the batch's."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class Signature(NamedTuple):
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def infer(inputs: Any, outputs: Any) -> dict[str, list[dict[str, Any]]]:
    """Infer a signature from a batch of inputs and the model's outputs for the batch.

    The first dimension of all samples is the batch, whose size is variable; other dimensions are
    fixed. A single array is named "input" or "output", arrays of a list "input_0", "input_1", ...

    Args:
        inputs, outputs: a sample array, a mapping of names to arrays, a list of arrays, or a
            DataFrame.

    Raises:
        ConfigError: a value is not a sample, has a type that the protocol lacks, or the samples
            have batches of different sizes.
    """
    sides = {
        side: _samples_by_name(side, value)
        for side, value in (("inputs", inputs), ("outputs", outputs))
    }
    samples = {f"{side}[{n!r}]": s for side, by_name in sides.items() for n, s in by_name.items()}
    batches = {label: _shape(s)[0] for label, s in samples.items() if _shape(s)}
    if len(set(batches.values())) > 1:
        sizes = ", ".join(f"{label} {size}" for label, size in batches.items())
        raise ConfigError(
            f"signature: the first dimension of a sample is the batch, and must have one size:"
            f" {sizes}; pass samples of one batch, or write {FILE} yourself"
        )
    return {
        side: [
            {
                "name": name,
                "datatype": _datatype(f"{side}[{name!r}]", sample),
                "shape": [_BATCH if n == 0 else size for n, size in enumerate(_shape(sample))],
            }
            for name, sample in by_name.items()
        ]
        for side, by_name in sides.items()
    }


def infer_if_samples(signature: Any) -> Any:
    """Return a publisher's signature; raise as `infer`.

    A signature is inferred from samples, in a pair of inputs and outputs or in a mapping with the
    keys "inputs" and "outputs". A JSON value is returned unchanged.
    """
    pair: tuple[Any, Any] | None = None
    if isinstance(signature, Mapping) and set(signature) == set(_SIDES):
        pair = (signature["inputs"], signature["outputs"])
    elif isinstance(signature, (tuple, list)) and len(signature) == 2:
        pair = (signature[0], signature[1])
    if pair is not None and any(map(_has_sample, pair)):
        return infer(*pair)
    return signature


def dump(signature: Any, directory: Path) -> None:
    """Write `FILE` for a publish of the directory."""
    (directory / FILE).write_text(json.dumps(signature, indent=1) + "\n")


def load(content: bytes) -> Any:
    """Parse `FILE`; raise ValueError or RecursionError if it is not JSON, or has over 1 MiB."""
    check_size(len(content))
    return json.loads(content, parse_constant=_refuse_constant)


def check_size(size: int) -> None:
    if size > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")


def parse(signature: Any) -> Signature | None:
    """Return a manifest's signature; None if it has another form than the result of `infer`."""
    try:
        return Signature(*(tuple(_tensors(signature[side])) for side in _SIDES))
    except (KeyError, TypeError, ValueError):
        return None


def _tensors(entries: Any) -> Iterator[Tensor]:
    for entry in entries:
        name, datatype, shape = entry["name"], entry["datatype"], entry["shape"]
        if not isinstance(name, str) or datatype not in _DATATYPES.values():
            raise ValueError(f"{entry!r:.99} is not a tensor's description")
        if not isinstance(shape, list) or any(type(size) is not int for size in shape):
            raise ValueError(f"{shape!r:.99} is not a shape")
        yield Tensor(name, datatype, tuple(shape))


def _samples_by_name(side: str, value: Any) -> dict[str, Any]:
    default = side.removesuffix("s")
    if _is_sample(value):
        return {default: value}
    if isinstance(value, Mapping) or _is_frame(value):
        named = dict(value.items())
    elif isinstance(value, (list, tuple)):
        named = {f"{default}_{n}": sample for n, sample in enumerate(value)}
    else:
        raise ConfigError(f"signature: {side} is a {type(value).__name__}; {_EXPECTED}")
    if not named:
        raise ConfigError(f"signature: {side} has no sample; {_EXPECTED}")
    for name, sample in named.items():
        if not isinstance(name, str) or not _is_sample(sample):
            what = f"{side}[{name!r}] is a {type(sample).__name__}"
            raise ConfigError(f"signature: {what}; {_EXPECTED}; names must be strings")
    return named


def _has_sample(value: Any) -> bool:
    if _is_sample(value) or _is_frame(value):
        return True
    items = value.values() if isinstance(value, Mapping) else value
    return isinstance(items, (list, tuple, type({}.values()))) and any(map(_is_sample, items))


def _is_sample(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_frame(value: Any) -> bool:
    return hasattr(value, "columns") and hasattr(value, "items")


def _shape(sample: Any) -> tuple[int, ...]:
    # TensorFlow's variable sizes are None.
    return tuple(_BATCH if size is None else int(size) for size in sample.shape)


def _datatype(label: str, sample: Any) -> str:
    # torch's types have no name; str() is "torch.float32". Names of NumPy's strings have a length.
    name = str(getattr(sample.dtype, "name", None) or sample.dtype)
    plain = name.rpartition(".")[2].lower()
    if plain.startswith(("str", "bytes")):
        plain = plain.rstrip("0123456789")
    if plain not in _DATATYPES:
        raise ConfigError(
            f"signature: {label} has the type {name}, which the Open Inference Protocol lacks;"
            f" accepted: {', '.join(_DATATYPES)}"
        )
    return _DATATYPES[plain]


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
