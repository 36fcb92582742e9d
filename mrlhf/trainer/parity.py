"""Replays a recorded PPO trajectory under a parallel layout and compares every number."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from mrlhf.checkpoint.hf_export import export_hf
from mrlhf.megatron.schedule import forward_only
from mrlhf.metrics import MetricAccumulator
from mrlhf.parallel.batches import gather_batch
from mrlhf.parallel.collectives import all_gather_objects, all_reduce_metrics, broadcast_from_last_stage
from mrlhf.parallel.layout import data_parallel_slice
from mrlhf.rl import masked_mean
from mrlhf.roles.actor import Actor
from mrlhf.roles.critic import Critic
from mrlhf.roles.model import RoleModel, TrainedModel, Update
from mrlhf.roles.reference import Reference
from mrlhf.roles.reward import RewardModel
from mrlhf.rollout.engine import GenerationRequest
from mrlhf.rollout.sampling import SamplingParams, sample_tokens
from mrlhf.trainer import ppo_job as jobs
from mrlhf.trainer.experience import add_advantages, add_inference, add_masks
from mrlhf.trainer.recording import Recording, read_recording, strip_left_padding
from mrlhf.trainer.recording_schema import check_recorded
from mrlhf.trainer.rollouts import Scorer
from mrlhf.trainer.settings import inference_cut, shaping_settings, update_settings
from mrlhf.trainer.split import Agreement, Answerer, CriticRanks, Question
from mrlhf.trainer.updates import Step, Updater
from mrlhf.types import RolloutBatch

Kind = Literal["absolute", "relative", "loss", "identical"]
LOSS_ABSOLUTE, LOSS_RELATIVE = 1e-4, 5e-4


@dataclass
class Comparison:
    """One quantity: its largest deviation so far and what is allowed."""

    tolerance: float
    kind: Kind
    deviation: float = 0.0
    count: int = 0

    @property
    def holds(self) -> bool:
        """Whether something was compared and all of it agrees (NaN does not)."""
        return self.count > 0 and self.deviation <= self.tolerance


@dataclass
class Report:
    """All comparisons by name, in order."""

    rows: dict[str, Comparison] = field(default_factory=dict)

    def compare(self, name: str, ours: Any, recorded: Any, tolerance: float, kind: Kind = "absolute") -> None:
        """Add the largest deviation of one array.

        ``relative`` is to the recorded number; ``loss`` counts as relative above 0.2 and as absolute below, so that
        5e-4 relative or 1e-4 absolute is one tolerance of 5e-4.
        """
        a = torch.as_tensor(ours, dtype=torch.float64).cpu().flatten()
        b = torch.as_tensor(recorded, dtype=torch.float64).cpu().flatten()
        row = self.rows.setdefault(name, Comparison(tolerance, kind))
        if a.shape != b.shape or not a.numel():
            row.count, row.deviation = row.count + 1, float("inf")
            return
        difference = (a - b).abs()
        if kind == "relative":
            difference = difference / b.abs().clamp(min=1e-12)
        elif kind == "loss":
            difference = difference / b.abs().clamp(min=LOSS_ABSOLUTE / LOSS_RELATIVE)
        largest = float("nan") if bool(difference.isnan().any()) else float(difference.max())
        row.count += a.numel()
        row.deviation = largest if not largest <= row.deviation else row.deviation

    def gather(self) -> None:
        """Put the rows of all ranks together; critic and actor may be on different ones."""
        for part in all_gather_objects(self.rows):
            for name, row in part.items():
                mine = self.rows.setdefault(name, row)
                mine.deviation = row.deviation if not row.deviation <= mine.deviation else mine.deviation

    @property
    def holds(self) -> bool:
        """Whether every row holds."""
        return bool(self.rows) and all(row.holds for row in self.rows.values())

    def print(self, title: str) -> None:
        """One table on standard output."""
        table = Table(title=title)
        for column in ("quantity", "numbers", "largest deviation", "tolerance", ""):
            table.add_column(column, justify="left" if column in ("quantity", "") else "right")
        for name, row in self.rows.items():
            kind = {"loss": " relative*", "absolute": " absolute"}.get(row.kind, f" {row.kind}")
            table.add_row(
                name,
                str(row.count),
                f"{row.deviation:.2e}",
                "identical" if row.kind == "identical" else f"{row.tolerance:.0e}{kind}",
                "ok" if row.holds else "[bold red]DIFFERS[/]",
            )
        table.caption = "* below 0.2 absolute: 1e-04"
        Console(width=None if Console().is_terminal else 110).print(table)


def run(folder: Path, overrides: list[str], semantics: str | None = None) -> int:
    """Replay and compare; the exit status is 0 when everything agrees, else 1."""
    report, layout = replay(read_recording(folder, semantics), overrides)
    if dist.get_rank() == 0:
        report.print(f"parity of {folder} under {layout}")
        # A launcher may end this process as soon as another rank has returned non-zero.
        sys.stdout.flush()
    dist.barrier()
    return 0 if report.holds else 1


def replay(recording: Recording, overrides: list[str]) -> tuple[Report, str]:
    """Every comparison, the same on every rank, and a description of the layout."""
    # TF32 has 10 bits of mantissa; the recorded numbers are fp32.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    config = recording.config(overrides)
    models = jobs.read_models(config)
    check_recorded(recording.expected, recording.folder / "expected.json", vocab_size=models["actor"].vocab_size)
    job = jobs.start_job(config, models)
    here = job.split is None or job.split.bridge.on_actor_ranks
    replayer = _Replay(recording, job) if here else _CriticReplay(recording, job)
    replayer.run()
    replayer.report.gather()
    return replayer.report, jobs.described_places(job)


class _Replay:
    def __init__(self, recording: Recording, job: jobs.PPOJob) -> None:
        self.recording, self.job, self.report = recording, job, Report()
        self.actor: Actor = jobs.build_actor(job)
        self.critic: Critic | None = None
        self.critic_ranks: CriticRanks | None = None
        self.reference: Reference = jobs.build_reference(job)
        if job.split is None:
            self.critic = jobs.build_critic(job)
            self.reward: RewardModel = jobs.build_reward_model(job, 0)
        else:
            jobs.wait_for_critic_ranks(job)
            self.critic_ranks = CriticRanks(job.split.bridge, job.groups.dp, evaluated_samples=1)

    def run(self) -> None:
        """Everything that is recorded, in its order."""
        expected = self.recording.expected
        models = [self.reference, *([self.reward] if self.critic_ranks is None else [])]
        frozen = [model.weights_hash() for model in models]
        self._greedy("greedy", [self.recording.settings["eos_token_id"]])
        if "greedy_with_eos" in expected:
            self._greedy("greedy_with_eos", expected["greedy_with_eos"]["eos_token_ids"])
        self._probe("probe", expected["probe"], "logits", 2e-4)
        for index, rollout in enumerate(expected["rollouts"]):
            self._rollout(index, rollout)
        compare_final(self.report, self.recording, {"actor": self.actor, "critic": self.critic})
        self._probe("final probe", expected["final"], "probe_logits", 1e-3)
        same = frozen == [model.weights_hash() for model in models]
        self.report.compare("reference and reward unchanged", float(not same), 0.0, 0.0, "identical")

    def _greedy(self, name: str, eos: Sequence[int]) -> None:
        settings, entry = self.recording.settings, self.recording.expected[name]
        limit, pad = settings["max_response_length"], settings["pad_token_id"]
        requests = [
            GenerationRequest(i, strip_left_padding(prompt, pad), limit) for i, prompt in enumerate(entry["prompts"])
        ]
        made = self.actor.engine(slots=max(len(requests), 1)).generate(
            requests, SamplingParams(temperature=0.0), stop_ids=eos, seed=0, step=0
        )
        rows = [
            prompt + g.tokens + [pad] * (limit - len(g.tokens))
            for prompt, g in zip(entry["prompts"], made, strict=True)
        ]
        self.report.compare(name, rows, entry["sequences"], 0.0, "identical")

    def _rollout(self, index: int, recorded: dict[str, Any]) -> None:
        job, recording, report = self.job, self.recording, self.report
        shaping = shaping_settings(job.config)
        batch = recording.batch(index, pad_to_multiple=job.pad_to_multiple).to(job.device)
        batch = batch.select(data_parallel_slice(batch.size, job.dp_rank, job.dp_size))
        batch = add_masks(batch, recording.semantics, recording.settings["max_response_length"])
        cut = inference_cut(job.config.inference)
        if self.critic_ranks is not None:
            self.critic_ranks.ask(batch, Question(True, 1, recording.settings["max_response_length"]))
        batch = add_inference(
            batch,
            cut,
            actor=self.actor,
            reference=self.reference,
            critic=self.critic,
            temperature=shaping.temperature,
        )
        if self.critic_ranks is None:
            batch = batch.replace(scores=self.reward.scores(batch, cut))
        else:
            batch = self.critic_ranks.answer(batch)
            batch = batch.replace(scores=batch.raw_scores)
        batch = gather_batch(add_advantages(batch, shaping, job.groups.dp), job.groups.dp)
        if self.critic_ranks is not None:
            self.critic_ranks.tell_returns(batch)
        self._compare_rollout(f"rollout {index}", batch, recorded, 2e-4 if index == 0 else 1e-3)
        if index == 0:
            assert batch.kl is not None
            assert batch.response_mask is not None
            # The mean, as it is logged: single tokens carry the rounding of two forward passes.
            mean_kl = float(masked_mean(batch.kl, batch.response_mask))
            report.compare("mean KL before any update", mean_kl, 0.0, 1e-6)
        other = Agreement("critic", texts=False) if job.split is not None else None
        made = Updater(self.actor, self.critic, update_settings(job.config), other=other).run(batch, index)
        compare_steps(report, {"actor": self.actor, "critic": self.critic}, *made, recorded["updates"])

    def _compare_rollout(self, name: str, batch: RolloutBatch, recorded: dict[str, Any], tolerance: float) -> None:
        assert batch.gae_mask is not None
        mask = self.recording.response_columns(batch, batch.gae_mask)
        for key, ours in (
            ("logprobs", batch.old_logprobs),
            ("ref_logprobs", batch.ref_logprobs),
            ("values", batch.values),
        ):
            assert ours is not None
            columns = self.recording.response_columns(batch, ours)
            theirs = torch.tensor(recorded[key], device=columns.device)
            self.report.compare(f"{name} {key}", columns[mask], theirs[mask], tolerance)
        self.report.compare(f"{name} reward scores", batch.scores, recorded["reward_scores"], tolerance)

    def _probe(self, name: str, entry: dict[str, Any], prefix: str, tolerance: float) -> None:
        ids = torch.tensor(self.recording.expected["probe"]["input_ids"], device=self.job.device)
        total, first, best = probe_logits(self.actor, ids, multiple=self.job.pad_to_multiple)
        report = self.report
        report.compare(f"{name} logits", first, entry[f"{prefix}_first8"], tolerance)
        # A sum of V logits carries the rounding of all of them.
        report.compare(f"{name} sum of logits", total / self.actor.config.vocab_size,
                       torch.tensor(entry[f"{prefix}_sum"]) / self.actor.config.vocab_size, tolerance)  # fmt: skip
        report.compare(f"{name} argmax", best, entry[f"{prefix}_argmax"], 0.0, "identical")


class _CriticReplay:
    """Of critic and reward model, where these have ranks of their own."""

    def __init__(self, recording: Recording, job: jobs.PPOJob) -> None:
        assert job.split is not None
        self.recording, self.job, self.report = recording, job, Report()
        jobs.wait_for_actor_ranks(job)
        self.critic = jobs.build_critic(job)
        self.scorer = Scorer(jobs.build_reward_models(job), [], None, job.groups.replica, job.groups.intra_dist_opt)
        self.answerer = Answerer(
            job.split.bridge,
            job.groups.dp,
            self.critic,
            self.scorer,
            inference_cut(job.config.inference),
            semantics=recording.semantics,
            device=job.device,
        )

    def run(self) -> None:
        """The critic's half of everything that is recorded."""
        frozen = [model.weights_hash() for model, _ in self.scorer.models]
        models = {"actor": None, "critic": self.critic}
        for index, rollout in enumerate(self.recording.expected["rollouts"]):
            heard = self.answerer.listen()
            assert heard is not None
            batch = self.answerer.answer(*heard)
            batch = batch.replace(returns=self.answerer.returns())
            updater = Updater(
                None, self.critic, update_settings(self.job.config), other=Agreement("actor", texts=False)
            )
            compare_steps(self.report, models, *updater.run(batch, index), rollout["updates"])
        compare_final(self.report, self.recording, models)
        same = frozen == [model.weights_hash() for model, _ in self.scorer.models]
        self.report.compare("reference and reward unchanged", float(not same), 0.0, 0.0, "identical")


