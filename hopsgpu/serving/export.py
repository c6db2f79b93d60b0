"""Writes the files that a server needs for a version into a local directory."""

from __future__ import annotations

import importlib
import logging
import shlex
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from hopsgpu.errors import ConfigError
from hopsgpu.serving import kserve, mlserver, tensorflow_serving, triton
from hopsgpu.serving.export_layout import ExportLayout, ServedVersion
from hopsgpu.serving.model_directories import TRANSFORMERS, is_training_state
from hopsgpu.serving.model_formats import (
    ONNX,
    SAVED_MODEL,
    SKOPS,
    ModelFormat,
    is_saved_model_part,
)
from hopsgpu.serving.model_loading import Trust, accepted_types
from hopsgpu.serving.model_signature import Signature, Tensor
from hopsgpu.serving.onnx_references import referenced_files
from hopsgpu.storage.names import is_path_below

log = logging.getLogger(__name__)

# The layout and the supported formats, by server.
_SERVERS: Mapping[str, tuple[Callable[..., ExportLayout], tuple[str, ...]]] = {
    "kserve": (kserve.layout, kserve.FORMATS),
    "triton": (triton.layout, kserve.FORMATS),
    "tf-serving": (tensorflow_serving.layout, (SAVED_MODEL,)),
    "mlserver": (mlserver.layout, kserve.FORMATS),
}
SERVERS = tuple(_SERVERS)
# Options, and the only server that has them.
_OPTIONS = {
    "max_batch_size": "triton",
    "python": "triton",
    "namenode": "kserve",
    "principal": "kserve",
    "image": "kserve",
}
# Types of the Open Inference Protocol by the names of ONNX's TensorProto.DataType.
_ONNX_TYPES = {
    "FLOAT": "FP32",
    "DOUBLE": "FP64",
    "FLOAT16": "FP16",
    "BFLOAT16": "BF16",
    "STRING": "BYTES",
}


def formats_of(server: str) -> tuple[str, ...]:
    """Return the formats that a server serves; raise ConfigError if the server is unknown."""
    if server not in _SERVERS:
        raise ConfigError(f"to={server!r}: must be one of {', '.join(SERVERS)}")
    return _SERVERS[server][1]


def check_options(server: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not None; raise ConfigError for an option of another server."""
    set_options = {name: value for name, value in options.items() if value is not None}
    for name in set_options:
        if _OPTIONS[name] != server:
            raise ConfigError(
                f"{name}={set_options[name]!r}: only for {_OPTIONS[name]}, not for {server}"
            )
    return set_options


def add_file_facts(
    version: ServedVersion, paths: Iterable[str], files: Path, trust: Trust
) -> ServedVersion:
    """Return a version with the facts that only its files contain.

    Args:
        paths: paths of all files of the version.
        files: directory with the files, if `needs_files`.

    Raises:
        ConfigError: a skops file has types that the caller does not trust, or an ONNX model refers
            to files that the version does not have.
    """
    model = version.model
    if model.name == SAVED_MODEL:
        members = (path for path in paths if is_saved_model_part(path, model.path))
        return replace(version, files=tuple(members))
    if model.name == TRANSFORMERS:
        home = PurePosixPath(model.path)
        beside = (path for path in paths if PurePosixPath(path).parent == home)
        return replace(version, files=tuple(p for p in beside if not is_training_state(p)))
    if model.name == SKOPS:
        return replace(version, trusted=tuple(accepted_types(files / model.path, trust)))
    if model.name != ONNX:
        return version
    above = PurePosixPath(model.path).parent
    weights = (str(above / name) for name in referenced_files(files / model.path))
    version = replace(version, files=(model.path, *weights))
    try:
        onnx = importlib.import_module("onnx")
    except ModuleNotFoundError:
        log.info("%s: takes names and shapes from the manifest: onnx is not installed", version.url)
        return version
    return replace(version, signature=_read_signature(onnx, version, files))


def needs_files(server: str, model: ModelFormat) -> bool:
    """Return whether an export needs the version's files, not only its manifest."""
    return server != "kserve" or model.name in (ONNX, SKOPS)


def next_steps(server: str, directory: Path) -> list[str]:
    place = shlex.quote(str(directory.absolute()))
    if server == "triton":
        return [f"tritonserver --model-repository {place}"]
    if server == "tf-serving":
        config = "--model_config_file=/models/models.config"
        return [f"docker run -p 8501:8501 -v {place}:/models tensorflow/serving {config}"]
    if server == "mlserver":
        return [f"mlserver start {place}"]
    steps = [f"kubectl apply -k {place}"]
    if (directory / "predictor").is_dir():
        steps.insert(0, f"docker build {place}/predictor, tagged and pushed as the image there")
    if kserve.KEYTAB in (directory / "kustomization.yaml").read_text():
        steps.insert(0, f"put the keytab at {place}/{kserve.KEYTAB}")
    return steps


def write(
    server: str,
    version: ServedVersion,
    paths: Collection[str],
    files: Path,
    out: Path,
    options: Mapping[str, Any],
) -> None:
    """Write an export; no file is renamed to its final name before all are complete.

    Files of an earlier export are replaced. The directory `out` is created if missing.

    Args:
        paths: paths of all files of the version; no other file is copied.

    Raises:
        ConfigError: the server cannot serve the version, the manifest is incomplete, or the export
            would replace that of another model. Also as `check_copies`.
        OSError: the directory cannot be written.
    """
    layout = _SERVERS[server][0](version, **options)
    check_copies(layout, paths, version.url)
    if layout.owner_line is not None:
        path, line = layout.owner_line
        if (out / path).exists() and line not in (out / path).read_text().splitlines():
            raise ConfigError(
                f"out={str(out)!r}: {path} there is of another model, and {server} has one for each"
                f" directory: export {version.name!r} to a directory of its own"
            )
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".export-") as draft:
        for path in (*layout.copies.values(), *layout.texts):
            (Path(draft) / path).parent.mkdir(parents=True, exist_ok=True)
        for path, text in layout.texts.items():
            (Path(draft) / path).write_text(text)
        for source, path in layout.copies.items():
            shutil.copyfile(files / source, Path(draft) / path)
        for path in (*layout.copies.values(), *layout.texts):
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(draft) / path).replace(out / path)
    log.info("exported %s for %s to %s", version.url, server, out)


