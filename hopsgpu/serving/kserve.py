"""Manifests for KServe on Kubernetes to serve a version from HDFS, for `kubectl apply -k`.

KServe's storage initialiser reads HDFS over WebHDFS. A secret has the NameNode; the URI has only
the path. With Kerberos, the secret needs a keytab, which the user puts beside the files.

Sources: https://kserve.github.io/website, "Deploy InferenceService with a saved model from HDFS",
"Custom Predictor", "Deploy InferenceService with model from Hugging Face Hub" and "Hugging Face LLM
Serving Runtime"; `Storage._download_hdfs` of kserve-storage 0.21.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from hopsgpu.errors import ConfigError
from hopsgpu.serving.export_layout import ExportLayout, ServedVersion, model_code_files, server_file
from hopsgpu.serving.model_directories import TRANSFORMERS
from hopsgpu.serving.model_formats import ONNX, SAVED_MODEL, SKOPS, XGBOOST
from hopsgpu.serving.torch_files import PICKLE, PICKLED_MODULE, STATE_DICT, TORCHSCRIPT
from hopsgpu.storage.object_store import SCHEMES as OBJECT_STORES

# Formats that one of KServe's own servers serves.
_MODEL_FORMATS = {PICKLE: "sklearn", XGBOOST: "xgboost", TRANSFORMERS: "huggingface"}
# Packages of the other formats' image, besides kserve.
_PACKAGES = {
    SAVED_MODEL: "tensorflow",
    TORCHSCRIPT: "torch",
    ONNX: "onnxruntime",
    STATE_DICT: "torch",
    PICKLED_MODULE: "torch",
    SKOPS: "skops",
}
# All formats that an export knows.
FORMATS = (*_PACKAGES, *_MODEL_FORMATS)
KEYTAB = "KERBEROS_KEYTAB"
_LONGEST = 50
_WEB = {"webhdfs": "http", "swebhdfs": "https"}


def layout(
    served: ServedVersion,
    *,
    namenode: str | None = None,
    principal: str | None = None,
    image: str | None = None,
) -> ExportLayout:
    """Return manifests of an InferenceService, its service account and its secret.

    Args:
        namenode: address of WebHDFS, `http://host:9870`; `;` separates two NameNodes. The default
            is the address in a webhdfs:// URL.
        principal: Kerberos principal whose keytab the initialiser uses; None without Kerberos.
        image: of the predictor, for formats that KServe's own servers do not serve.

    Raises:
        ConfigError: the version is not on HDFS, or an argument or the signature is missing.
    """
    # Imported here, because ranks import this module and may not have PyYAML.
    import yaml

    name = _dns_name(served.name)
    secret = {"HDFS_NAMENODE": _namenode(served.url, namenode)}
    if principal is not None:
        secret["KERBEROS_PRINCIPAL"] = principal
    model_format = _MODEL_FORMATS.get(served.model.name)
    texts: dict[str, str] = {}
    if model_format is not None:
        # The server takes the only file of a directory, so pass the model without the manifest.
        place = served.url if served.model.path == "." else f"{served.url}/{served.model.path}"
        model: dict[str, Any] = {"modelFormat": {"name": model_format}}
        if served.model.name == TRANSFORMERS:
            # The runtime chooses the protocol by the model's task; for generation it is OpenAI's.
            model["args"] = [f"--model_name={name}", "--model_dir=/mnt/models"]
            if served.model.trust_reason is not None:
                model["args"].append("--trust_remote_code")
        else:
            model["protocolVersion"] = "v2"
        predictor: dict[str, Any] = {"model": {**model, "storageUri": _storage_uri(place)}}
    else:
        shown = image or f"{name}-predictor:{served.version}"
        code = {"predictor.py": server_file("kserve_predictor.py")}
        code |= model_code_files(served, served.model.path)
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
    return ExportLayout(texts, owner_line=("inference-service.yaml", named))


def _namenode(url: str, namenode: str | None) -> str:
    scheme, host = urlsplit(url).scheme, urlsplit(url).netloc
    if scheme == "file":
        raise ConfigError(f"{url} is not on HDFS: KServe's storage initialiser cannot read it")
    if scheme in OBJECT_STORES:
        raise ConfigError(
            f"{url} is not on HDFS, for which this export is: KServe reads an object store by the"
            " storageUri and the secret that its own documentation describes"
        )
    address = namenode or (f"{_WEB[scheme]}://{host}" if scheme in _WEB else None)
    if address is None or not all(
        urlsplit(part).scheme in ("http", "https") and urlsplit(part).netloc
        for part in address.split(";")
    ):
        raise ConfigError(
            f"namenode={namenode!r}: must be the address of WebHDFS, such as http://namenode:9870"
            " (dfs.namenode.http-address in hdfs-site.xml), because KServe reads HDFS over it"
        )
    return address


def _storage_uri(url: str) -> str:
    """Return the URI of a path of HDFS in KServe's form, without the NameNode."""
    return f"hdfs:/{urlsplit(url).path}"


def _dns_name(name: str) -> str:
    # The name of a Kubernetes object (RFC 1123).
    dns_name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_LONGEST].strip("-")
    if not dns_name or not dns_name[0].isalpha():
        raise ConfigError(
            f"model={name!r}: Kubernetes' names consist of the letters a to z, digits and '-', and"
            " begin with a letter: publish the model under such a name"
        )
    return dns_name


def _dockerfile(package: str) -> str:
    return (
        "FROM python:3.11-slim\n"
        f"RUN pip install --no-cache-dir kserve {package}\n"
        "COPY . /predictor\n"
        'ENTRYPOINT ["python", "/predictor/predictor.py"]\n'
    )
