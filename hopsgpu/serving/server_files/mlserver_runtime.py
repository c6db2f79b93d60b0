"""The model behind MLServer; runs in it, without hopsgpu."""

from __future__ import annotations

import sys
from pathlib import Path

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse
from mlserver.utils import get_model_uri

sys.path.insert(0, str(Path(__file__).resolve().parent))

from served_model import ServedModel  # noqa: E402 - it is beside this file


class Runtime(MLModel):
    """Answers the Open Inference Protocol."""

    async def load(self) -> bool:
        # Models of a server share this module, so its path may be that of another model.
        self._model = ServedModel(Path(await get_model_uri(self.settings)).resolve().parent)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        inputs = {tensor.name: NumpyCodec.decode_input(tensor) for tensor in payload.inputs}
        outputs = self._model(inputs)
        return InferenceResponse(
            id=payload.id,
            model_name=self.name,
            model_version=self.version,
            outputs=[NumpyCodec.encode_output(name, value) for name, value in outputs.items()],
        )
