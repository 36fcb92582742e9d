"""What a GPU and its links can do, from the makers' data sheets, and numbers with units.

Peaks are dense (without the doubling of structured sparsity); links are in one direction per GPU, half of the total
that data sheets print. What a run gets of them is an assumption, in `Efficiency`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from mrlhf.errors import ConfigError
from mrlhf.planning.job import Dtype


@dataclass(frozen=True)
class Hardware:
    """One GPU in its machine.

    Attributes:
        name: of the GPU.
        memory: bytes.
        flops: dense peak of matrix products per second by format (``fp32``, ``bf16``, ``fp16``, ``fp8``).
        bandwidth: bytes per second of its memory.
        link: bytes per second to the GPUs of the same machine.
        network: bytes per second to other machines.
        pcie: bytes per second to the memory of the host; 0 where nothing is offloaded.
        gpus_per_node: GPUs of one machine.
        mxfp8: whether it multiplies FP8 blocks with scales of their own (Blackwell).
        source: where the numbers are from.
    """

    name: str
    memory: float
    flops: dict[str, float] = field(default_factory=dict)
    bandwidth: float = 0.0
    link: float = 0.0
    network: float = 0.0
    pcie: float = 0.0
    gpus_per_node: int = 8
    mxfp8: bool = False
    source: str = ""

    def peak(self, dtype: Dtype, *, fp8: bool = False) -> float:
        """Operations per second; without FP8 units, FP8 products run at the speed of ``dtype``."""
        return self.flops["fp8"] if fp8 and self.flops.get("fp8") else self.flops[dtype]


@dataclass(frozen=True)
class Efficiency:
    """The share of the peaks that a run gets, and fixed costs; assumptions, not measurements.

    Attributes:
        flops: of the peak of matrix products. Megatron reached 44 to 52% of an A100's peak end to end (Narayanan et al.
            2021, table 1), with communication, which is counted apart here.
        bandwidth: of the memory bandwidth, when weights and cache are read for decoding.
        link: of the bandwidth of links, network and PCIe.
        link_seconds: fixed cost of a collective or message inside a machine.
        network_seconds: the same between machines.
        layer_seconds: shortest time of a layer's forward pass: launching its kernels from Python.
        disk: bytes per second at which the whole job writes a checkpoint.
    """

    flops: float = 0.5
    bandwidth: float = 0.8
    link: float = 0.8
    link_seconds: float = 10e-6
    network_seconds: float = 25e-6
    layer_seconds: float = 150e-6
    disk: float = 2e9


_HOPPER = {"fp32": 67e12, "bf16": 989.4e12, "fp16": 989.4e12, "fp8": 1978.9e12}

HARDWARE: dict[str, Hardware] = {
    "a100": Hardware(
        name="A100 SXM 80GB",
        memory=80e9,
        flops={"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12},
        bandwidth=2.039e12,
        link=300e9,
        network=25e9,
        pcie=32e9,
        source="NVIDIA A100 80GB data sheet (SXM): 312 TFLOPS BF16 dense, no FP8, 2,039 GB/s, NVLink 600 GB/s; "
        "DGX A100: one 200 Gb/s adapter a GPU",
    ),
    "h100": Hardware(
        name="H100 SXM5 80GB",
        memory=80e9,
        flops=_HOPPER,
        bandwidth=3.35e12,
        link=450e9,
        network=50e9,
        pcie=64e9,
        source="NVIDIA H100 data sheet and H100 architecture paper (SXM5): 989.4 TFLOPS BF16 and 1,978.9 FP8 dense, "
        "3.35 TB/s, NVLink 900 GB/s; DGX H100: one 400 Gb/s adapter a GPU",
    ),
    "h200": Hardware(
        name="H200 SXM 141GB",
        memory=141e9,
        flops=_HOPPER,
        bandwidth=4.8e12,
        link=450e9,
        network=50e9,
        pcie=64e9,
        source="NVIDIA H200 data sheet (SXM): compute as the H100, 141 GB at 4.8 TB/s, NVLink 900 GB/s; "
        "DGX H200: one 400 Gb/s adapter a GPU",
    ),
    "b200": Hardware(
        name="B200 SXM 180GB",
        memory=180e9,
        flops={"fp32": 75e12, "bf16": 2250e12, "fp16": 2250e12, "fp8": 4500e12},
        bandwidth=8e12,
        link=900e9,
        network=50e9,
        pcie=64e9,
        mxfp8=True,
        source="NVIDIA HGX B200 and DGX B200 data sheets: 2,250 TFLOPS BF16 and 4,500 FP8 dense, 1,440 GB a machine of "
        "8 GPUs, 8 TB/s, NVLink 1.8 TB/s; one 400 Gb/s adapter a GPU",
    ),
}

_BYTES = {
    "": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
    "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40,
}  # fmt: skip
_NUMBER = re.compile(r"^\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)\s*([a-z/]*)\s*$", re.IGNORECASE)


def parse_bytes(text: str, option: str, *, zero: bool = False) -> float:
    """``80GB`` (10^9), ``80GiB`` (2^30), ``81559MiB`` or a number of bytes; raises `ConfigError` naming ``option``.

    With ``zero`` nothing is a size as well.
    """
    value, unit = _split(text, option, "a size such as 80GB, 80GiB or 81559MiB", zero=zero)
    if unit not in _BYTES:
        raise ConfigError(
            f"{option}: {text!r} has the unit {unit!r}; expected one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
        )
    return value * _BYTES[unit]


def parse_rate(text: str, option: str) -> float:
    """``3.35TB/s``, ``900GB/s`` or bytes per second; raises `ConfigError` naming ``option``."""
    value, unit = _split(text, option, "bytes per second such as 3.35TB/s or 450GB/s")
    unit = unit.removesuffix("/s").removesuffix("ps")
    if unit not in _BYTES:
        raise ConfigError(
            f"{option}: {text!r}: expected bytes per second such as 3.35TB/s or 450GB/s (bytes, not bits)"
        )
    return value * _BYTES[unit]


def parse_flops(text: str, option: str) -> float:
    """``989TFLOPS``, ``2.25PFLOPS`` or operations per second; raises `ConfigError` naming ``option``."""
    expected = "operations per second such as 989TFLOPS or 2.25PFLOPS"
    value, unit = _split(text, option, expected)
    prefix = unit.removesuffix("/s").removesuffix("flops").removesuffix("flop")
    scale = {"": 1.0, "g": 1e9, "t": 1e12, "p": 1e15}.get(prefix)
    if scale is None:
        raise ConfigError(f"{option}: {text!r}: expected {expected}")
    return value * scale


def _split(text: str, option: str, expected: str, *, zero: bool = False) -> tuple[float, str]:
    found = _NUMBER.match(text)
    if found is None or not (0 if zero else 1e-9) <= float(found[1]) < float("inf"):
        raise ConfigError(f"{option}: given {text!r}, expected {expected}, {'0 or more' if zero else 'above 0'}")
    return float(found[1]), found[2].lower()


def find_hardware(name: str) -> Hardware:
    """The entry of the table; raises `ConfigError` with the known names."""
    found = HARDWARE.get(name.lower())
    if found is None:
        raise ConfigError(
            f"--hardware: {name!r} is not known; choose one of {', '.join(sorted(HARDWARE))} and replace its numbers "
            "by --flops, --fp8-flops, --bandwidth, --link, --network, --pcie, --gpu-memory and --gpus-per-node"
        )
    return found


def with_own_numbers(
    hardware: Hardware,
    dtype: Dtype,
    *,
    memory: str | None = None,
    flops: str | None = None,
    fp8_flops: str | None = None,
    bandwidth: str | None = None,
    link: str | None = None,
    network: str | None = None,
    pcie: str | None = None,
    gpus_per_node: int | None = None,
) -> Hardware:
    """``hardware`` with what the user gave in place of the table's numbers; ``flops`` are those of ``dtype``."""
    peaks = dict(hardware.flops)
    own = []
    if flops is not None:
        peaks[dtype] = parse_flops(flops, "--flops")
        own.append("--flops")
    if fp8_flops is not None:
        peaks["fp8"] = parse_flops(fp8_flops, "--fp8-flops")
        own.append("--fp8-flops")
    changes: dict[str, float] = {}
    if memory is not None:
        changes["memory"] = parse_bytes(memory, "--gpu-memory")
        if changes["memory"] < 2**20:
            raise ConfigError(f"--gpu-memory {memory}: {changes['memory']:.0f} bytes; give a unit, such as 80GB")
    for key, text in (("bandwidth", bandwidth), ("link", link), ("network", network), ("pcie", pcie)):
        if text is not None:
            changes[key] = parse_rate(text, f"--{key}")
    own += [f"--{key.replace('memory', 'gpu-memory')}" for key in changes]
    if gpus_per_node is not None:
        own.append("--gpus-per-node")
    source = hardware.source + (f"; replaced: {', '.join(own)}" if own else "")
    result = replace(hardware, flops=peaks, source=source, gpus_per_node=gpus_per_node or hardware.gpus_per_node)
    return replace(result, **changes)  # type: ignore[arg-type]
