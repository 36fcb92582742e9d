"""Imported once by the test fork server, so that workers start with torch and Megatron-Core in memory."""

import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore", message=r"(Transformer Engine and Apex are|Apex is) not installed")

import torch  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: E402, F401

# Importing does not install anything (see `mrlhf.megatron.device`), so every worker still starts from nothing.
import mrlhf.checkpoint.convert  # noqa: E402, F401
import mrlhf.checkpoint.hf  # noqa: E402, F401
import mrlhf.megatron.optimizer  # noqa: E402, F401
import mrlhf.megatron.schedule  # noqa: E402, F401
import mrlhf.trainer.dpo  # noqa: E402, F401
import mrlhf.trainer.parity  # noqa: E402, F401
import mrlhf.trainer.ppo  # noqa: E402, F401
import mrlhf.trainer.reward  # noqa: E402, F401
import mrlhf.trainer.sft  # noqa: E402, F401
