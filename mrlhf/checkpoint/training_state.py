"""The state of a run in one folder: models, their optimizers, averages of weights, random numbers, plain values.

``state.json`` holds the plain values and describes the rest, which lies in ``tensors/`` in Megatron's torch_dist
format: weights as `mrlhf.checkpoint.sharded` names them, Adam's state in the same shapes
(`mrlhf.checkpoint.optimizer_state`), and one object per rank. Any layout can read what another one wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException

from mrlhf.checkpoint import optimizer_state
from mrlhf.checkpoint.rng_state import rng_state, set_rng_state
from mrlhf.checkpoint.sharded import fill_weights, sharded_weights, use_forked_results_queue, zero_padding
from mrlhf.errors import CheckpointError, MrlhfError
from mrlhf.megatron.fp8 import scaling_state, set_scaling_state
from mrlhf.megatron.optimizer import Trainable
from mrlhf.model_config import ModelConfig
from mrlhf.parallel.collectives import all_gather_objects
from mrlhf.parallel.heartbeat import is_timeout
from mrlhf.parallel.launch import is_peer_failure

STATE, TENSORS = "state.json", "tensors"
FORMAT = 1
_RANKS = "ranks"

__all__ = ["AsyncCallsQueue", "Average", "LoadedState", "SavedModel", "load_state", "read_state", "save_state"]


@dataclass(frozen=True)
class SavedModel:
    """A trained model: its stages with their optimizer, and its architecture."""

    trainable: Trainable
    config: ModelConfig


@dataclass(frozen=True)
class Average:
    """Tensors of the shape of a model's parameters on this rank, by ``"{stage}.{parameter}"``: a weight average."""

    model: str
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class LoadedState:
    """What a load returns besides the tensors that it has put in place.

    Attributes:
        common: the plain values that were saved.
        per_rank: this rank's object; None where the layout is another one.
        description: all of ``state.json``.
    """

    common: dict[str, Any]
    per_rank: Any
    description: dict[str, Any] = field(default_factory=dict)

    @property
    def same_layout(self) -> bool:
        """Whether everything goes on bit for bit."""
        return self.per_rank is not None


def save_state(
    folder: str | Path,
    models: Mapping[str, SavedModel],
    *,
    averages: Mapping[str, Average],
    common: Mapping[str, Any],
    per_rank: Any,
    layout: Mapping[str, Any],
    optimizer: bool = True,
    queue: AsyncCallsQueue | None = None,
) -> None:
    """Write everything into ``folder``, which exists and is empty; all ranks of the world call this together.

    Args:
        folder: the same on all ranks.
        models: by role, those that this rank has a part of.
        averages: by name, each of one of ``models``; rank 0 has all of them.
        common: values that JSON can hold; rank 0's are written.
        per_rank: anything that pickles, of this rank.
        layout: the parallel sizes, for `load_state` to compare and to name.
        optimizer: False leaves the optimizers out; the folder is then good for weights only.
        queue: write the tensors while training goes on. They are copied (on the CPU by a fork) before this returns;
            the folder is complete after ``queue.maybe_finalize_async_calls(blocking=True)``.

    Raises:
        CheckpointError: on every rank, if any rank could not write.
        MrlhfError: on the rank whose own failure the others do not know of.
    """
    use_forked_results_queue()
    described: dict[str, Any] = {}
    for part in all_gather_objects({name: _describe(model, optimizer) for name, model in models.items()}):
        described |= part
    description = {
        "format": FORMAT,
        "layout": dict(layout),
        "optimizer": optimizer,
        "models": described,
        "averages": {name: average.model for name, average in averages.items()},
        "common": dict(common),
    }
    together(lambda: _write_description(Path(folder), description) if dist.get_rank() == 0 else None, f"{folder}")
    state = sharded_state(models, averages, optimizer=gathered if optimizer else None)
    scaling = {name: scaling_state(model.trainable.modules) for name, model in models.items()}
    state[_RANKS] = _rank_object({"state": per_rank, "rng": rng_state(), "fp8": scaling})
    with _agreed(f"{folder}: cannot be saved"):
        request = dist_checkpointing.save(state, str(Path(folder) / TENSORS), async_sharded_save=queue is not None)
        if queue is not None:
            queue.schedule_async_request(request)


def finish(queue: AsyncCallsQueue, *, blocking: bool) -> bool:
    """Whether no asynchronous save is under way any more; ``blocking`` waits. All ranks call this together.

    Raises:
        CheckpointError: on every rank, if a rank failed to write.
        MrlhfError: on the rank whose own failure the others do not know of.
    """
    with _agreed("an asynchronous save failed"):
        queue.maybe_finalize_async_calls(blocking=blocking)
    return not queue.get_num_unfinalized_calls()


