"""What is handed over to a server: a model, as it is known from manifest and files, and the result.

Each server has a module with a pure function from `Served` to `Layout`; `export.py` writes it.
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
_SERVED_MODEL = "served_model.py"


@dataclass(frozen=True)
class Served:
    """A version that is to be served.

    Attributes:
        name: name of the model.
        version: its number.
        url: URL of the version on the lake.
        model: which of the version's models.
        files: paths of the model's own files within the version.
        signature: its inputs and outputs; None if the manifest does not say.
        model_class: class of a state_dict, or None.
        trusted: further types of a skops file that the caller trusts.
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
    def signed(self) -> Signature:
        """The signature.

        Raises:
            ConfigError: the manifest has none.
        """
        if self.signature is None:
            raise ConfigError(
                f"{self.url} has no signature with names, types and shapes, which this server needs"
                f" for {self.model}: publish it with signature=(inputs, outputs), or"
                " context().signature(inputs, outputs)"
            )
        return self.signature


@dataclass(frozen=True)
class Layout:
    """The files that a server wants.

    Attributes:
        texts: contents by path below the exported directory.
        copies: paths below the exported directory, by the path within the version.
        owned: a file that can be of one model only, and the line of it that names the model.
    """

    texts: Mapping[str, str]
    copies: Mapping[str, str] = field(default_factory=dict)
    owned: tuple[str, str] | None = None


def metadata(tensor: Tensor) -> dict[str, object]:
    """Return a tensor's description as the Open Inference Protocol has it."""
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def renamed(served: Served, name: str) -> dict[str, str]:
    """Return the copies that give the model's file, or directory, another name.

    Args:
        served: the version.
        name: path of the model below the exported directory.
    """
    if served.model.name not in (SAVED_MODEL, TRANSFORMERS):
        # What lies beside or below the file, such as an ONNX model's external data, keeps its name.
        above, home = PurePosixPath(name).parent, PurePosixPath(served.model.path).parent
        copies = {path: str(above / PurePosixPath(path).relative_to(home)) for path in served.files}
        return {**copies, served.model.path: name}
    return {
        path: str(PurePosixPath(name) / PurePosixPath(path).relative_to(served.model.path))
        for path in served.files
    }


def own_code(served: Served, path: str) -> dict[str, str]:
    """Return the files with which a server calls the model in Python, by name.

    Args:
        served: the version.
        path: path of the model, from the directory that the server passes to `ServedModel`.

    Raises:
        ConfigError: the version has no signature, or is a state_dict without its class, or has a
            type that NumPy lacks.
    """
    if served.model.name == STATE_DICT and served.model_class is None:
        raise ConfigError(
            f"{served.url}: nothing says of which class {served.model} is: leave model_class.json"
            ' beside it, {"class": "package.module:Class", "arguments": {}}, or publish ONNX'
        )
    tensors = (*served.signed.inputs, *served.signed.outputs)
    if odd := [tensor.name for tensor in tensors if tensor.datatype == "BF16"]:
        raise ConfigError(f"{served.url}: NumPy has no BF16 ({', '.join(odd)}): convert to FP32")
    about: dict[str, object] = {
        "format": served.model.name,
        "path": path,
        "inputs": [metadata(tensor) for tensor in served.signed.inputs],
        "outputs": [metadata(tensor) for tensor in served.signed.outputs],
        "trusted": list(served.trusted),
    }
    if served.model.name == TRANSFORMERS:
        # check_trust has refused the export if the caller does not trust the publisher.
        about["is_trusted"] = served.model.trust_reason is not None
    if served.model_class is not None:
        about["model_class"] = served.model_class.name
        about["arguments"] = dict(served.model_class.arguments)
    return {_SERVED_MODEL: server_file(_SERVED_MODEL), ABOUT: json.dumps(about, indent=1) + "\n"}


def server_file(name: str) -> str:
    """Return one of the files that run in servers."""
    # The package may be in an archive, as Spark ships it.
    return (importlib.resources.files(server_files) / name).read_text()
