"""Arithmetic of the parallel layout: no tensors, no process groups, no files.

Sizes keep Megatron-Core's names. In messages TP, PP, VPP, CP, EP and DP are tensor, pipeline, virtual pipeline,
context, expert and data parallel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mrlhf.errors import ConfigError, join_problems
from mrlhf.model_config import ModelConfig
from mrlhf.planner_experts import expert_problems, some_divisors


@dataclass(frozen=True)
class ParallelSizes:
    """How many ranks share one model, and how.

    ``virtual_pipeline_model_parallel_size`` is the number of virtual stages on each pipeline rank; 1 means None.
    ``sequence_parallel`` has nothing to split without tensor parallelism and is then False. Without the numbers of
    layers all stages have equally many. ``expert_tensor_parallel_size`` (ETP) ranks share one expert; None, and TP
    itself, mean TP. EP x ETP ranks of a stage hold all experts once.
    """

    world_size: int = 1
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    sequence_parallel: bool = False
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    expert_tensor_parallel_size: int | None = None

    def __post_init__(self) -> None:
        if self.virtual_pipeline_model_parallel_size == 1:
            object.__setattr__(self, "virtual_pipeline_model_parallel_size", None)
        if self.tensor_model_parallel_size == 1:
            object.__setattr__(self, "sequence_parallel", False)
        if self.expert_tensor_parallel_size == self.tensor_model_parallel_size:
            object.__setattr__(self, "expert_tensor_parallel_size", None)
        for name in (
            "world_size",
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, expected a whole number of at least 1")

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one replica of a model: TP x PP x CP."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Replicas of a model. Raises `ConfigError` when the world is not a multiple of a replica."""
        if self.world_size % self.model_parallel_size:
            raise ConfigError(_world_problem(self))
        return self.world_size // self.model_parallel_size

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that share one expert (ETP)."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage: TP x CP x DP."""
        return self.world_size // self.pipeline_model_parallel_size

    @property
    def expert_block(self) -> int:
        """Consecutive ranks of a stage that hold all experts once: EP x ETP."""
        return self.expert_model_parallel_size * self.expert_tensor_size

    @property
    def joined_replicas(self) -> int:
        """Consecutive replicas that exchange tokens with one another's experts, and so make every pass together."""
        if self.expert_model_parallel_size == 1:
            return 1
        replica = self.tensor_model_parallel_size * self.context_parallel_size
        return math.lcm(replica, self.expert_block) // replica

    @property
    def virtual_stages(self) -> int:
        """Model chunks on each pipeline rank (1 without virtual stages)."""
        return self.virtual_pipeline_model_parallel_size or 1

    def describe(self) -> str:
        """One short line, for logs: ``world 8 = TP 2 x PP 2 x DP 2, sequence parallel``."""
        parts = [f"TP {self.tensor_model_parallel_size}", f"PP {self.pipeline_model_parallel_size}"]
        if self.context_parallel_size > 1:
            parts.append(f"CP {self.context_parallel_size}")
        text = f"world {self.world_size} = {' x '.join([*parts, f'DP {self.data_parallel_size}'])}"
        if self.expert_model_parallel_size > 1:
            text += f", experts over EP {self.expert_model_parallel_size}"
            text += f" x ETP {self.expert_tensor_size}" if self.expert_tensor_size > 1 else ""
        if self.virtual_stages > 1:
            text += f", {self.virtual_stages} virtual stages a rank"
        return text + (", sequence parallel" if self.sequence_parallel else "")


def token_multiple(sizes: ParallelSizes, tokens: int = 1) -> int:
    """What the width of rows is a multiple of, so that every rank gets a multiple of ``tokens`` of them.

    Sequence parallelism divides the width over TP, context parallelism into 2 CP pieces. FP8 products take 16 tokens
    (MXFP8 32), so that 16368 tokens become 16384 at TP 4, and 24 become 128 at TP 8.
    """
    tensor = sizes.tensor_model_parallel_size if sizes.sequence_parallel else 1
    context = sizes.context_parallel_size
    return tensor * context * (tokens if context == 1 else math.lcm(tokens, 2))


def padded_vocab_size(vocab_size: int, tensor_model_parallel_size: int, divisor: int = 128) -> int:
    """The vocabulary rounded up to a multiple of ``divisor * TP`` (Megatron's ``make_vocab_size_divisible_by``).

    50257 becomes 50304 at TP 1 and 50432 at TP 2.
    """
    multiple = divisor * tensor_model_parallel_size
    return math.ceil(vocab_size / multiple) * multiple


