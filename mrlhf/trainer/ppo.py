"""PPO: rollout, inference, shaping, updates, metrics, export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist

from mrlhf.config_schema import PPOConfig
from mrlhf.data.prompts import PromptDataset, PromptStream, Sample, shard
from mrlhf.data.sft import SFTExample
from mrlhf.data.stream import ExampleSet, ExampleStream
from mrlhf.data.tokenizer import Tokenizer, load_tokenizer
from mrlhf.lines import LineFile
from mrlhf.parallel.batches import gather_batch
from mrlhf.parallel.collectives import all_reduce_metrics
from mrlhf.progress import Display
from mrlhf.roles.actor import Actor
from mrlhf.roles.critic import Critic
from mrlhf.roles.model import RoleModel
from mrlhf.roles.reference import Reference
from mrlhf.roles.reward import ScoreSource
from mrlhf.trainer import ppo_job as jobs
from mrlhf.trainer.checkpointing import Checkpointer
from mrlhf.trainer.critic_part import CriticTrainer
from mrlhf.trainer.ema import WeightAverage
from mrlhf.trainer.evaluate import build_evaluator
from mrlhf.trainer.evaluation import Evaluator, write_evaluation
from mrlhf.trainer.experience import ShapingSettings, add_advantages, add_inference, add_masks, score_clip_fraction
from mrlhf.trainer.inputs import (
    check_fields,
    check_vocabulary,
    read_dataset,
    read_held_out,
    read_texts,
    reward_functions,
    stop_ids,
    stop_strings,
)
from mrlhf.trainer.kl_control import AdaptiveKL
from mrlhf.trainer.loop import rewound, run_loop
from mrlhf.trainer.offloading import Offloading
from mrlhf.trainer.outputs import check_output_folder, check_writers, export_dtype, export_model
from mrlhf.trainer.precision import kernel_lines
from mrlhf.trainer.ptx import PTX
from mrlhf.trainer.report import PhaseTimer, iteration_metrics, sample_rows, worst_of_ranks
from mrlhf.trainer.rollouts import Sampler, Scorer
from mrlhf.trainer.run_state import PPORunState
from mrlhf.trainer.running import RunningMoments
from mrlhf.trainer.settings import inference_cut, sampling_params, shaping_settings, update_settings
from mrlhf.trainer.split import Agreement, CriticRanks, Question, share_metrics
from mrlhf.trainer.stopping import open_heartbeat, run_to_end
from mrlhf.trainer.updates import Updater
from mrlhf.types import RolloutBatch

EXPORTS = ("actor", "critic", "ema")
"""Names of the exported folders."""


def run(config: PPOConfig) -> int:
    """Train as configured, export, and leave the process group; every rank of the job calls this.

    Returns:
        The exit status: 0, or that of a run that was asked to stop early.

    Raises:
        MrlhfError: anything the user can mend: configuration, data, checkpoints, reward functions.
    """
    return run_to_end(build_trainer(config), export=config.trainer.export)


def build_trainer(config: PPOConfig) -> PPOTrainer | CriticTrainer:
    """Read everything the configuration names, check it, join the other ranks and build this rank's models.

    Raises:
        MrlhfError: as `run`.
    """
    models = jobs.read_models(config)
    # Before the prompts are encoded, which can take minutes.
    env = jobs.check_job(config, models)
    tokenizer = load_tokenizer(config.tokenizer_path, config.tokenizer.chat_template)
    check_vocabulary(config, tokenizer, models["actor"].vocab_size)
    functions = reward_functions(config)
    dataset = read_dataset(config, tokenizer, models.values())
    held_out = read_held_out(config, tokenizer, models.values()) if config.trainer.eval_interval else None
    jobs.check_cache(config, models, env, dataset, config.rollout.max_response_length, held_out=held_out)
    check_fields(functions, dataset, *([held_out] if held_out else []))
    texts = read_texts(config, tokenizer, models["actor"]) if config.ptx.path is not None else None
    check_output(config)
    job = jobs.start_job(config, models)
    if job.split is not None and not job.split.bridge.on_actor_ranks:
        return CriticTrainer(job, tokenizer, dataset, functions, held_out)
    return PPOTrainer(job, tokenizer, dataset, functions, held_out, texts)


def check_output(config: PPOConfig) -> None:
    """`check_output_folder` for everything that the run reads. Raises `ConfigError`."""
    files = [path for path in config.data_files().values() if path]
    inputs = [*config.model_folders().values(), config.tokenizer_path, *files]
    trainer = config.trainer
    check_output_folder(config.output_dir, EXPORTS, inputs, overwrite=trainer.overwrite, resume=trainer.resume)
    check_writers(config.trainer)


class PPOTrainer:
    """All of a run on this rank; under ``placement: split`` that of the ranks of actor and reference."""

    def __init__(
        self,
        job: jobs.PPOJob,
        tokenizer: Tokenizer,
        dataset: PromptDataset,
        functions: list[tuple[ScoreSource, float]],
        held_out: PromptDataset | None = None,
        texts: ExampleSet[SFTExample] | None = None,
    ) -> None:
        """Build the models: four, or those that this rank is to have.

        Args:
            job: the world and its groups.
            tokenizer: the actor's.
            dataset: encoded prompts.
            functions: reward functions with their weights.
            held_out: encoded prompts of the evaluations, where there are any.
            texts: examples of the language modelling steps, where there are any.
        """
        config = job.config
        self.job, self.config, self.tokenizer, self.dataset = job, config, tokenizer, dataset
        self.held_out = held_out
        self.actor: Actor = jobs.build_actor(job)
        self.critic: Critic | None = jobs.build_critic(job) if config.ppo.needs_critic and job.split is None else None
        self.reference: Reference | None = jobs.build_reference(job) if config.needs_reference else None
        reward_models = jobs.build_reward_models(job) if job.split is None else []
        self.critic_ranks = self._meet_critic_ranks(job)
        self.heartbeat = open_heartbeat(config.output_dir, config.launch.timeout_minutes)
        everyone = job.groups.intra_dist_opt
        self.scorer = Scorer(reward_models, functions, tokenizer, job.groups.replica, everyone, self.heartbeat.alone)
        self.sampler = Sampler(
            self.actor.engine(config.rollout.batch_size, config.rollout.kv_cache_bytes),
            sampling_params(config),
            semantics=config.semantics,
            stop_ids=stop_ids(config, tokenizer, job.models["actor"].eos_token_ids),
            pad_id=tokenizer.pad_id,
            max_response_length=config.rollout.max_response_length,
            pad_to_multiple=job.pad_to_multiple,
            seed=config.seed,
            dp_group=job.groups.dp,
            device=job.device,
            complete=stop_strings(config, tokenizer),
            with_logprobs=config.keeps_rollout_logprobs,
        )
        self.ema = WeightAverage(self.actor, config.ppo.ema_decay) if config.ppo.ema_decay is not None else None
        ptx = self._build_ptx(texts) if texts is not None else None
        trained = [model for model in (self.actor, self.critic) if model is not None]
        rewards = [model for model, _ in reward_models]
        idle = not config.ppo.uses_reference
        self.offloading = Offloading(
            config.offload, reference=self.reference, rewards=rewards, trained=trained, idle_reference=idle
        )
        self.timer: PhaseTimer | None = None
        """Of the iteration at hand, or of the last one."""
        other = None
        if job.split is not None:
            trains = "critic" if config.ppo.needs_critic else ""
            other = Agreement(trains, texts=texts is not None)
        self.updater = Updater(
            self.actor, self.critic, update_settings(config), ptx=ptx, ema=self.ema, other=other, working=self._training
        )
        self.kl_control: AdaptiveKL | None = None
        if config.ppo.kl_target is not None:
            self.kl_control = AdaptiveKL(config.ppo.kl_coef, target=config.ppo.kl_target, horizon=config.ppo.kl_horizon)
        self.samples = LineFile(config.output_dir / "samples.jsonl")
        self.held_out_samples = LineFile(config.output_dir / "eval_samples.jsonl")
        self.stopped: str | None = None
        self.normalizer = RunningMoments() if config.reward.normalize else None
        self.stream = PromptStream(
            dataset,
            seed=config.seed,
            batch_size=config.rollout.prompts_per_iteration,
            samples_per_prompt=config.rollout.samples_per_prompt,
            shuffle=config.data.shuffle,
        )

        self.evaluator: Evaluator | None = None
        if held_out is not None and self.reference is not None:
            scorer = self.critic_ranks or self.scorer
            self.evaluator = build_evaluator(job, self.actor, self.reference, scorer, tokenizer, held_out)
        self.checkpoints = Checkpointer(job, config.trainer, PPORunState(self), iterations=config.trainer.iterations)

    def train(self) -> None:
        """All iterations, or those up to a request to stop."""
        trainer = self.config.trainer
        run_loop(self, trainer, iterations=trainer.iterations, exports=EXPORTS, noun="iteration")

    def advance(self, index: int, display: Display) -> dict[str, float]:
        """`iterate`; where the reward fails, the trainer is as it was before."""
        with rewound(self.stream):
            return self.iterate(index, display)

    def measure(self, index: int, display: Display) -> dict[str, float]:
        """Metrics ``eval/...`` after every ``trainer.eval_interval`` iterations and the last one."""
        done = index + 1
        if self.evaluator is None or not self.config.trainer.evaluates_after(done):
            return {}
        display.phase("evaluation")
        self.heartbeat.phase("evaluation")
        self.offloading.before_evaluation()
        evaluation = self.evaluator.run()
        if self.critic_ranks is not None:
            self.critic_ranks.no_more_questions()
        if dist.get_rank() == 0:
            try:
                write_evaluation(evaluation, self.held_out_samples, iteration=index)
            except OSError as error:
                display.message(f"warning: eval.json could not be written: {error}; the numbers are in the metrics")
            display.message(f"held out, after iteration {done}: {evaluation.summary()}")
            display.samples(evaluation.rows[: self.config.evaluation.samples_shown])
        metrics = {f"eval/{name}": value for name, value in evaluation.metrics.items()}
        return self._shared(metrics)

    def summary(self, first: int, begun: Mapping[str, float], last: Mapping[str, float]) -> str:
        """How far the mean score has come."""
        where = f"see {self.config.metrics_path}"
        if not begun:
            return where
        scores = begun["score_mean"], last["score_mean"]
        return f"mean score {scores[0]:.3f} in iteration {first + 1}, {scores[1]:.3f} in the last; {where}"

    def iterate(self, iteration: int, display: Display) -> dict[str, float]:
        """One rollout and its updates; returns the metrics, complete on every rank."""
        self.heartbeat.iteration(iteration + 1)
        timer = self.timer = PhaseTimer(display, self.heartbeat)
        with timer.phase("rollout"):
            self.offloading.before_rollout()
            samples = shard(
                next(self.stream),
                self.job.dp_rank,
                self.job.dp_size,
                samples_per_prompt=self.config.rollout.samples_per_prompt,
            )
            batch, width, samples = self.sampler.sample(samples, iteration)
            batch = add_masks(batch, self.config.semantics, width)
        with timer.phase("inference"):
            self.offloading.before_inference()
            batch = self._infer(batch, samples, width)
        shaping = self.shaping
        batch = gather_batch(add_advantages(batch, shaping, self.job.groups.dp), self.job.groups.dp)
        if self.critic_ranks is not None and self.config.ppo.needs_critic:
            self.critic_ranks.tell_returns(batch)
        warming_up = iteration < self.config.ppo.critic_warmup_iterations
        with timer.phase("train"):
            self.offloading.before_train()
            accumulator, steps = self.updater.run(batch, iteration, train_actor=not warming_up)
        if self.actor.counts_metrics:
            accumulator.add(self.scorer.source_metrics())
        reduced = {name: m.result() for name, m in all_reduce_metrics(accumulator.metrics()).items()}
        self._show_samples(iteration, batch, display)
        passes = len(steps) * self.config.ppo.minibatch_size / batch.size
        measured = worst_of_ranks(timer.seconds())
        metrics = iteration_metrics(batch, reduced, steps, measured, passes=passes, epoch=self.stream.epoch)
        metrics |= {"kl_coef": shaping.kl_coef, "score_clip_fraction": score_clip_fraction(batch, shaping)}
        if self.config.ppo.target_approx_kl is not None:
            metrics["early_stopped"] = float(not warming_up and any(step.actor is None for step in steps))
        if self.kl_control is not None and not warming_up:
            self.kl_control.update(metrics["kl_sequence"], batch.size)
        return self._shared(metrics | self._advance_rates(warming_up))

    def _shared(self, metrics: dict[str, float]) -> dict[str, float]:
        """``metrics`` as every rank has them, also those of the critic's ranks."""
        if self.critic_ranks is None:
            return metrics
        return share_metrics(metrics if dist.get_rank() == 0 else {})

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Time of this rank's own work in the updates, where others work at the same time."""
        if self.critic_ranks is None or self.timer is None:
            yield
            return
        with self.timer.part("actor_train"):
            yield

    @property
    def shaping(self) -> ShapingSettings:
        """Of the rewards, with the weight of the KL as it is now."""
        settings = shaping_settings(self.config)
        return settings if self.kl_control is None else replace(settings, kl_coef=self.kl_control.kl_coef)

    def _advance_rates(self, warming_up: bool) -> dict[str, float]:
        """The learning rates of this iteration, before they move on; the actor's waits for the critic's warm-up."""
        rates = {}
        for model in (self.actor, self.critic):
            if model is not None:
                rates[f"{model.name}_lr"] = model.trainable.learning_rate
                if model is self.critic or not warming_up:
                    model.trainable.advance_schedule()
        return rates

    def export(self, suffix: str = "") -> None:
        """Write actor, its average and the critic, as far as there are any, as Hugging Face folders.

        Args:
            suffix: of the folders' names.
        """
        self._export(self.actor, f"actor{suffix}", "lm", self.config.actor.path)
        if self.ema is not None:
            with self.ema.swapped_in():
                self._export(self.actor, f"ema{suffix}", "lm", self.config.actor.path)
        if self.critic is not None:
            self._export(self.critic, f"critic{suffix}", "value", self.config.critic_path)

    def _export(self, model: RoleModel, name: str, head: str, source: str) -> None:
        trainer = self.config.trainer
        export_model(
            model,
            self.config.output_dir / name,
            source=source,
            head=head,
            groups=model.groups,
            tokenizer=self.tokenizer,
            overwrite=trainer.overwrite or self.checkpoints.first > 0,
            dtype=export_dtype(trainer, model.config.dtype, self.job.dtype),
        )

    def _build_ptx(self, texts: ExampleSet[SFTExample]) -> PTX:
        config = self.config
        stream = ExampleStream(
            texts.examples, texts.fingerprint, seed=config.seed, batch_size=config.ptx_batch_size, noun="text"
        )
        return PTX(
            self.actor,
            stream,
            unsup_coef=config.ptx.unsup_coef,
            micro_batch_size=config.ppo.micro_batch_size,
            micro_batch_tokens=config.ppo.micro_batch_tokens,
            packing=config.ppo.packing,
            pad_id=self.tokenizer.pad_id,
            pad_to_multiple=self.job.pad_to_multiple,
            device=self.job.device,
        )

    def _meet_critic_ranks(self, job: jobs.PPOJob) -> CriticRanks | None:
        """The other part of the world, if there is one, while it builds its models."""
        if job.split is None:
            return None
        jobs.wait_for_critic_ranks(job)
        count = job.config.evaluation.samples_per_prompt
        return CriticRanks(job.split.bridge, job.groups.dp, evaluated_samples=count)

    def _infer(self, batch: RolloutBatch, samples: list[Sample], width: int | None = None) -> RolloutBatch:
        config = self.config
        cut = inference_cut(config.inference)
        actor = None if config.ppo.skip_old_logprobs else self.actor
        reference = self.reference if config.ppo.uses_reference else None
        say = partial(add_inference, cut=cut, actor=actor, reference=reference)
        say = partial(say, critic=self.critic, temperature=config.rollout.temperature)
        if self.critic_ranks is None or self.timer is None:
            batch = say(batch)
            batch = batch.replace(raw_scores=self.scorer.scores(batch, cut, samples))
        else:
            wanted = Question(config.ppo.needs_critic, config.rollout.samples_per_prompt, width)
            self.critic_ranks.ask(batch, wanted)
            with self.timer.part("actor_inference"):
                batch = say(batch)
            batch = self.critic_ranks.answer(batch)
        scores = batch.raw_scores
        if self.normalizer is not None and scores is not None:
            scores = self.normalizer.normalize(scores, self.job.groups.dp)
        return batch.replace(scores=scores)

    def announce(self, display: Display) -> None:
        """Say how the run is laid out, and what it reads."""
        parts, *warnings = kernel_lines(self.config, self.job.models, trained=jobs.TRAINED)
        for line in (f"{self.job.env.launcher}: {jobs.described_places(self.job)}; {parts}", *warnings):
            display.message(line)
        data = self.dataset
        left_out = {"malformed lines skipped": data.skipped, "over-long prompts dropped": data.dropped}
        left_out["over-long prompts cut"] = data.truncated
        counted = "".join(f", {count} {what}" for what, count in left_out.items() if count)
        display.message(f"{len(data)} prompts{counted}")

    def _show_samples(self, iteration: int, batch: RolloutBatch, display: Display) -> None:
        interval = self.config.trainer.sample_interval
        if dist.get_rank() != 0 or not interval or iteration % interval:
            return
        rows = sample_rows(batch, self.tokenizer, iteration)
        self.samples.write(rows)
        for row in rows[:2]:
            display.message(_one_line(row))


def _one_line(row: dict[str, Any], limit: int = 60) -> str:
    prompt, response = (" ".join(str(row[key]).split()) for key in ("prompt", "response"))
    return f"  [{row['score']:+.3f}] {prompt[-limit:]!r} -> {response[:limit]!r}"