def compare_steps(
    report: Report,
    models: Mapping[str, TrainedModel | None],
    metrics: MetricAccumulator,
    steps: list[Step],
    recorded: list[dict[str, Any]],
) -> None:
    """Losses and norms of the updates of a rollout; every rank of the job calls this.

    Args:
        report: gets the comparisons.
        models: actor and critic, as far as this rank has them.
        metrics: of the updates.
        steps: the updates.
        recorded: the same, as they were recorded.
    """
    merged = all_reduce_metrics(metrics.metrics())
    report.compare("ratio - 1 before an update", merged["ratio_error_before_update"].result(), 0.0, 1e-5)
    names = ("actor_loss", "critic_loss", "actor_grad_norm", "critic_grad_norm")
    ours: dict[str, list[float]] = {name: [] for name in names}
    for step in steps:
        for role, model in models.items():
            update: Update = getattr(step, role)
            total = all_reduce_metrics(update.metrics if model is not None and model.counts_metrics else {})
            ours[f"{role}_loss"].append(total["loss"].result())
            ours[f"{role}_grad_norm"].append(update.grad_norm)
    for name, values in ours.items():
        loss = name.endswith("loss")
        report.compare(
            name.replace("_", " "),
            values,
            [u[name] for u in recorded],
            LOSS_RELATIVE if loss else 2e-3,
            "loss" if loss else "relative",
        )


