"""The files of a Hugging Face folder beside its weights: configuration, tokenizer, chat template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrlhf.checkpoint.families import family_by_name
from mrlhf.checkpoint.hf_config import read_json
from mrlhf.model_config import ModelConfig

# What tokenizers of transformers and SentencePiece save; chat templates since transformers 4.43 (file) and 5 (folder).
_TOKENIZER_FILES = (
    "tokenizer*",
    "*.model",
    "*.tiktoken",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates",
)
_CHAT_TEMPLATE = "chat_template.jinja"


def copy_companions(
    source: Path, target: Path, *, tokenizer: Path | None = None, chat_template: str | None = None
) -> list[str]:
    """Copy tokenizer files, chat templates and ``generation_config.json``; returns the names that were copied.

    Args:
        source: the model's folder.
        target: the folder to fill.
        tokenizer: a folder, or a SentencePiece file, to take the tokenizer from instead of ``source``.
        chat_template: Jinja source that the copy shall carry, whatever the files say; None leaves theirs.
    """
    folder = source if tokenizer is None else tokenizer
    if folder.is_file():
        # The customary name, by which a folder with nothing else is known to be SentencePiece's.
        shutil.copyfile(folder, target / "tokenizer.model")
        copied = ["tokenizer.model", *_copy(folder.parent, target, ["chat_template*"])]
    else:
        copied = _copy(folder, target, _TOKENIZER_FILES)
    if chat_template is not None and _set_chat_template(target, chat_template):
        copied.append(_CHAT_TEMPLATE)
    return [*copied, *_copy(source, target, ["generation_config.json"])]


def _set_chat_template(folder: Path, template: str) -> bool:
    """Make ``template`` the one of the tokenizer in ``folder``; False where it is already."""
    file, config_file = folder / _CHAT_TEMPLATE, folder / "tokenizer_config.json"
    config: dict[str, Any] = read_json(config_file) if config_file.is_file() else {}
    present = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if present == template:
        return False
    file.write_text(template, encoding="utf-8")
    if config.pop("chat_template", None) is not None:
        config_file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return True


def _copy(source: Path, target: Path, patterns: Sequence[str]) -> list[str]:
    copied: list[str] = []
    for pattern in patterns:
        for item in sorted(source.glob(pattern)):
            if item.name in copied:
                continue
            if item.is_dir():
                shutil.copytree(item, target / item.name)
            else:
                shutil.copyfile(item, target / item.name)
            copied.append(item.name)
    return copied


def write_config(source: Path, target: Path, config: ModelConfig, head: str, dtype: str) -> None:
    """Write ``config.json``: the source's, with the architecture of ``head``, the true vocabulary and ``dtype``."""
    values: dict[str, Any] = read_json(source / "config.json")
    family = family_by_name(config.family)
    values["architectures"] = [family.lm_architecture if head == "lm" else family.value_architecture]
    values["vocab_size"] = config.vocab_size
    values.pop("torch_dtype", None)
    values["dtype"] = dtype
    values["tie_word_embeddings"] = config.tie_word_embeddings
    for key in ("id2label", "label2id", "num_labels", "problem_type"):
        values.pop(key, None)
    if head == "value":
        # num_labels is the number of entries; transformers' default would be two.
        values["id2label"], values["label2id"] = {"0": "LABEL_0"}, {"LABEL_0": 0}
        if values.get("pad_token_id") is None and config.pad_token_id is not None:
            # Without it, transformers' classifier refuses batches of more than one row.
            values["pad_token_id"] = config.pad_token_id
    (target / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


class FolderWriter:
    """Fills a folder aside and renames it into place at the end, so that a half-written one is never mistaken.

    ``target`` may be an earlier export only with ``overwrite``; it is removed after the new one is complete.
    """

    def __init__(self, target: str | Path) -> None:
        self.target = Path(target)
        self.folder = self.target.with_name(self.target.name + ".incomplete")

    @staticmethod
    def problem(target: str | Path, overwrite: bool) -> str | None:
        """Why ``target`` cannot be written, or None."""
        path = Path(target)
        if path.is_dir() and any(path.iterdir()) and not overwrite:
            return f"{path}: already exists and is not empty; choose another folder or ask to overwrite it"
        if path.exists() and not path.is_dir():
            return f"{path}: exists and is not a folder"
        return None

    def begin(self) -> Path:
        """Create the folder that is written aside, empty."""
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)
        return self.folder

    def commit(self) -> None:
        """Put the finished folder in place."""
        old = self.target.with_name(self.target.name + ".old")
        if self.target.exists():
            self.target.rename(old)
        self.folder.rename(self.target)
        if old.exists():
            shutil.rmtree(old)