@contextmanager
def _agreed(what: str) -> Iterator[None]:
    """Megatron's collective part of a save: torch tells all ranks when one could not write its tensors.

    Anything else (the small files of rank 0, a fork) only the failing rank knows of, while the others wait for it in a
    barrier: it must end, and the job with it.
    """
    try:
        yield
    except CheckpointException as error:
        raise CheckpointError(f"{what}: {error}") from error
    except (CheckpointingException, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and (is_peer_failure(error) or is_timeout(error)):
            raise
        if dist.get_world_size() == 1:
            raise CheckpointError(f"{what}: {error}") from error
        raise MrlhfError(
            f"{what} on rank {dist.get_rank()}: {error}; the other ranks wait for it, so that the job ends here; "
            "earlier checkpoints are as they were: start again with trainer.resume=auto"
        ) from error


def read_state(folder: str | Path) -> dict[str, Any]:
    """The description of a saved state, from its file alone.

    Raises:
        CheckpointError: there is none, it is damaged, or another version of mrlhf wrote it.
    """
    path = Path(folder) / STATE
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        number = found["format"]
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: holds no saved training state (no {STATE})") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged ({error})") from error
    if number != FORMAT:
        raise CheckpointError(f"{path}: has format {number}, this version of mrlhf reads {FORMAT}")
    return found


@torch.no_grad()
def load_state(
    folder: str | Path,
    models: Mapping[str, SavedModel],
    *,
    averages: Mapping[str, Average],
    layout: Mapping[str, Any],
    weights_only: bool = False,
) -> LoadedState:
    """Put a saved state in place; all ranks of the world call this together.

    Under the layout that it was saved with, weights, optimizers, random numbers and the scales of the delayed FP8
    recipe are the same bits. Under another one weights are, optimizers are resharded, and random numbers and scales
    stay as they are.

    Args:
        folder: written by `save_state`.
        models: by role; others in the folder are not read.
        averages: by name.
        layout: the parallel sizes now.
        weights_only: leave optimizers, schedules and random numbers as they are; averages begin as the weights.

    Raises:
        CheckpointError: a role, an average or the optimizers are not there, or an architecture or dtype differs; the
            message has both values.
    """
    description = read_state(folder)
    own = _differences(description, models, {} if weights_only else averages, weights_only=weights_only)
    # Ranks may have different models, and all must end.
    problems = list(dict.fromkeys(problem for part in all_gather_objects(own) for problem in part))
    if problems:
        raise CheckpointError(f"{folder} does not fit: " + "; ".join(problems))
    same = _given(description["layout"]) == _given(layout) and not weights_only
    tensors = {} if weights_only else {name: optimizer_state.empty_tensors(m.trainable) for name, m in models.items()}
    read = {} if weights_only else averages
    wanted = sharded_state(models, read, optimizer=None if weights_only else lambda name, _: tensors[name])
    if same:
        wanted[_RANKS] = _rank_object(None)
    where = f"{folder} (saved with {_layout(description['layout'])}, now {_layout(layout)})"
    loaded = load_tensors(Path(folder), wanted, where)
    for name, model in models.items():
        part = loaded["models"][name]
        fill_weights(model.trainable.modules, part["weights"], folder)
        zero_padding(model.trainable.modules, model.trainable.groups, model.config.vocab_size)
        if weights_only:
            # The fp32 copies that a bf16 or fp16 optimizer keeps came from the weights before.
            model.trainable.optimizer.reload_model_params()
            continue
        _take(tensors[name], part["optimizer"])
        optimizer_state.set_tensors(model.trainable, tensors[name])
        optimizer_state.set_counters(model.trainable, description["models"][name]["counters"])
    for name, average in averages.items():
        saved = _parameters(models[average.model]) if weights_only else loaded["averages"][name]
        for key, tensor in average.tensors.items():
            tensor.copy_(saved[key])
    per_rank = loaded[_RANKS] if same else None
    if per_rank is not None:
        set_rng_state(per_rank["rng"])
        for name, model in models.items():
            set_scaling_state(model.trainable.modules, per_rank.get("fp8", {}).get(name, {}))
    return LoadedState(description["common"], per_rank["state"] if per_rank else None, description)


def together(work: Callable[[], object], what: str) -> None:
    """Do local ``work`` on every rank, then raise the first failure on all of them. Raises `CheckpointError`."""
    problem = None
    try:
        work()
    except (OSError, CheckpointError, TypeError, ValueError) as error:
        problem = f"{what}: {error}" if not isinstance(error, CheckpointError) else str(error)
    found = [p for p in all_gather_objects(problem) if p is not None]
    if found:
        raise CheckpointError(found[0])


def _write_description(folder: Path, description: dict[str, Any]) -> None:
    (folder / TENSORS).mkdir()
    (folder / STATE).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")


def _describe(model: SavedModel, optimizer: bool) -> dict[str, Any]:
    return {
        "config": json.loads(json.dumps(asdict(model.config))),
        "dtype": str(model.trainable.config.params_dtype),
        "counters": optimizer_state.counters(model.trainable) if optimizer else None,
    }