def compare_final(report: Report, recording: Recording, models: Mapping[str, TrainedModel | None]) -> None:
    """Norms of the weights after the last rollout; every rank of the job calls this. ``models`` as `compare_steps`."""
    final = recording.expected["final"]
    with tempfile.TemporaryDirectory(prefix="mrlhf-parity-") as temporary:
        for name, head, source in (("actor", "lm", "actor"), ("critic", "value", "reward")):
            norms = exported_norms(models[name], head, recording.folder / source, Path(temporary) / name)
            recorded = {_hf_name(k): v for k, v in final[f"{name}_weight_norms"].items()}
            ours = [norms.get(k, float("nan")) for k in recorded]
            report.compare(f"final {name} weight norms", ours, list(recorded.values()), 5e-6, "relative")


def _hf_name(recorded: str) -> str:
    """The critic's names in the recording are DeepSpeed-Chat's; those of the exported classifier are Hugging Face's."""
    return recorded.replace("v_head.", "score.").replace("rwtransformer.", "model.")


def exported_norms(model: RoleModel | None, head: str, source: Path, target: Path) -> dict[str, float]:
    """Norm of every Hugging Face tensor of the exported model, on every rank; None where other ranks have it."""
    norms: dict[str, float] = {}
    if model is not None:
        export_hf(model.chunks, model.config, target, source_folder=source, groups=model.groups, head=head)
        # One rank has written it, into its own folder.
        norms = {
            name: float(tensor.double().norm())
            for file in sorted(target.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }
    found: dict[str, float] = next(part for part in all_gather_objects(norms) if part)
    return found


def probe_logits(
    actor: RoleModel, ids: torch.Tensor, *, multiple: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum, first eight and argmax of the logits of ``ids [b, s]`` over the true vocabulary; on every rank.

    Each is put together from vocabulary shards without gathering logits.

    Returns:
        ``[b, s]``, ``[b, s, 8]`` and ``[b, s]`` int64.
    """
    b, s = ids.shape
    padded = torch.nn.functional.pad(ids, (0, -s % multiple))
    groups, vocab = actor.groups, actor.config.vocab_size

    def reduce(_: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Sum, first eight and argmax of a micro-batch's logits, over the vocabulary shards."""
        logits = logits[:, :s].float()
        start = groups.tp.rank() * logits.size(-1)
        columns = torch.arange(start, start + logits.size(-1), device=logits.device)
        total = torch.where(columns < vocab, logits.double(), 0.0).sum(-1)
        first = torch.zeros(b, s, 8, dtype=torch.float64, device=logits.device)
        here = columns < 8
        first[..., columns[here]] = logits[..., here].double()
        dist.all_reduce(total, group=groups.tp)
        dist.all_reduce(first, group=groups.tp)
        flat = logits.reshape(b * s, -1)
        uniforms = torch.zeros(b * s, dtype=torch.float64, device=flat.device)
        best = sample_tokens(flat, uniforms, SamplingParams(temperature=0.0), group=groups.tp, vocab_size=vocab)
        return total, first, best.view(b, s)

    results = forward_only(actor.chunks, [padded], reduce, groups=groups, tokens=lambda x: x)
    last = results[0] if actor.is_last_stage else (None, None, None)
    shapes = (((b, s), torch.float64), ((b, s, 8), torch.float64), ((b, s), torch.int64))
    total, first, best = (
        broadcast_from_last_stage(x, shape, dtype, groups.pp) for x, (shape, dtype) in zip(last, shapes, strict=True)
    )
    return total, first, best
