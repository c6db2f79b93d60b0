"""The input and output of an export: the facts about a version, and the files for a server.

Each server has a module with a pure function from `ServedVersion` to `ExportLayout`; `export.py`
writes the layout.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from hopsgpu.errors import ConfigError
from hopsgpu.serving import server_files
from hopsgpu.serving.model_directories import TRANSFORMERS
from hopsgpu.serving.model_formats import SAVED_MODEL, ModelClass, ModelFormat
from hopsgpu.serving.model_signature import Signature, Tensor
from hopsgpu.serving.torch_files import STATE_DICT

ABOUT = "about.json"
# Directory of a version's files beside generated files. No module can have this name, so that no
# server imports a file of the version.
FILES = "model-files"
_SERVED_MODEL = "served_model.py"


@dataclass(frozen=True)
class ServedVersion:
    """A version to serve.

    Attributes:
        name: name of the model.
        url: URL of the version on the lake.
        model: which of the version's models.
        files: paths of this model's files within the version.
        signature: None if unknown.
        model_class: class of a state_dict.
        trusted: types of a skops file that the caller trusts.
    """

    name: str
    version: int
    url: str
    model: ModelFormat
    files: tuple[str, ...]
    signature: Signature | None = None
    model_class: ModelClass | None = None
    trusted: tuple[str, ...] = ()

    @property
    def required_signature(self) -> Signature:
        """The signature; raises ConfigError if the manifest has none."""
        if self.signature is None:
            raise ConfigError(
                f"{self.url} has no signature with names, types and shapes, which this server needs"
                f" for {self.model}: publish it with signature=(inputs, outputs), or"
                " context().signature(inputs, outputs)"
            )
        return self.signature


@dataclass(frozen=True)
class ExportLayout:
    """The files that a server needs.

    Attributes:
        texts: contents of files, by path below the exported directory.
        copies: paths below the exported directory, by path within the version.
        owner_line: a file that can describe one model only, and the line that names the model.
        reserved: a name of which the server would read any file, at any depth, and why a copy may
            not have it; or None.
    """

    texts: Mapping[str, str]
    copies: Mapping[str, str] = field(default_factory=dict)
    owner_line: tuple[str, str] | None = None
    reserved: tuple[str, str] | None = None


def tensor_metadata(tensor: Tensor) -> dict[str, object]:
    """Return a tensor's description in the Open Inference Protocol."""
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def place_of_files(served: ServedVersion) -> str:
    """Return the model's path in an exported directory that also has generated files."""
    return FILES if _is_directory(served) else f"{FILES}/{PurePosixPath(served.model.path).name}"


def _is_directory(served: ServedVersion) -> bool:
    return served.model.name in (SAVED_MODEL, TRANSFORMERS)


def copies_as(served: ServedVersion, name: str) -> dict[str, str]:
    """Return the copies of a model's files if the model gets a path in the exported directory."""
    if not _is_directory(served):
        # Other files, such as external data of ONNX, keep their names.
        above, home = PurePosixPath(name).parent, PurePosixPath(served.model.path).parent
        copies = {path: str(above / PurePosixPath(path).relative_to(home)) for path in served.files}
        return {**copies, served.model.path: name}
    return {
        path: str(PurePosixPath(name) / PurePosixPath(path).relative_to(served.model.path))
        for path in served.files
    }


def model_code_files(served: ServedVersion, path: str) -> dict[str, str]:
    """Return the texts of the files with which a server calls the model in Python, by name.

    The model's path starts from the directory that the server passes to `ServedModel`.

    Raises:
        ConfigError: the signature or the class of a state_dict is missing, or NumPy lacks a type.
    """
    if served.model.name == STATE_DICT and served.model_class is None:
        raise ConfigError(
            f"{served.url}: nothing says of which class {served.model} is: leave model_class.json"
            ' beside it, {"class": "package.module:Class", "arguments": {}}, or publish ONNX'
        )
    tensors = (*served.required_signature.inputs, *served.required_signature.outputs)
    if bf16 := [tensor.name for tensor in tensors if tensor.datatype == "BF16"]:
        raise ConfigError(f"{served.url}: NumPy has no BF16 ({', '.join(bf16)}): convert to FP32")
    about: dict[str, object] = {
        "format": served.model.name,
        "path": path,
        "inputs": [tensor_metadata(tensor) for tensor in served.required_signature.inputs],
        "outputs": [tensor_metadata(tensor) for tensor in served.required_signature.outputs],
        "trusted": list(served.trusted),
    }
    if served.model.name == TRANSFORMERS:
        # `check_trust` has refused the export if the caller does not trust the publisher.
        about["is_trusted"] = served.model.trust_reason is not None
    if served.model_class is not None:
        about["model_class"] = served.model_class.name
        about["arguments"] = dict(served.model_class.arguments)
    return {_SERVED_MODEL: server_file(_SERVED_MODEL), ABOUT: json.dumps(about, indent=1) + "\n"}


def server_file(name: str) -> str:
    # The package may be in an archive that Spark ships.
    return (importlib.resources.files(server_files) / name).read_text()
