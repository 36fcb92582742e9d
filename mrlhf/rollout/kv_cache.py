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
        """Allocate ``2 x len(layer_numbers) x (slots + 1) x kv_heads x length x head_dim`` elements.

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
        self.length = length
        shape = (len(layer_numbers), 2, slots + 1, kv_heads, length, head_dim)
        # Zeros: a slot is read up to the longest sequence of the step, and NaN would survive the mask.
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._place = {number: place for place, number in enumerate(layer_numbers)}

    def layer(self, layer_number: int) -> torch.Tensor:
        """Keys and values of one layer, ``[2, slots + 1, kv_heads, length, head_dim]``."""
        return self.tensor[self._place[layer_number]]

    def copy(self, source: int, target: int, length: int) -> None:
        """Give slot ``target`` the first ``length`` tokens of slot ``source``, in all layers."""
        self.tensor[:, :, target, :, :length] = self.tensor[:, :, source, :, :length]

    @property
    def bytes(self) -> int:
        """Memory held, in bytes."""
        return self.tensor.numel() * self.tensor.element_size()
