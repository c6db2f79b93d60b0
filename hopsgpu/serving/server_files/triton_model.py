"""The model for Triton's Python backend; runs in Triton, without hopsgpu."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as triton

sys.path.insert(0, str(Path(__file__).resolve().parent))

from served_model import ServedModel  # noqa: E402 - it is beside this file


class TritonPythonModel:
    """A model that answers each request of a batch separately."""

    def initialize(self, args: dict[str, Any]) -> None:
        self._model = ServedModel(Path(__file__).resolve().parent)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        names = [tensor["name"] for tensor in self._model.inputs]
        inputs = {name: triton.get_input_tensor_by_name(request, name) for name in names}
        try:
            outputs = self._model({n: t.as_numpy() for n, t in inputs.items() if t is not None})
        except Exception as error:  # noqa: BLE001 - the client gets the error; the server continues
            return triton.InferenceResponse(error=triton.TritonError(repr(error)))
        # Triton has no tensors without dimensions.
        tensors = [triton.Tensor(name, np.atleast_1d(value)) for name, value in outputs.items()]
        return triton.InferenceResponse(output_tensors=tensors)
