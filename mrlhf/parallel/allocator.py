"""How the C library's malloc hands out the memory of tensors on a CPU.

As it comes, glibc maps every block of some megabytes afresh and gives it back to the kernel when it is freed. PPO
allocates the same large tensors in every step, and a page that is touched for the first time costs a fault, and zeros
written by the kernel: about as much as ten passes over it. The process keeps such memory instead, and torch asks for
huge pages for large tensors (``MADV_HUGEPAGE``, which kernels with ``transparent_hugepage/enabled`` at ``madvise`` or
``always`` grant), which saves faults and the walks through page tables of each product.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import MutableMapping

from mrlhf.errors import ConfigError

KEEP_VARIABLE = "MRLHF_KEEP_MEMORY"
"""Name of the variable with the mebibytes of freed memory that a process keeps; 0 leaves malloc as it is."""
DEFAULT_MEBIBYTES = 512
HUGE_PAGES_VARIABLE = "THP_MEM_ALLOC_ENABLE"
"""torch's own; it is read when the first tensor is made."""

# Of malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST, _LARGEST_OF_OLD = 1 << 30, 32 << 20
# What the heap grows by beyond a request; more of it is memory that stays unused.
_PAD = 16 << 20
# Whoever has set one of these knows better.
_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory(environ: MutableMapping[str, str] = os.environ) -> int:
    """Make glibc serve blocks up to 1 GiB from its heap (older than 2.35: 32 MiB), and keep the heap's free end.

    Once per process, before tensors are made. Does nothing where malloc is not glibc's, or has settings of its own in
    the environment; an allocator that replaces malloc (``LD_PRELOAD``) ignores it.

    Args:
        environ: where ``MRLHF_KEEP_MEMORY`` is looked up, in MiB (default 512), and where torch is asked for huge
            pages, unless that is decided there.

    Returns:
        MiB that are kept; 0 where nothing was done.

    Raises:
        ConfigError: the variable is not a whole number of MiB from 0 to 2,047.
    """
    kept = _kept_mebibytes(environ.get(KEEP_VARIABLE, ""))
    own = any(name in environ for name in _OWN_SETTINGS) or "glibc.malloc." in environ.get("GLIBC_TUNABLES", "")
    if not kept or own or not sys.platform.startswith("linux"):
        return 0
    environ.setdefault(HUGE_PAGES_VARIABLE, "1")
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):  # musl
        return 0
    # glibc before 2.35 takes 32 MiB at most.
    if not library.mallopt(_M_MMAP_THRESHOLD, _LARGEST) and not library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_OF_OLD):
        return 0
    settings = ((_M_TRIM_THRESHOLD, kept << 20), (_M_TOP_PAD, _PAD))
    return kept if all(library.mallopt(key, value) for key, value in settings) else 0


def _kept_mebibytes(text: str) -> int:
    if not text:
        return DEFAULT_MEBIBYTES
    # mallopt takes an int.
    if not text.isdecimal() or int(text) > 2047:
        raise ConfigError(f"{KEEP_VARIABLE} is {text}; give whole MiB from 0 (leave malloc as it is) to 2047")
    return int(text)
