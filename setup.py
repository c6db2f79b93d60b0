"""Packaging of hopsgpu; the settings of the tools are in pyproject.toml."""

from pathlib import Path
from runpy import run_path

from setuptools import find_packages, setup

# The lower bounds were tried together, and so were the newest versions below the upper ones:
# docs/source-tree.md says how.
RUNTIME = [
    "pyspark>=3.5,<5",
    "click>=8.2,<9",
    "cloudpickle>=3.0,<4",
    "findspark>=2.0,<3",
    # webhdfs:// and swebhdfs://
    "hdfs>=2.7.3,<3",
    "hdfs-native>=0.14.7,<0.15",
    # PyArrow 26 takes no older one, and does not say so to pip.
    "numpy>=2.0,<3",
    "nvidia-ml-py>=12.535,<14",
    # Reads the .gitignore of a working directory as git does.
    "pathspec>=0.12,<2",
    # Before 23 old timestamps that are stored as INT96 are read wrong.
    "pyarrow>=23,<27",
    "pyyaml>=6.0.1,<7",
    "requests>=2.31,<3",
    "rich>=13.8,<16",
    "xxhash>=3.4,<5",
]
# In 2.6 and 2.7 rank 0 serves the TCPStore itself: theirs takes no socket that already listens.
TORCH = ["torch>=2.6,<3"]
# For the nodes' GPUs; tests and examples take the smaller tensorflow-cpu.
TENSORFLOW = ["tensorflow>=2.21,<3"]
# What examples/etl_then_train.py trains with, and reads the lake with beside hdfs-native; on x86-64
# Linux torch brings CUDA, several GB.
DEMO = [*TORCH, "scikit-learn>=1.4.2,<2", "fsspec>=2024.2"]
PANDAS = ["pandas>=2.2.2,<3"]
# What examples/lake_pipeline.py scores with (Spark's mapInArrow wants pandas) and draws with.
PIPELINE = [*PANDAS, "matplotlib>=3.8.4,<4"]
# For the nodes' GPUs it is the package xgboost.
XGBOOST = ["xgboost-cpu>=3,<4"]
# Models that save_pretrained() has written; brings safetensors.
PRETRAINED = ["transformers>=5,<6"]
# What the other examples, and `make soak`, train with.
LIBRARIES = [
    *DEMO,
    *PANDAS,
    "accelerate>=1.10,<2",
    # ZeRO on CPU ranks; its operators are compiled when a script first uses them.
    'deepspeed>=0.18,<0.20; sys_platform == "linux"',
    # LightningCLI parses its command line with it.
    "jsonargparse[signatures]>=4.39,<5",
    "lightning>=2.6,<3",
    "pillow>=10",
    *PRETRAINED,
    *XGBOOST,
]
TEST = ["pytest>=8,<10", "pytest-timeout>=2.3,<3", "pytest-xdist>=3.7,<4"]
# The other frameworks that examples and tests train with.
FRAMEWORKS = ["tensorflow-cpu>=2.21,<3", "jax>=0.10,<0.11"]
# TLS between driver and executors, where Spark's own network encryption is on.
ENCRYPTION = ["cryptography>=42"]
# A YARN whose REST interfaces want Kerberos; builds with the Kerberos library and its headers.
KERBEROS = ["requests-gssapi>=1.3,<2"]
# `hopsgpu tensorboard`; earlier ones want pkg_resources, which setuptools has no more.
TENSORBOARD = ["tensorboard>=2.21,<3"]
# Logs to an MLflow server; a database of its own wants the whole of MLflow.
MLFLOW = ["mlflow-skinny>=3,<4"]
# `hopsgpu exporter`.
MONITORING = ["prometheus-client>=0.20,<1"]
# ModelVersion.load of ONNX and skops; onnx reads names and shapes for `hopsgpu models export`.
MODELS = ["onnx>=1.19,<2", "onnxruntime>=1.23,<2", "skops>=0.13,<1"]
# Runs, models and data on object stores; before these versions there is no put-if-absent.
S3 = ["s3fs>=2025.2"]
GCS = ["gcsfs>=2025.2"]
AZURE = ["adlfs>=2024.12"]
# Masters on Kubernetes; later versions need python-dateutil 3, which botocore refuses.
KUBERNETES = ["kubernetes>=31,<36"]
# What proposes the trials of a search; cmaes is for Optuna's sampler of this name.
SEARCH = ["optuna>=4.4,<6", "cmaes>=0.10,<0.14"]
# `hopsgpu web`.
WEB = ["starlette>=1.10,<2", "uvicorn>=0.54,<1", "jinja2>=3.1.6,<4"]
# tests/matrix, in an environment for each PySpark.
MATRIX = [*TEST, *SEARCH, *ENCRYPTION, *KERBEROS]
# tests/objects: moto's server answers as S3 does.
OBJECTS = [*S3, "moto[s3]>=5.1", "flask>=3", "flask-cors>=6"]
# python_env= that names a conda environment; conda itself is the user's.
CONDA = ["conda-pack>=0.8,<0.10"]
# Whatever hopsgpu does something with that installs without a compiler: without Kerberos.
ALL = [
    *TORCH,
    *TENSORFLOW,
    *SEARCH,
    *PIPELINE,
    *ENCRYPTION,
    *TENSORBOARD,
    *MLFLOW,
    *MONITORING,
    *CONDA,
    *WEB,
    *MODELS,
]
CHECK = [
    "ruff>=0.12",
    "mypy>=1.15,<3",
    "types-PyYAML",
    "types-requests",
    *ENCRYPTION,
    *MONITORING,
    *WEB,
    *TEST,
]
# Makes hopsgpu's wheel in a test, without a network: what [build-system] wants.
BUILD = ["setuptools>=77"]
# Configurations as users of Hydra pass them; brings OmegaConf.
CONFIGURATIONS = ["hydra-core>=1.3.2,<2"]
# Real kernels that run cells, and the notebooks under examples/.
NOTEBOOK = ["ipykernel>=6.29,<8", "jupyter-client>=8,<9", "nbclient>=0.10,<0.12"]
# Answers of the pages without a server, and the pages in a real Chromium, which is not of pip.
BROWSER = ["httpx2>=2,<3", "playwright>=1.50,<2"]
DEV = DEMO + PIPELINE + CHECK + NOTEBOOK + FRAMEWORKS + MLFLOW + SEARCH + CONDA + BUILD
DEV += WEB + BROWSER + MODELS + XGBOOST + OBJECTS + CONFIGURATIONS + PRETRAINED + KUBERNETES
# The pages (`make docs`), built and checked without a network.
DOCS = ["sphinx>=8.2,<10", "myst-parser>=4,<6", "furo>=2024.8.6", "sphinx-click>=6,<7", *CHECK]
# Ray Train is elastic since 2.55. torchft has wheels for Linux on x86-64 alone.
ELASTIC = [
    "ray[train]>=2.55,<3",
    'torchft>=0.2,<0.3; sys_platform == "linux" and platform_machine == "x86_64"',
]
# What `make bench` measures beside hopsgpu.
BENCH = ["spark-tensorflow-distributor>=1.0,<2", *ELASTIC, *DEV]

