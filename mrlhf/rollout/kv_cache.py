"""Keys and values of the sequences being generated, for the layers of this rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class KVCache:
    """Slots of equal length; the layers of this rank by their global number, however many a stage has.

    Keys are stored after the rotary embedding. One slot more than asked for takes the tokens that only fill up a
    sequence-parallel split.
    """

    def __init__(
        self,
        layer_numbers: Sequence[int],
        slots: int,
        length: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate ``2 x len(layer_numbers) x (slots + 1) x length x kv_heads x head_dim`` elements.

        Args:
            layer_numbers: global numbers (from 1) of this rank's layers.
            slots: sequences held at once.
            length: tokens of the longest sequence.
            kv_heads: key-value heads of this tensor rank.
            head_dim: size of one head.
            dtype: of keys and values.
            device: where they live.
        """
        self.scratch = slots
        shape = (len(layer_numbers), slots + 1, length, kv_heads, head_dim)
        # Zeros: a slot is read up to the longest sequence of the step, and NaN would survive the mask.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self._place = {number: place for place, number in enumerate(layer_numbers)}

    def layer(self, layer_number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each ``[slots + 1, length, kv_heads, head_dim]``."""
        place = self._place[layer_number]
        return self.keys[place], self.values[place]

    @property
    def bytes(self) -> int:
        """Memory held, in bytes."""
        return 2 * self.keys.numel() * self.keys.element_size()
