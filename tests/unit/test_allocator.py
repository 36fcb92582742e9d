"""What malloc does with freed memory after `mrlhf.parallel.allocator`, in processes of their own."""

import subprocess
import sys

import pytest

from mrlhf.errors import ConfigError
from mrlhf.parallel.allocator import keep_freed_memory

# Page faults of ten blocks of 32 MiB, one after the other: 8,192 each where they are mapped afresh.
_FAULTS = """
import ctypes, os, resource
from mrlhf.parallel.allocator import keep_freed_memory
kept = keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]
def touch():
    block = libc.malloc(32 << 20)
    libc.memset(block, 1, 32 << 20)
    libc.free(block)
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    touch()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(**environment: str) -> list[int]:
    run = subprocess.run([sys.executable, "-c", _FAULTS], env=environment, capture_output=True, text=True, check=True)
    return [int(word) for word in run.stdout.split()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_huge_pages_are_asked_for_unless_that_is_decided() -> None:
    environment = {"MRLHF_KEEP_MEMORY": "0"}
    keep_freed_memory(environment)
    assert environment == {"MRLHF_KEEP_MEMORY": "0"}
    for given, expected in (({}, "1"), ({"THP_MEM_ALLOC_ENABLE": "0"}, "0")):
        code = "import os; from mrlhf.parallel.allocator import keep_freed_memory as keep; keep()"
        code += "; print(os.environ['THP_MEM_ALLOC_ENABLE'])"
        run = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == expected


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_freed_blocks_are_used_again() -> None:
    kept, faults = _faults()
    # Transparent huge pages make faults fewer, with and without.
    assert kept == 512
    assert faults < 100
    for environment in ({"MRLHF_KEEP_MEMORY": "0"}, {"MALLOC_TRIM_THRESHOLD_": "131072"}):
        kept, faults = _faults(**environment)
        assert kept == 0
        assert faults >= 150


@pytest.mark.parametrize("text", ["-1", "512MB", "2048", "1.5"])
def test_a_value_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="MRLHF_KEEP_MEMORY"):
        keep_freed_memory({"MRLHF_KEEP_MEMORY": text})
