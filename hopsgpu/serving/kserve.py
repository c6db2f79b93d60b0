"""What KServe on Kubernetes needs to serve a version from HDFS, for `kubectl apply -k`.

KServe's storage initialiser reads HDFS over WebHDFS. It takes the NameNode from a secret, and the
whole rest of the URI, without a host, for the path. With Kerberos it wants a keytab in that secret:
no keytab is read or written here; the user puts it beside the files.

Source: https://kserve.github.io/website, "Deploy InferenceService with a saved model from HDFS" and
"Custom Predictor"; `Storage._download_hdfs` of kserve-storage 0.21. Of the Hugging Face runtime:
"Deploy InferenceService with model from Hugging Face Hub" and "Hugging Face LLM Serving Runtime".
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from hopsgpu.errors import ConfigError
from hopsgpu.serving.hand_over import Layout, Served, own_code, server_file
from hopsgpu.serving.model_directories import TRANSFORMERS
from hopsgpu.serving.model_formats import (
    ONNX,
    SAVED_MODEL,
    SKOPS,
    XGBOOST,
)
from hopsgpu.serving.torch_files import (
    PICKLE,
    PICKLED_MODULE,
    STATE_DICT,
    TORCHSCRIPT,
)
from hopsgpu.storage.object_store import SCHEMES as OBJECT_STORES

# Formats that a server of KServe's serves.
_MODEL_FORMATS = {PICKLE: "sklearn", XGBOOST: "xgboost", TRANSFORMERS: "huggingface"}
# What the image of the others needs beside kserve.
_PACKAGES = {
    ONNX: "onnxruntime",
    TORCHSCRIPT: "torch",
    STATE_DICT: "torch",
    PICKLED_MODULE: "torch",
    SAVED_MODEL: "tensorflow",
    SKOPS: "skops",
}
KEYTAB = "KERBEROS_KEYTAB"
_LONGEST = 50
_WEB = {"webhdfs": "http", "swebhdfs": "https"}


def layout(
    served: Served,
    *,
    namenode: str | None = None,
    principal: str | None = None,
    image: str | None = None,
) -> Layout:
    """Return manifests of an InferenceService, its service account and its secret.

    Args:
        served: the version, on HDFS.
        namenode: address of WebHDFS, `http://host:9870`; two NameNodes with `;` between. By default
            that of a webhdfs:// URL.
        principal: Kerberos principal whose keytab the initialiser uses; None without Kerberos.
        image: image of the predictor, for formats that no server of KServe's serves.

    Raises:
        ConfigError: the version is not on HDFS, or an argument or the signature is missing.
    """
    # Imported here, because ranks import what publishes versions, and may have no PyYAML.
    import yaml

    name = _dns_name(served.name)
    secret = {"HDFS_NAMENODE": _namenode(served.url, namenode)}
    if principal is not None:
        secret["KERBEROS_PRINCIPAL"] = principal
    model_format = _MODEL_FORMATS.get(served.model.name)
    texts: dict[str, str] = {}
    if model_format is not None:
        # A server takes the only file of the directory; alone, the manifest is not beside it.
        place = served.url if served.model.path == "." else f"{served.url}/{served.model.path}"
        model: dict[str, Any] = {"modelFormat": {"name": model_format}}
        if served.model.name == TRANSFORMERS:
            # The runtime chooses the protocol by the model's task: of a generative one OpenAI's.
            model["args"] = [f"--model_name={name}", "--model_dir=/mnt/models"]
            if served.model.trust_reason is not None:
                model["args"].append("--trust_remote_code")
        else:
            model["protocolVersion"] = "v2"
        predictor: dict[str, Any] = {"model": {**model, "storageUri": _storage_uri(place)}}
    else:
        shown = image or f"{name}-predictor:{served.version}"
        code = {"predictor.py": server_file("kserve_predictor.py")}
        code |= own_code(served, served.model.path)
        code["Dockerfile"] = _dockerfile(_PACKAGES[served.model.name])
        texts |= {f"predictor/{file}": text for file, text in code.items()}
        predictor = {
            "containers": [
                {
                    "name": "kserve-container",
                    "image": shown,
                    "args": [f"--model_name={name}"],
                    "env": [{"name": "STORAGE_URI", "value": _storage_uri(served.url)}],
                }
            ]
        }
    account = f"{name}-hdfs"
    service = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": name,
            "annotations": {"hopsgpu/model": served.name, "hopsgpu/version": str(served.version)},
        },
        "spec": {"predictor": {"serviceAccountName": account, **predictor}},
    }
    service_account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": account},
        "secrets": [{"name": account}],
    }
    generator: dict[str, Any] = {
        "name": account,
        "literals": [f"{key}={value}" for key, value in secret.items()],
    }
    if principal is not None:
        generator["files"] = [KEYTAB]
    customization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["service-account.yaml", "inference-service.yaml"],
        "secretGenerator": [generator],
        "generatorOptions": {"disableNameSuffixHash": True},
    }
    described = yaml.safe_dump(service, sort_keys=False)
    named = next(line for line in described.splitlines() if "hopsgpu/model:" in line)
    texts |= {
        "inference-service.yaml": described,
        "service-account.yaml": yaml.safe_dump(service_account, sort_keys=False),
        "kustomization.yaml": yaml.safe_dump(customization, sort_keys=False),
    }
    return Layout(texts, owned=("inference-service.yaml", named))


def _namenode(url: str, given: str | None) -> str:
    scheme, host = urlsplit(url).scheme, urlsplit(url).netloc
    if scheme == "file":
        raise ConfigError(f"{url} is not on HDFS: KServe's storage initialiser cannot read it")
    if scheme in OBJECT_STORES:
        raise ConfigError(
            f"{url} is not on HDFS, for which this export is: KServe reads an object store by the"
            " storageUri and the secret that its own documentation describes"
        )
    address = given or (f"{_WEB[scheme]}://{host}" if scheme in _WEB else None)
    if address is None or not all(
        urlsplit(one).scheme in ("http", "https") and urlsplit(one).netloc
        for one in address.split(";")
    ):
        raise ConfigError(
            f"namenode={given!r}: must be the address of WebHDFS, such as http://namenode:9870"
            " (dfs.namenode.http-address in hdfs-site.xml), because KServe reads HDFS over it"
        )
    return address


def _storage_uri(url: str) -> str:
    """Return the URI of a path of HDFS as KServe reads it: without the NameNode."""
    return f"hdfs:/{urlsplit(url).path}"


def _dns_name(name: str) -> str:
    """Return a model's name as the name of a Kubernetes object (RFC 1123)."""
    found = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_LONGEST].strip("-")
    if not found or not found[0].isalpha():
        raise ConfigError(
            f"model={name!r}: Kubernetes' names consist of the letters a to z, digits and '-', and"
            " begin with a letter: publish the model under such a name"
        )
    return found


def _dockerfile(package: str) -> str:
    return (
        "FROM python:3.11-slim\n"
        f"RUN pip install --no-cache-dir kserve {package}\n"
        "COPY . /predictor\n"
        'ENTRYPOINT ["python", "/predictor/predictor.py"]\n'
    )
