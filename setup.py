"""Packaging of hopsgpu; the settings of the tools are in pyproject.toml."""

from pathlib import Path
from runpy import run_path

from setuptools import find_packages, setup

RUNTIME = [
    "pyspark>=3.5,<5",
    "click>=8.1",
    "cloudpickle>=3.0",
    "findspark>=2.0",
    # webhdfs:// and swebhdfs://
    "hdfs>=2.7.3",
    "hdfs-native>=0.14.7",
    "numpy>=1.26",
    "nvidia-ml-py>=12.535",
    "pyarrow>=18",
    "pyyaml>=6.0",
    "requests>=2.31",
    "rich>=13.8",
    "xxhash>=3.4",
]
# What examples/etl_then_train.py trains with, and reads the lake with beside hdfs-native; on x86-64
# Linux torch brings CUDA, several GB.
DEMO = ["torch>=2.6", "scikit-learn>=1.4", "fsspec>=2024.2"]
# What examples/lake_pipeline.py scores with (Spark's mapInArrow wants pandas) and draws with.
PIPELINE = ["pandas>=2.2,<3", "matplotlib>=3.8"]
# What the other examples, and `make soak`, train with. XGBoost on GPUs is the package xgboost.
LIBRARIES = [
    *DEMO,
    "accelerate>=1.10",
    "lightning>=2.6",
    "pandas>=2.2,<3",
    "pillow>=10",
    "transformers>=5",
    "xgboost-cpu>=3",
]
TEST = ["pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.7"]
# The other frameworks that examples and tests train with.
FRAMEWORKS = ["tensorflow-cpu>=2.21", "jax>=0.10"]
# TLS between driver and executors, where Spark's own network encryption is on.
ENCRYPTION = ["cryptography>=42"]
# A YARN whose REST interfaces want Kerberos; builds with the Kerberos library and its headers.
KERBEROS = ["requests-gssapi>=1.3"]
# `hopsgpu tensorboard`; earlier ones want pkg_resources, which setuptools has no more.
TENSORBOARD = ["tensorboard>=2.21"]
# Logs to an MLflow server; a database of its own wants the whole of MLflow.
MLFLOW = ["mlflow-skinny>=3"]
# What proposes the trials of a search; cmaes is for Optuna's sampler of this name.
SEARCH = ["optuna>=4.4", "cmaes>=0.10"]
# tests/matrix, in an environment for each PySpark.
MATRIX = [*TEST, *SEARCH]
# python_env= that names a conda environment; conda itself is the user's.
CONDA = ["conda-pack>=0.8"]
CHECK = ["ruff>=0.12", "mypy>=1.15", "types-PyYAML", "types-requests", *ENCRYPTION, *TEST]
# Real kernels that run cells, and the notebooks under examples/.
NOTEBOOK = ["ipykernel>=6.29", "jupyter-client>=8", "nbclient>=0.10"]
DEV = DEMO + PIPELINE + CHECK + NOTEBOOK + FRAMEWORKS + MLFLOW + SEARCH + CONDA
# The pages (`make docs`), built and checked without a network.
DOCS = ["sphinx>=8.2", "myst-parser>=4", "furo>=2024.8.6", "sphinx-click>=6", *CHECK]
# What `make bench` measures beside hopsgpu.
BENCH = ["spark-tensorflow-distributor>=1.0", *DEV]

setup(
    name="hopsgpu",
    version=run_path("hopsgpu/core/version.py")["__version__"],
    description="Gang-scheduled distributed training on YARN's GPUs, through Spark",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["hopsgpu", "hopsgpu.*"]),
    package_data={"hopsgpu": ["py.typed"], "hopsgpu.devcluster": ["admin_files/*/*"]},
    install_requires=RUNTIME,
    extras_require={
        "encryption": ENCRYPTION,
        "kerberos": KERBEROS,
        "tensorboard": TENSORBOARD,
        "mlflow": MLFLOW,
        "search": SEARCH,
        "conda": CONDA,
        "demo": DEMO,
        "pipeline": PIPELINE,
        "libraries": LIBRARIES,
        "dev": DEV,
        "bench": BENCH,
        "check": CHECK,
        "matrix": MATRIX,
        "docs": DOCS,
    },
    entry_points={"console_scripts": ["hopsgpu=hopsgpu.cli.main:main"]},
)
