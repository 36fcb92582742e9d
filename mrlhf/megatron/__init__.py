"""Megatron-Core models, schedules and optimizers, on CUDA and without it."""

import warnings

# Megatron-Core says at import, many times, what it falls back to; `mrlhf.megatron.spec` says once what is used.
warnings.filterwarnings("ignore", message=r"(Transformer Engine and Apex are|Apex is) not installed")
warnings.filterwarnings("ignore", message=r"full scope is deprecated")
# Inside torch's and Megatron's own checkpoint code.
warnings.filterwarnings("ignore", message=r"Please use DTensor instead", category=FutureWarning)
warnings.filterwarnings("ignore", message=r"`load_state_dict` is deprecated", category=FutureWarning)
# Advice for CUDA's streams; `mrlhf.parallel.launch.initialize` sets the variable where there is CUDA.
warnings.filterwarnings("ignore", message=r"When using async grad allreduce")

from mrlhf.megatron.device import import_megatron  # noqa: E402

import_megatron()
