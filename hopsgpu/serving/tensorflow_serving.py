"""A directory for TensorFlow Serving, and the configuration that names it.

Source: https://www.tensorflow.org/tfx/serving/serving_config, "Model Server Configuration".
"""

from __future__ import annotations

import json

from hopsgpu.serving.export_layout import ExportLayout, ServedVersion, copies_as


def layout(served: ServedVersion) -> ExportLayout:
    """Return a base path with a SavedModel, and `models.config` for a mount at /models."""
    name = json.dumps(served.name, ensure_ascii=False)
    base = json.dumps(f"/models/{served.name}", ensure_ascii=False)
    named = f'  config {{ name: {name} base_path: {base} model_platform: "tensorflow"'
    config = (
        "model_config_list {\n"
        f"{named}\n"
        f"    model_version_policy {{ specific {{ versions: {served.version} }} }} }}\n"
        "}\n"
    )
    return ExportLayout(
        texts={"models.config": config},
        copies=copies_as(served, f"{served.name}/{served.version}"),
        owner_line=("models.config", named),
    )
