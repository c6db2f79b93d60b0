"""A model repository for NVIDIA's Triton Inference Server.

Source: https://github.com/triton-inference-server/server, docs/user_guide/model_repository.md and
model_configuration.md; python_backend's and pytorch_backend's README.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from hopsgpu.errors import ConfigError
from hopsgpu.serving.export_layout import (
    ExportLayout,
    ServedVersion,
    copies_as,
    model_code_files,
    place_of_files,
    server_file,
)
from hopsgpu.serving.model_formats import ONNX, SAVED_MODEL
from hopsgpu.serving.model_signature import Tensor
from hopsgpu.serving.torch_files import TORCHSCRIPT

# The backend of a format, its platform, and its name for the model's file.
_BACKENDS = {
    ONNX: ("onnxruntime", "onnxruntime_onnx", "model.onnx"),
    TORCHSCRIPT: ("pytorch", "pytorch_libtorch", "model.pt"),
    SAVED_MODEL: ("tensorflow", "tensorflow_savedmodel", "model.savedmodel"),
}
_BATCH = -1


def layout(served: ServedVersion, *, max_batch_size: int = 0, python: bool = False) -> ExportLayout:
    """Return a repository with one version of one model.

    Args:
        max_batch_size: the most rows that Triton may combine; 0 if each request is a batch.
        python: whether to use the Python backend even if the format has its own backend.

    Raises:
        ConfigError: the manifest lacks what the backend needs.
    """
    if type(max_batch_size) is not int or max_batch_size < 0:
        raise ConfigError(f"max_batch_size={max_batch_size!r}: must be an integer ≥ 0")
    place = f"{served.name}/{served.version}"
    texts: dict[str, str] = {}
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    backend = {"backend": "python"}
    if python or served.model.name not in _BACKENDS:
        inputs, outputs = served.required_signature
        file = place_of_files(served)
        code = {"model.py": server_file("triton_model.py"), **model_code_files(served, file)}
        texts |= {f"{place}/{name}": text for name, text in code.items()}
    else:
        name, platform, file = _BACKENDS[served.model.name]
        backend = {"backend": name, "platform": platform}
        inputs, outputs = _tensors(served)
    for tensor in (*inputs, *outputs):
        if max_batch_size and tensor.shape[:1] != (_BATCH,):
            raise ConfigError(
                f"max_batch_size={max_batch_size}: {tensor.name!r} has no batch as its first"
                f" dimension ({list(tensor.shape)}); pass max_batch_size=0"
            )
    if backend["backend"] != "python" and not max_batch_size:
        for tensor in (*inputs, *outputs):
            if not tensor.shape:
                raise ConfigError(
                    f"{tensor.name!r} is a scalar, which Triton's own backends do not serve: pass"
                    " python=True (--python), or publish a model whose tensors have dimensions"
                )
    config = _config(served, backend, inputs, outputs, max_batch_size)
    texts[f"{served.name}/config.pbtxt"] = config
    return ExportLayout(texts, copies_as(served, f"{place}/{file}"))


def _tensors(served: ServedVersion) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return a backend's inputs and outputs; empty if it reads them from the file."""
    if served.model.name != TORCHSCRIPT:
        return served.signature or ((), ())
    # TorchScript's results have no names: the backend uses the number at the end of a name.
    inputs, outputs = served.required_signature
    return (
        [tensor._replace(name=f"INPUT__{n}") for n, tensor in enumerate(inputs)],
        [tensor._replace(name=f"OUTPUT__{n}") for n, tensor in enumerate(outputs)],
    )


def _config(
    served: ServedVersion,
    backend: Mapping[str, str],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    max_batch_size: int,
) -> str:
    """Return config.pbtxt, a ModelConfig in Protocol Buffers' text format."""
    lines = [f"name: {_quote(served.name)}"]
    lines += [f"{key}: {_quote(value)}" for key, value in backend.items()]
    lines.append(f"max_batch_size: {max_batch_size}")
    # By default, Triton serves the highest number, but an earlier version may be exported later.
    lines.append(f"version_policy {{ specific {{ versions: [{served.version}] }} }}")
    for side, tensors in (("input", inputs), ("output", outputs)):
        for tensor in tensors:
            dims = tensor.shape[1:] if max_batch_size else tensor.shape
            kind = "STRING" if tensor.datatype == "BYTES" else tensor.datatype
            # Triton refuses tensors without dimensions: a scalar has one element.
            shown = ", ".join(map(str, dims or (1,)))
            reshape = " reshape { shape: [] }" if max_batch_size and not dims else ""
            lines.append(
                f"{side} {{ name: {_quote(tensor.name)} data_type: TYPE_{kind}"
                f" dims: [{shown}]{reshape} }}"
            )
    if max_batch_size:
        lines.append("dynamic_batching { }")
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    # The text format has JSON's escapes.
    return json.dumps(text, ensure_ascii=False)
