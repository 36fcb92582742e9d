"""Tensors that wait in host memory while nothing needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


class HostCopy:
    """Moves the memory of some tensors to the host and back; the tensors stay the same objects.

    On CUDA the host's memory is pinned and both ways are asynchronous: the way out follows the work of the current
    stream, the way back runs on a stream of its own beside it, from `prefetch` on. On a CPU memory only changes place.
    """

    def __init__(
        self,
        kept: Callable[[], Iterable[torch.Tensor]],
        scratch: Callable[[], Iterable[torch.Tensor]] = tuple,
        *,
        constant: bool = False,
    ) -> None:
        """Nothing moves yet.

        Args:
            kept: the tensors, asked for at every `offload`; tensors with common memory move once.
            scratch: tensors whose content is not needed afterwards.
            constant: the content never changes, so that it is copied out only once.
        """
        self._kept, self._scratch, self._constant = kept, scratch, constant
        self._host: dict[int, torch.Tensor] = {}
        self._away: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = []
        self._stream: torch.cuda.Stream | None = None
        self._on_its_way = False

    @property
    def bytes_away(self) -> int:
        """Memory of the device that is free at the moment because of this."""
        return 0 if self._on_its_way else sum(size for _, size, _ in self._away)

    def offload(self) -> None:
        """Free the tensors' memory on the device; nothing may use them before `load`."""
        if self._on_its_way:
            # Nobody has asked for what `prefetch` brought.
            self.load()
        if self._away:
            return
        for storage, device in _storages(self._kept()):
            host, fresh = self._room(storage, device)
            if fresh or not self._constant:
                host.copy_(_bytes(storage, device), non_blocking=device.type == "cuda")
            self._away.append((storage, storage.nbytes(), host))
        held = {storage._cdata for storage, _, _ in self._away}
        for storage, _ in _storages(self._scratch()):
            if storage._cdata not in held:
                self._away.append((storage, storage.nbytes(), None))
        for storage, _, _ in self._away:
            # The allocator hands it to later work of the same stream only, which comes after the copy.
            storage.resize_(0)

    def prefetch(self) -> None:
        """Begin the way back."""
        if not self._away or self._on_its_way:
            return
        self._on_its_way = True
        for storage, size, host in self._away:
            storage.resize_(size)
            if host is None:
                continue
            device = storage.device
            if device.type != "cuda":
                _bytes(storage, device).copy_(host)
                continue
            if self._stream is None:
                self._stream = torch.cuda.Stream(device)
            # The memory is ready when what used it before on the current stream is done.
            self._stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self._stream):
                _bytes(storage, device).copy_(host, non_blocking=True)

    def load(self) -> None:
        """Have the tensors back on the device, for the work that is given to the current stream from here on."""
        if not self._away:
            return
        self.prefetch()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._away, self._on_its_way = [], False

    def _room(self, storage: torch.UntypedStorage, device: torch.device) -> tuple[torch.Tensor, bool]:
        """The host's buffer for a storage, and whether it is new."""
        key = storage._cdata
        known = self._host.get(key)
        if known is not None and known.numel() == storage.nbytes():
            return known, False
        self._host[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=device.type == "cuda")
        return self._host[key], True


def _storages(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.UntypedStorage, torch.device]]:
    found: dict[int, tuple[torch.UntypedStorage, torch.device]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        # What NumPy has looked into, which happens on a CPU only, has to stay.
        if storage.nbytes() and storage.resizable():
            found.setdefault(storage._cdata, (storage, tensor.device))
    return list(found.values())


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
