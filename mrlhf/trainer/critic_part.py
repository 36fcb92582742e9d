"""PPO on the ranks of critic and reward models, under ``placement: split``; `mrlhf.trainer.ppo` is the actor's part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mrlhf.data.prompts import Prompt, PromptDataset, PromptStream
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.parallel.collectives import all_reduce_metrics
from mrlhf.progress import Display
from mrlhf.roles.critic import Critic
from mrlhf.roles.model import counts_metrics
from mrlhf.roles.reward import ScoreSource
from mrlhf.trainer import ppo_job as jobs
from mrlhf.trainer.checkpointing import Checkpointer
from mrlhf.trainer.loop import rewound, run_loop
from mrlhf.trainer.offloading import Offloading
from mrlhf.trainer.outputs import export_dtype, export_model
from mrlhf.trainer.report import PhaseTimer, worst_of_ranks
from mrlhf.trainer.rollouts import Scorer
from mrlhf.trainer.run_state import saved_models
from mrlhf.trainer.settings import inference_cut, update_settings
from mrlhf.trainer.split import Agreement, Answerer, share_metrics
from mrlhf.trainer.stopping import open_heartbeat
from mrlhf.trainer.updates import Updater

if TYPE_CHECKING:
    from mrlhf.checkpoint.training_state import Average, SavedModel


class CriticTrainer:
    """All of a run on such a rank: it answers the actor's ranks, and trains the critic."""

    def __init__(
        self,
        job: jobs.PPOJob,
        tokenizer: Tokenizer,
        dataset: PromptDataset,
        functions: list[tuple[ScoreSource, float]],
        held_out: PromptDataset | None = None,
    ) -> None:
        """Build the models; all ranks of the job build theirs at the same time.

        Args:
            job: the world and its groups.
            tokenizer: the actor's.
            dataset: encoded prompts.
            functions: reward functions with their weights; they are called here.
            held_out: encoded prompts of the evaluations, where there are any.
        """
        assert job.split is not None
        config = job.config
        self.job, self.config, self.tokenizer, self.held_out = job, config, tokenizer, held_out
        jobs.wait_for_actor_ranks(job)
        self.critic: Critic | None = jobs.build_critic(job) if config.ppo.needs_critic else None
        reward_models = jobs.build_reward_models(job)
        trained = [self.critic] if self.critic is not None else []
        self.offloading = Offloading(config.offload, rewards=[model for model, _ in reward_models], trained=trained)
        self.heartbeat = open_heartbeat(config.output_dir, config.launch.timeout_minutes)
        groups = job.groups
        self.scorer = Scorer(
            reward_models, functions, tokenizer, groups.replica, groups.intra_dist_opt, self.heartbeat.alone
        )
        self.stream = PromptStream(
            dataset,
            seed=config.seed,
            batch_size=config.rollout.prompts_per_iteration,
            samples_per_prompt=config.rollout.samples_per_prompt,
            shuffle=config.data.shuffle,
        )
        self.timer: PhaseTimer | None = None
        """Of the iteration at hand, or of the last one."""
        self.answerer = Answerer(
            job.split.bridge,
            groups.dp,
            self.critic,
            self.scorer,
            inference_cut(config.inference),
            self._prompt,
            semantics=config.semantics,
            device=job.device,
            working=partial(self._part, "critic_inference"),
        )
        other = Agreement("actor", texts=config.ptx.path is not None)
        working = partial(self._part, "critic_train")
        self.updater = Updater(None, self.critic, update_settings(config), other=other, working=working)
        self.stopped: str | None = None
        self.checkpoints = Checkpointer(job, config.trainer, CriticRunState(self), iterations=config.trainer.iterations)

    def train(self) -> None:
        """All iterations, or those up to a request to stop."""
        trainer = self.config.trainer
        run_loop(self, trainer, iterations=trainer.iterations, exports=(), noun="iteration")

    def advance(self, index: int, display: Display) -> dict[str, float]:
        """`iterate`; where the reward fails, the trainer is as it was before."""
        with rewound(self.stream):
            return self.iterate(index, display)

    def iterate(self, iteration: int, display: Display) -> dict[str, float]:
        """The other half of `mrlhf.trainer.ppo.PPOTrainer.iterate`; returns the same metrics."""
        self.heartbeat.iteration(iteration + 1)
        timer = self.timer = PhaseTimer(display, self.heartbeat)
        with timer.phase("rollout"):
            self.offloading.before_rollout()
            # The place in it is saved by the actor's ranks, and must be the same here after a resume.
            next(self.stream)
            heard = self.answerer.listen()
            assert heard is not None
        with timer.phase("inference"):
            self.offloading.before_inference()
            batch = self.answerer.answer(*heard)
        if self.critic is not None:
            batch = batch.replace(returns=self.answerer.returns())
        warming_up = iteration < self.config.ppo.critic_warmup_iterations
        with timer.phase("train"):
            self.offloading.before_train()
            accumulator, _ = self.updater.run(batch, iteration, train_actor=not warming_up)
        if counts_metrics(self.job.groups):
            accumulator.add(self.scorer.source_metrics())
        all_reduce_metrics(accumulator.metrics())
        worst_of_ranks(timer.seconds())
        return share_metrics(self._advance_rate())

    def measure(self, index: int, display: Display) -> dict[str, float]:
        """Answer the questions of an evaluation that is due after an iteration; returns its metrics."""
        if self.held_out is None or not self.config.trainer.evaluates_after(index + 1):
            return {}
        self.heartbeat.phase("evaluation")
        self.offloading.before_evaluation()
        while (heard := self.answerer.listen()) is not None:
            self.answerer.answer(*heard)
        return share_metrics({})

    def announce(self, display: Display) -> None:
        """Nothing: rank 0 speaks for all."""

    def summary(self, first: int, begun: Mapping[str, float], last: Mapping[str, float]) -> str:
        """Nothing: rank 0 speaks for all."""
        return ""

    def export(self, suffix: str = "") -> None:
        """Write the critic, if there is one, as a Hugging Face folder.

        Args:
            suffix: of the folder's name.
        """
        config, trainer = self.config, self.config.trainer
        if self.critic is None:
            return
        export_model(
            self.critic,
            config.output_dir / f"critic{suffix}",
            source=config.critic_path,
            head="value",
            groups=self.critic.groups,
            tokenizer=self.tokenizer,
            overwrite=trainer.overwrite or self.checkpoints.first > 0,
            dtype=export_dtype(trainer, self.critic.config.dtype, self.job.dtype),
        )

    def _advance_rate(self) -> dict[str, float]:
        """The critic's learning rate of this iteration, before it moves on; from one rank."""
        if self.critic is None:
            return {}
        rate = self.critic.trainable.learning_rate
        self.critic.trainable.advance_schedule()
        return {"critic_lr": rate} if dist.get_rank(self.job.groups.intra_dist_opt) == 0 else {}

    def _prompt(self, group: int, held_out: bool) -> Prompt:
        if not held_out:
            return self.stream.prompt(group)
        assert self.held_out is not None
        return self.held_out.prompts[group]

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        assert self.timer is not None
        with self.timer.part(name):
            yield


class CriticRunState:
    """Of a `CriticTrainer`: what rank 0 does not have."""

    def __init__(self, trainer: CriticTrainer) -> None:
        """Keep the reference."""
        self.trainer = trainer

    def models(self) -> dict[str, SavedModel]:
        """The critic, if there is one."""
        critic = self.trainer.critic
        return saved_models(*([critic] if critic is not None else []))

    def averages(self) -> dict[str, Average]:
        """None."""
        return {}

    def inputs(self) -> dict[str, Any]:
        """None: rank 0 reads the same."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing: rank 0 has it all."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `mrlhf.trainer.run_state.PPORunState` gave."""
        self.trainer.stream.load_state_dict(state["stream"])
        self.trainer.updater.bad_steps = state["bad_steps"]