def layer_counts(
    num_layers: int,
    pipeline_model_parallel_size: int,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    first: int | None = None,
    last: int | None = None,
) -> list[list[int]]:
    """Layers of each stage: ``counts[pipeline rank][virtual stage]``.

    Virtual stage v of pipeline rank p comes at place ``v * PP + p`` in the model. ``first`` and ``last`` fix the first
    and the last pipeline stage (Megatron's ``num_layers_in_first_pipeline_stage`` and ``..._last_...``); the others
    share the rest. Raises `ConfigError` with the numbers when the layers do not split evenly.
    """
    pp, vpp = pipeline_model_parallel_size, virtual_pipeline_model_parallel_size or 1
    if first is None and last is None:
        if num_layers % (pp * vpp):
            raise ConfigError(_layers_problem(num_layers, pp, vpp))
        return [[num_layers // (pp * vpp)] * vpp for _ in range(pp)]
    if vpp > 1:
        raise ConfigError("uneven pipeline stages and virtual stages do not go together; set VPP to 1")
    free = [stage for stage in range(pp) if not (stage == 0 and first) and not (stage == pp - 1 and last)]
    rest = num_layers - (first or 0) - (last or 0)
    share, left_over = divmod(rest, len(free)) if free else (0, rest)
    if left_over or rest < 0 or (free and share < 1):
        raise ConfigError(
            f"{num_layers} layers with {first} on the first and {last} on the last of PP {pp} stages leave {rest} for "
            f"{len(free)} stages; they must share them evenly, at least one each"
        )
    counts = [[share] for _ in range(pp)]
    if first:
        counts[0] = [first]
    if last:
        counts[-1] = [last]
    return counts


def size_problems(
    sizes: ParallelSizes,
    models: Mapping[str, ModelConfig],
    *,
    prompts_per_iteration: int | None = None,
    rows_per_iteration: int | None = None,
    minibatch_size: int | None = None,
    micro_batch_size: int | None = None,
    micro_batch_tokens: int | None = None,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
    extra_slots: int = 0,
    batch_name: str = "minibatch_size",
) -> list[str]:
    """Everything about the sizes that cannot work, each with its numbers and a way out; empty when all fits.

    ``models`` maps a role (``actor``, ``reward``, ...) to its architecture. Rows are sequences of all ranks together.
    A quantity left at None is not checked. With ``micro_batch_tokens`` the micro-batches are cut by a token budget and
    ``micro_batch_size`` plays no part. ``extra_slots`` are positions needed beyond prompt and response (a model with a
    learned position table needs one for the slot after the last token). ``batch_name`` is the key of
    ``minibatch_size`` in messages.
    """
    problems = _layout_problems(sizes)
    for role, model in models.items():
        problems += _model_problems(role, model, sizes)
    problems += vocabulary_problems(models)
    if max_prompt_length is not None and max_response_length is not None:
        longest = max_prompt_length + max_response_length + extra_slots
        problems += _length_problems(models, max_prompt_length, max_response_length, extra_slots)
        if micro_batch_tokens is not None and micro_batch_tokens < longest:
            problems.append(
                f"a budget of {micro_batch_tokens} tokens a micro-batch cannot hold one row of {max_prompt_length} "
                f"prompt + {max_response_length} response tokens; raise micro_batch_tokens to at least {longest}"
            )
    if sizes.world_size % sizes.model_parallel_size == 0:
        problems += _batch_problems(
            sizes,
            prompts_per_iteration=prompts_per_iteration,
            minibatch_size=minibatch_size,
            micro_batch_size=None if micro_batch_tokens is not None else micro_batch_size,
            name=batch_name,
        )
    if rows_per_iteration is not None and minibatch_size is not None and rows_per_iteration % minibatch_size:
        problems.append(
            f"{rows_per_iteration} rows per iteration are not a multiple of minibatch_size {minibatch_size}; "
            f"use a minibatch_size from {some_divisors(rows_per_iteration)}, or another number of prompts"
        )
    return problems


def check_sizes(
    sizes: ParallelSizes,
    models: Mapping[str, ModelConfig],
    *,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
) -> None:
    """Raise one `ConfigError` that lists everything `size_problems` finds about layout, models and lengths."""
    problems = size_problems(
        sizes, models, max_prompt_length=max_prompt_length, max_response_length=max_response_length
    )
    if problems:
        raise ConfigError(join_problems("these sizes cannot work together:", problems))


def _world_problem(sizes: ParallelSizes) -> str:
    replica, world = sizes.model_parallel_size, sizes.world_size
    below, above = world // replica * replica, math.ceil(world / replica) * replica
    worlds = f"{below} or {above}" if below else f"{above}"
    return (
        f"world size {world} is not a multiple of TP {sizes.tensor_model_parallel_size} x PP "
        f"{sizes.pipeline_model_parallel_size} x CP {sizes.context_parallel_size} = {replica}; start {worlds} ranks, "
        f"or choose sizes whose product is one of {some_divisors(world)}"
    )


def _layers_problem(num_layers: int, pp: int, vpp: int) -> str:
    stages = f"PP {pp}" if vpp == 1 else f"PP {pp} x VPP {vpp} = {pp * vpp}"
    return (
        f"{num_layers} layers do not split into {stages} equal stages; "
        f"the number of stages must be one of {some_divisors(num_layers)}, "
        "or set num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage"
    )


def _layout_problems(sizes: ParallelSizes) -> list[str]:
    problems = []
    if sizes.world_size % sizes.model_parallel_size:
        problems.append(_world_problem(sizes))
    if sizes.virtual_stages > 1 and sizes.pipeline_model_parallel_size < 2:
        problems.append(
            f"VPP {sizes.virtual_stages} needs PP of at least 2, PP is {sizes.pipeline_model_parallel_size}; "
            "raise pipeline_model_parallel_size, or leave virtual_pipeline_model_parallel_size out"
        )
    elif sizes.expert_model_parallel_size > 1 and sizes.stage_ranks % sizes.expert_block:
        problems.append(
            f"EP {sizes.expert_model_parallel_size} x ETP {sizes.expert_tensor_size} = {sizes.expert_block} does not "
            f"divide the {sizes.stage_ranks} ranks of a stage (TP x CP x DP); expert_model_parallel_size times "
            f"expert_tensor_parallel_size must be one of {some_divisors(sizes.stage_ranks)}"
        )
    return problems


def _model_problems(role: str, model: ModelConfig, sizes: ParallelSizes) -> list[str]:
    tp, pp, vpp = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size, sizes.virtual_stages
    problems = []
    split = {
        "attention heads": model.num_attention_heads,
        "key-value heads": model.num_query_groups,
    }
    if model.moe_layers < model.num_layers:
        split["feed-forward columns"] = model.ffn_hidden_size
    bad = [f"{count} {what}" for what, count in split.items() if count % tp]
    if bad:
        works = some_divisors(math.gcd(*split.values()))
        problems.append(
            f"{role}: {' and '.join(bad)} cannot be divided over TP {tp}; "
            f"tensor_model_parallel_size must be one of {works}"
        )
    if model.num_query_groups and model.num_attention_heads % model.num_query_groups:
        problems.append(
            f"{role}: {model.num_attention_heads} attention heads are not a multiple of "
            f"{model.num_query_groups} key-value heads; the checkpoint's config.json is inconsistent"
        )
    problems += expert_problems(role, model, sizes)
    try:
        layer_counts(
            model.num_layers,
            pp,
            vpp,
            first=sizes.num_layers_in_first_pipeline_stage,
            last=sizes.num_layers_in_last_pipeline_stage,
        )
    except ConfigError as error:
        problems.append(f"{role}: {error}")
    return problems


def vocabulary_problems(models: Mapping[str, ModelConfig]) -> list[str]:
    """Models that do not read the same token ids, in one message; empty when all do."""
    vocabularies = {role: model.vocab_size for role, model in models.items()}
    if len(set(vocabularies.values())) < 2:
        return []
    listed = ", ".join(f"{role} {size}" for role, size in vocabularies.items())
    return [
        f"the models read the same token ids but have vocabularies of different size: {listed}; "
        "use models that share one tokenizer"
    ]


def _length_problems(models: Mapping[str, ModelConfig], prompt: int, response: int, extra: int) -> list[str]:
    needed = prompt + response + extra
    slots = f" + {extra} slot after it" if extra else ""
    return [
        f"{role}: {prompt} prompt + {response} response tokens{slots} = {needed} are over the model's length of "
        f"{model.max_position_embeddings}; lower max_prompt_length or max_response_length by "
        f"{needed - model.max_position_embeddings}"
        for role, model in models.items()
        if needed > model.max_position_embeddings
    ]


def _batch_problems(
    sizes: ParallelSizes,
    *,
    prompts_per_iteration: int | None,
    minibatch_size: int | None,
    micro_batch_size: int | None,
    name: str,
) -> list[str]:
    dp, pp, vpp = sizes.data_parallel_size, sizes.pipeline_model_parallel_size, sizes.virtual_stages
    problems = []
    if prompts_per_iteration is not None and prompts_per_iteration % dp:
        problems.append(
            f"prompts_per_iteration {prompts_per_iteration} is not a multiple of DP {dp}; "
            f"use {_neighbours(prompts_per_iteration, dp)}"
        )
    if minibatch_size is None:
        return problems
    rows = micro_batch_size or 1
    if minibatch_size % (dp * rows):
        micro = f" x micro_batch_size {rows} = {dp * rows}" if micro_batch_size else ""
        problems.append(
            f"{name} {minibatch_size} is not a multiple of DP {dp}{micro}; use {_neighbours(minibatch_size, dp * rows)}"
        )
    elif vpp > 1 and minibatch_size // (dp * rows) % pp:
        count = minibatch_size // (dp * rows)
        problems.append(
            f"with virtual stages the micro-batches of a step must be a multiple of PP {pp}, but {name} "
            f"{minibatch_size} / (DP {dp} x {rows} rows) makes {count}; "
            f"use a {name} of {_neighbours(minibatch_size, dp * rows * pp)}, or a smaller micro_batch_size"
        )
    return problems


def _neighbours(value: int, multiple: int) -> str:
    below, above = value // multiple * multiple, math.ceil(value / multiple) * multiple
    return f"{below} or {above}" if below else f"{above}"
