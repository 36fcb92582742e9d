"""Reads slices of (sharded) safetensors folders, and writes them one tensor at a time.

Reading goes through the safetensors library. Its writer takes a whole file's tensors at once; `SafetensorsWriter`
lays out the same format (an 8-byte header length, a JSON header, the bytes) from shapes known beforehand, so that one
tensor is in memory at a time. Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from mrlhf.checkpoint.hf_config import read_json
from mrlhf.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def _locate(folder: Path) -> dict[str, Path]:
    """Map every tensor name to its file, checking that the index and the files agree."""
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: key 'weight_map' is missing or empty")
        files = {str(name): folder / str(file) for name, file in weight_map.items()}
        for file in sorted(set(files.values())):
            if not file.exists():
                raise CheckpointError(f"{file}: no such file, but {INDEX_FILE} lists it")
        return files
    if single.exists():
        with _open(single) as handle:
            return dict.fromkeys(handle.keys(), single)
    if list(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{folder}: only pytorch_model*.bin weights found, which are pickles and not read; save the model again "
            "with transformers' save_pretrained, which writes safetensors"
        )
    raise CheckpointError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} found")


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a readable safetensors file: {error}") from None


class SafetensorsReader:
    """The tensors of a folder by name, read lazily; use as a context manager."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files = _locate(self.folder)
        self._handles: dict[Path, Any] = {}

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for handle in self._handles.values():
            handle.__exit__(None, None, None)
        self._handles.clear()

    def names(self) -> set[str]:
        """All tensor names."""
        return set(self._files)

    def check(self) -> None:
        """Open every file, which reads its header. Raises `CheckpointError` naming a file that is cut off."""
        for file in sorted(set(self._files.values())):
            with _open(file):
                pass

    def file_of(self, name: str) -> Path:
        """The file that holds ``name``."""
        return self._files[name]

    def _slice(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._handles:
            self._handles[file] = _open(file).__enter__()
        try:
            return self._handles[file].get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file}: tensor {name} cannot be read: {error}") from None

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of ``name``, from the file's header."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Read ``name``, or only ``start:stop`` along ``dim`` (0 or 1); other parts of the file are not touched."""
        lazy = self._slice(name)
        rows = slice(start, stop)
        return lazy[rows] if dim == 0 else lazy[:, rows]


class SafetensorsWriter:
    """Writes tensors of known shapes, in the given order, into one or several safetensors files and an index.

    ``shapes`` gives the order; a new file begins where the next tensor would take the current one beyond
    ``max_shard_size`` bytes. Close (or leave the context) after the last tensor; leaving early raises.
    """

    def __init__(
        self, folder: str | Path, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, max_shard_size: int
    ) -> None:
        if dtype not in _DTYPE_NAMES:
            raise CheckpointError(f"dtype {dtype} cannot be exported; known: {', '.join(map(str, _DTYPE_NAMES))}")
        self._folder = Path(folder)
        self._dtype = dtype
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._files = self._plan(max_shard_size)
        self._pending = list(self._shapes)
        self._handle: BinaryIO | None = None
        self._current: str | None = None

    def _bytes(self, name: str) -> int:
        return int(torch.Size(self._shapes[name]).numel()) * self._dtype.itemsize

    def _plan(self, max_shard_size: int) -> dict[str, str]:
        groups: list[list[str]] = [[]]
        size = 0
        for name in self._shapes:
            if groups[-1] and size + self._bytes(name) > max_shard_size:
                groups.append([])
                size = 0
            groups[-1].append(name)
            size += self._bytes(name)
        count = len(groups)
        if count == 1:
            return dict.fromkeys(self._shapes, SINGLE_FILE)
        return {
            name: f"model-{number:05d}-of-{count:05d}.safetensors"
            for number, group in enumerate(groups, start=1)
            for name in group
        }

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._handle is not None:
            self._handle.close()
        if kind is None:
            self._finish()

    def _begin(self, file: str) -> None:
        if self._handle is not None:
            self._handle.close()
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, where in self._files.items():
            if where == file:
                end = offset + self._bytes(name)
                header[name] = {
                    "dtype": _DTYPE_NAMES[self._dtype],
                    "shape": list(self._shapes[name]),
                    "data_offsets": [offset, end],
                }
                offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._handle = open(self._folder / file, "wb")  # noqa: SIM115 - closed by the next file or the context
        self._handle.write(len(text).to_bytes(8, "little") + text)
        self._current = file

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append ``tensor`` (any device; cast to the writer's dtype), which must be the next one of ``shapes``."""
        if not self._pending or self._pending[0] != name:
            raise ValueError(f"expected {self._pending[:1]}, not {name}")
        if tuple(tensor.shape) != self._shapes[name]:
            raise CheckpointError(f"{name}: shape {tuple(tensor.shape)}, expected {self._shapes[name]}")
        self._pending.pop(0)
        if self._files[name] != self._current:
            self._begin(self._files[name])
        assert self._handle is not None
        flat = tensor.detach().to("cpu", self._dtype).reshape(-1)
        if flat.stride(0) != 1:  # one element cut out of a row: contiguous by torch's rules, but not viewable as bytes
            flat = flat.clone(memory_format=torch.contiguous_format)
        self._handle.write(flat.view(torch.uint8).numpy().data)

    def _finish(self) -> None:
        if self._pending:
            raise RuntimeError(f"{len(self._pending)} tensors were not written, the first is {self._pending[0]}")
        if len(set(self._files.values())) > 1:
            total = sum(self._bytes(name) for name in self._shapes)
            index = {"metadata": {"total_size": total}, "weight_map": self._files}
            (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