def _differences(
    description: dict[str, Any],
    models: Mapping[str, SavedModel],
    averages: Mapping[str, Average],
    *,
    weights_only: bool,
) -> list[str]:
    problems = []
    if not weights_only and not description["optimizer"]:
        problems.append(
            "it was saved without the optimizers (checkpoint.optimizer=false); set trainer.weights_only=true to begin "
            "with its weights and fresh optimizers"
        )
    for name, model in models.items():
        if name not in description["models"]:
            problems.append(f"it holds {', '.join(description['models'])}, but no {name}")
            continue
        saved, now = description["models"][name], _describe(model, False)
        if saved["dtype"] != now["dtype"] and not weights_only:
            problems.append(
                f"{name} was saved in {saved['dtype']}, now it is {now['dtype']}; use the same precision.dtype, or "
                "trainer.weights_only=true"
            )
        # Fields that are newer than the save have the value that all models had then.
        defaults = {f.name: f.default for f in fields(ModelConfig) if f.default is not MISSING}
        saved["config"] = {**json.loads(json.dumps(defaults)), **saved["config"]}
        both = {**saved["config"], **now["config"]}
        problems += [
            f"{name}.{key} was {saved['config'].get(key)!r}, now it is {now['config'].get(key)!r}"
            for key in both
            if key != "dtype" and saved["config"].get(key) != now["config"].get(key)
        ]
    problems += [
        f"it holds no average {name!r} (ppo.ema_decay)" for name in averages if name not in description["averages"]
    ]
    return problems


def sharded_state(
    models: Mapping[str, SavedModel],
    averages: Mapping[str, Average],
    *,
    optimizer: Callable[[str, Trainable], optimizer_state.Tensors] | None,
) -> dict[str, Any]:
    """Megatron's description of every tensor on this rank; ``optimizer`` gives the tensors of a model's Adam."""
    state: dict[str, Any] = {"models": {}, "averages": {}}
    by_parameter: dict[str, dict[int, Any]] = {}
    for name, model in models.items():
        trainable = model.trainable
        weights = sharded_weights(trainable.modules, trainable.groups)
        places = {id(item.data): item for part in weights.values() for item in part.values() if hasattr(item, "data")}
        by_parameter[name] = places
        state["models"][name] = {"weights": weights}
        if optimizer is not None:
            state["models"][name]["optimizer"] = {
                str(index): {
                    kind: make_sharded_optimizer_tensor(places[key], tensor, f"optimizer.{kind}")
                    for kind, tensor in kinds.items()
                }
                for index, (key, kinds) in enumerate(optimizer(name, trainable).items())
            }
    for name, average in averages.items():
        parameters = _parameters(models[average.model])
        state["averages"][name] = {
            key: make_sharded_optimizer_tensor(by_parameter[average.model][id(parameters[key])], tensor, name)
            for key, tensor in average.tensors.items()
        }
    for name, part in state["models"].items():
        add_prefix_for_sharding(part, f"{name}.")
    return state


def _parameters(model: SavedModel) -> dict[str, torch.nn.Parameter]:
    stages = enumerate(model.trainable.modules)
    return {f"{index}.{key}": parameter for index, chunk in stages for key, parameter in chunk.named_parameters()}


def gathered(_: str, trainable: Trainable) -> optimizer_state.Tensors:
    """The tensors of a model's Adam, for `sharded_state`; all ranks of the model call this together."""
    return optimizer_state.gather_tensors(trainable)


def _take(tensors: optimizer_state.Tensors, loaded: dict[str, Any]) -> None:
    """Replace ``tensors``, in their order, by what was loaded for them (some are put together of several)."""
    for index, key in enumerate(tensors):
        tensors[key] = dict(loaded[str(index)])


def _rank_object(value: Any) -> ShardedObject:
    return ShardedObject(_RANKS, value, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def load_tensors(folder: Path, wanted: dict[str, Any], where: str) -> dict[str, Any]:
    """Everything that ``wanted`` describes, from a folder of `save_state`; all ranks call this together.

    Args:
        folder: of the state.
        wanted: sharded tensors and objects.
        where: what messages begin with.

    Raises:
        CheckpointError: a file cannot be read, or something is not there.
    """
    try:
        loaded, _, absent = dist_checkpointing.load(wanted, str(folder / TENSORS), strict=StrictHandling.RETURN_ALL)
    except (CheckpointingException, CheckpointException, KeyError, OSError, EOFError) as error:
        raise CheckpointError(f"{where}: cannot be loaded: {error}") from error
    # Transformer Engine's extra state holds FP8 scales, which a folder from another machine need not have.
    missing = sorted(key for key in absent if not key.endswith("_extra_state"))
    if missing:
        raise CheckpointError(f"{where}: misses {'; '.join(missing[:20])}")
    found: dict[str, Any] = loaded
    return found


def _given(layout: Mapping[str, Any]) -> dict[str, Any]:
    """Without the sizes that were left to their default, of which newer versions know more."""
    return {name: value for name, value in layout.items() if value is not None}


def _layout(layout: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in _given(layout).items())