setup(
    name="hopsgpu",
    version=run_path("hopsgpu/core/version.py")["__version__"],
    description="Gang-scheduled distributed training on YARN's GPUs, through Spark",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    keywords="spark, yarn, hadoop, gpu, distributed training, pytorch, tensorflow",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["hopsgpu", "hopsgpu.*"]),
    package_data={
        "hopsgpu": ["py.typed"],
        "hopsgpu.devcluster": ["admin_files/*/*", "HostCheck.java", "daemon_jars.sha256"],
        "hopsgpu.monitoring": ["alerts.yml", "dashboard.json"],
        "hopsgpu.web": ["templates/*", "static/*"],
    },
    install_requires=RUNTIME,
    extras_require={
        # For users.
        "torch": TORCH,
        "tensorflow": TENSORFLOW,
        "search": SEARCH,
        "pipeline": PIPELINE,
        "libraries": LIBRARIES,
        "encryption": ENCRYPTION,
        "kerberos": KERBEROS,
        "tensorboard": TENSORBOARD,
        "mlflow": MLFLOW,
        "monitoring": MONITORING,
        "models": MODELS,
        "s3": S3,
        "gcs": GCS,
        "azure": AZURE,
        "kubernetes": KUBERNETES,
        "conda": CONDA,
        "web": WEB,
        "all": ALL,
        # For the targets of the Makefile.
        "demo": DEMO,
        "dev": DEV,
        "bench": BENCH,
        "check": CHECK,
        "matrix": MATRIX,
        "docs": DOCS,
    },
    entry_points={"console_scripts": ["hopsgpu=hopsgpu.cli.main:main"]},
)