def check_copies(layout: ExportLayout, paths: Collection[str], url: str) -> None:
    """Raise ConfigError unless each copy is of a file of the version, to a place of its own.

    The publisher chose the names of the files, and what the files refer to.
    """
    if foreign := sorted(layout.copies.keys() - set(paths)):
        raise ConfigError(
            f"{url} refers to {foreign[0]!r:.99}, which is no file of this version: publish the"
            " model with all files that it needs"
        )
    targets = list(layout.copies.values())
    for target in targets:
        if not is_path_below(target) or target in layout.texts or targets.count(target) > 1:
            raise ConfigError(
                f"{url} has a file that would be at {target!r:.99}, where the export has another"
                " file: publish it under another name"
            )
        if layout.reserved is not None and PurePosixPath(target).name == layout.reserved[0]:
            name, reason = layout.reserved
            raise ConfigError(
                f"{url} has a file of the name {name}: {reason}; publish it under another name"
            )


def _read_signature(onnx: Any, version: ServedVersion, files: Path) -> Signature | None:
    graph = onnx.load(files / version.model.path, load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [tensor for tensor in graph.input if tensor.name not in weights]
    return _onnx_signature(onnx, inputs, list(graph.output), version.signature)


def _onnx_signature(
    onnx: Any, inputs: list[Any], outputs: list[Any], published: Signature | None
) -> Signature | None:
    """Return the file's signature; without shapes the published one if it has the same names."""
    if all(tensor.type.tensor_type.HasField("shape") for tensor in (*inputs, *outputs)):
        return Signature(
            tuple(_onnx_tensor(onnx, tensor) for tensor in inputs),
            tuple(_onnx_tensor(onnx, tensor) for tensor in outputs),
        )
    tensors = () if published is None else (*published.inputs, *published.outputs)
    names = [tensor.name for tensor in tensors]
    return published if names == [tensor.name for tensor in (*inputs, *outputs)] else None


def _onnx_tensor(onnx: Any, value: Any) -> Tensor:
    kind = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type)
    sizes = [
        dimension.dim_value if dimension.HasField("dim_value") else -1
        for dimension in value.type.tensor_type.shape.dim
    ]
    return Tensor(value.name, _ONNX_TYPES.get(kind, kind), tuple(sizes))
