"""A model for MLServer: its settings, and code for formats without a package of MLServer's.

Source: https://mlserver.readthedocs.io, "Model Settings" and "Custom Inference Runtimes".
"""

from __future__ import annotations

import json
from typing import Any

from hopsgpu.serving.export_layout import (
    ExportLayout,
    ServedVersion,
    copies_as,
    model_code_files,
    place_of_files,
    server_file,
    tensor_metadata,
)
from hopsgpu.serving.model_formats import XGBOOST
from hopsgpu.serving.torch_files import PICKLE

_RUNTIMES = {
    PICKLE: "mlserver_sklearn.SKLearnModel",
    XGBOOST: "mlserver_xgboost.XGBoostModel",
}
# The name of the output of these runtimes.
_PREDICT = "predict"
_SETTINGS = "model-settings.json"
_WHY_RESERVED = "MLServer would read it as the settings of a model, and import what it names"


def layout(served: ServedVersion) -> ExportLayout:
    """Return a directory with one model; raise as `model_code_files`."""
    place = served.name
    file = place_of_files(served)
    implementation = _RUNTIMES.get(served.model.name)
    texts: dict[str, str] = {}
    if implementation is None:
        implementation = "mlserver_runtime.Runtime"
        runtime = "mlserver_runtime.py"
        code = {runtime: server_file(runtime), **model_code_files(served, file)}
        texts = {f"{place}/{name}": text for name, text in code.items()}
    settings: dict[str, Any] = {
        "name": served.name,
        "implementation": implementation,
        "parameters": {"uri": f"./{file}", "version": str(served.version)},
    }
    if served.signature is not None:
        inputs, outputs = served.signature
        if not texts and len(outputs) == 1:
            outputs = (outputs[0]._replace(name=_PREDICT),)
        settings["inputs"] = [tensor_metadata(tensor) for tensor in inputs]
        settings["outputs"] = [tensor_metadata(tensor) for tensor in outputs]
    texts[f"{place}/{_SETTINGS}"] = json.dumps(settings, indent=1) + "\n"
    copies = copies_as(served, f"{place}/{file}")
    return ExportLayout(texts, copies, reserved=(_SETTINGS, _WHY_RESERVED))
