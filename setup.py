"""Packaging of hopsgpu; the settings of the tools are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

RUNTIME = [
    "pyspark>=4.0,<5",
    "click>=8.1",
    "cloudpickle>=3.0",
    "findspark>=2.0",
    "fsspec>=2024.2",
    "hdfs-native>=0.14.7",
    "nvidia-ml-py>=12.535",
    "pyarrow>=18",
    "pyyaml>=6.0",
    "requests>=2.31",
    "rich>=13.8",
]
# What examples/etl_then_train.py trains with; on x86-64 Linux torch brings CUDA, several GB.
DEMO = ["torch>=2.6", "numpy>=1.26", "scikit-learn>=1.4"]
TEST = ["pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6"]
# The other frameworks that examples and tests train with.
FRAMEWORKS = ["tensorflow-cpu>=2.21", "jax>=0.10"]
# TLS between driver and executors, where Spark's own network encryption is on.
ENCRYPTION = ["cryptography>=42"]
# A YARN whose REST interfaces want Kerberos; builds with the Kerberos library and its headers.
KERBEROS = ["requests-gssapi>=1.3"]
CHECK = ["ruff>=0.12", "mypy>=1.15", "types-PyYAML", "types-requests", *ENCRYPTION, *TEST]
# A real kernel whose cell is interrupted.
NOTEBOOK = ["ipykernel>=6.29", "jupyter-client>=8"]
DEV = DEMO + CHECK + NOTEBOOK + FRAMEWORKS
# What `make bench` measures beside hopsgpu; TorchDistributor wants pandas.
BENCH = ["spark-tensorflow-distributor>=1.0", "pandas>=2.2,<3", *DEV]

setup(
    name="hopsgpu",
    version="0.1.0",
    description="Gang-scheduled distributed training on YARN's GPUs, through Spark",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["hopsgpu", "hopsgpu.*"]),
    package_data={"hopsgpu": ["py.typed"], "hopsgpu.cluster": ["admin_files/*/*"]},
    install_requires=RUNTIME,
    extras_require={
        "encryption": ENCRYPTION,
        "kerberos": KERBEROS,
        "demo": DEMO,
        "dev": DEV,
        "bench": BENCH,
        "check": CHECK,
    },
    entry_points={"console_scripts": ["hopsgpu=hopsgpu.cli.main:main"]},
)
