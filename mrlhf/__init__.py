"""mrlhf: PPO for language models on Megatron-Core, exact under every parallel layout."""

__version__ = "0.1.0"
