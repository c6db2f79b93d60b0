"""The model behind KServe's Python server; runs in its container, without hopsgpu."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import kserve
import numpy as np
from kserve.protocol.infer_type import InferOutput, InferRequest, InferResponse
from kserve.utils.utils import generate_uuid

sys.path.insert(0, str(Path(__file__).resolve().parent))

from served_model import ServedModel  # noqa: E402 - it is beside this file


class Predictor(kserve.Model):
    """Answers the Open Inference Protocol, and protocol V1 for models with one input."""

    def __init__(self, name: str, files: Path) -> None:
        super().__init__(name)
        self._files = files

    def load(self) -> bool:
        self._model = ServedModel(Path(__file__).resolve().parent, self._files)
        self.ready = True
        return self.ready

    def predict(
        self,
        payload: dict[str, Any] | InferRequest,
        headers: dict[str, str] | None = None,
        response_headers: dict[str, str] | None = None,
    ) -> dict[str, Any] | InferResponse:
        if isinstance(payload, dict):
            (only,) = self._model.inputs
            outputs = self._model({only["name"]: np.asarray(payload["instances"])})
            (answer,) = outputs.values()
            return {"predictions": answer.tolist()}
        outputs = self._model({tensor.name: tensor.as_numpy() for tensor in payload.inputs})
        results = []
        for tensor in self._model.outputs:
            value = outputs[tensor["name"]]
            output = InferOutput(tensor["name"], list(value.shape), tensor["datatype"])
            output.set_data_from_numpy(value, binary_data=False)
            results.append(output)
        return InferResponse(payload.id or generate_uuid(), self.name, results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(parents=[kserve.model_server.parser])
    parser.add_argument("--model_dir", default="/mnt/models")
    arguments, _ = parser.parse_known_args()
    predictor = Predictor(arguments.model_name, Path(arguments.model_dir))
    predictor.load()
    kserve.ModelServer().start([predictor])
