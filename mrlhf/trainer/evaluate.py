"""`mrlhf eval`: the actor of a configuration beside its reference, on held-out prompts."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from mrlhf.config_inference import EvalConfig
from mrlhf.data.prompts import PromptDataset
from mrlhf.data.tokenizer import Tokenizer, load_tokenizer
from mrlhf.errors import ConfigError, MrlhfError
from mrlhf.folders import check_writable
from mrlhf.lines import LineFile
from mrlhf.parallel.launch import shutdown
from mrlhf.progress import print_samples
from mrlhf.roles.policy import PolicyModel
from mrlhf.rollout.sampling import SamplingParams
from mrlhf.trainer import ppo_job as jobs
from mrlhf.trainer.evaluation import EVALUATION_FILES, Evaluation, EvaluationSettings, Evaluator, write_evaluation
from mrlhf.trainer.inputs import (
    check_fields,
    check_vocabulary,
    read_held_out,
    response_limit,
    reward_functions,
    stop_ids,
    stop_strings,
)
from mrlhf.trainer.rollouts import ScoreGiver, Scorer
from mrlhf.trainer.settings import inference_cut


def run(config: EvalConfig) -> None:
    """Write ``eval.json`` and ``eval_samples.jsonl`` into the evaluation's folder; every rank of the job calls this.

    Raises:
        MrlhfError: anything the user can mend.
    """
    models = jobs.read_models(config, roles=("actor", "reference", "reward"))
    env = jobs.check_inference(config, models, max_response_length=response_limit(config))
    folder = _output_folder(config)
    tokenizer = load_tokenizer(config.tokenizer_path, config.tokenizer.chat_template)
    check_vocabulary(config, tokenizer, models["actor"].vocab_size)
    functions = reward_functions(config)
    dataset = read_held_out(config, tokenizer, models.values())
    jobs.check_cache(config, models, env, dataset, response_limit(config), trained=())
    check_fields(functions, dataset)
    job = jobs.join(config, models, env)
    scorer = Scorer(jobs.build_reward_models(job), functions, tokenizer, job.groups.replica, job.groups.intra_dist_opt)
    actor, reference = jobs.build_policy(job), jobs.build_reference(job)
    evaluation = build_evaluator(job, actor, reference, scorer, tokenizer, dataset).run()
    if dist.get_rank() == 0:
        _write(evaluation, folder)
        print_samples(evaluation.rows[: config.evaluation.samples_shown])
        print(evaluation.summary())
        print(f"{len(dataset)} prompts; see {folder / 'eval.json'} and eval_samples.jsonl beside it")
    dist.barrier()
    shutdown()


def _write(evaluation: Evaluation, folder: Path) -> None:
    """`write_evaluation`, in place of an earlier one. Raises `MrlhfError` where not all can be written."""
    samples = LineFile(folder / "eval_samples.jsonl")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        samples.path.unlink(missing_ok=True)
        write_evaluation(evaluation, samples)
    except OSError as error:
        raise MrlhfError(f"{folder}: {error}") from error
    if samples.pending:
        raise MrlhfError(f"{samples.path}: not all rows could be written")


def _output_folder(config: EvalConfig) -> Path:
    """Where the evaluation goes. Raises `ConfigError` where it cannot be written or would replace the prompts."""
    key = "evaluation.output_dir" if config.evaluation.output_dir else "trainer.output_dir"
    folder = Path(config.evaluation.output_dir or config.output_dir / "eval")
    check_writable(folder, key)
    prompts = Path(config.evaluation.prompts or config.data.prompts)
    if prompts.resolve() in [(folder / name).resolve() for name in EVALUATION_FILES]:
        raise ConfigError(f"{key}: the evaluation would replace the prompts {prompts}; choose another folder")
    return folder


def build_evaluator(
    job: jobs.PPOJob,
    actor: PolicyModel,
    reference: PolicyModel,
    scorer: ScoreGiver,
    tokenizer: Tokenizer,
    dataset: PromptDataset,
) -> Evaluator:
    """The evaluator of a configuration on models that are there."""
    config = job.config
    evaluation = config.evaluation
    settings = EvaluationSettings(
        sampling=SamplingParams(evaluation.temperature, evaluation.top_k, evaluation.top_p),
        samples_per_prompt=evaluation.samples_per_prompt,
        max_response_length=response_limit(config),
        slots=config.rollout.batch_size,
        cut=inference_cut(config.inference),
        pad_to_multiple=job.pad_to_multiple,
        seed=config.seed,
        semantics=config.semantics,
        cache_bytes=config.rollout.kv_cache_bytes,
        complete=stop_strings(config, tokenizer),
    )
    return Evaluator(
        actor,
        reference,
        scorer,
        tokenizer,
        dataset.prompts,
        settings,
        stop_ids=stop_ids(config, tokenizer, job.models["actor"].eos_token_ids),
        device=job.device,
    )
