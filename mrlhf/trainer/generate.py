"""Samples responses to a file of prompts, without training."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist

from mrlhf.config_inference import GenerateConfig
from mrlhf.data.prompts import Prompt
from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.errors import ConfigError
from mrlhf.folders import check_writable_file
from mrlhf.parallel.collectives import all_gather_objects
from mrlhf.parallel.launch import shutdown
from mrlhf.roles.policy import PolicyModel
from mrlhf.rollout.engine import Generation, GenerationRequest
from mrlhf.rollout.scheduler import Ends
from mrlhf.trainer import ppo_job as jobs
from mrlhf.trainer.inputs import check_vocabulary, read_dataset, stop_ids, stop_strings
from mrlhf.trainer.settings import sampling_params


def run(config: GenerateConfig, *, prompts: Path, output: Path) -> None:
    """Write ``rollout.samples_per_prompt`` responses to every prompt; every rank of the job calls this.

    ``output`` gets one JSON object per response, in the order of the prompts: ``prompt``, ``response``,
    ``response_length``, ``truncated``, ``sample_id`` and the other fields of the prompt's line as ``meta``. It is
    written under another name first, so that a file that is there is complete.

    Args:
        config: actor, tokenizer, data, rollout, parallel and precision are used.
        prompts: the prompt file (already ``config.data.prompts``).
        output: JSONL file to write.

    Raises:
        MrlhfError: anything the user can mend.
    """
    assert str(prompts) == config.data.prompts, "the prompt file is part of the configuration"
    models = jobs.read_models(config, roles=("actor",))
    model = models["actor"]
    env = jobs.check_inference(config, models, max_response_length=config.rollout.max_response_length)
    check_writable_file(output, "--output")
    if output.resolve() == prompts.resolve():
        raise ConfigError(f"--output: {output} is the file of the prompts, which would be lost; choose another")
    tokenizer = load_tokenizer(config.tokenizer_path, config.tokenizer.chat_template)
    check_vocabulary(config, tokenizer, model.vocab_size)
    dataset = read_dataset(config, tokenizer, [model])
    jobs.check_cache(config, models, env, dataset, config.rollout.max_response_length, trained=())
    job = jobs.join(config, models, env)
    actor = jobs.build_policy(job)
    per_prompt = config.rollout.samples_per_prompt
    numbered = [(i, p) for i, p in enumerate(p for p in dataset.prompts for _ in range(per_prompt))]
    mine = numbered[job.dp_rank :: job.dp_size]
    stop, complete = stop_ids(config, tokenizer, model.eos_token_ids), stop_strings(config, tokenizer)
    made = _generate(job, actor, mine, stop, complete)
    # Every rank of a replica has the same responses; the first replica member of each data-parallel group counts.
    gathered = {g.sample_id: g for part in all_gather_objects(made, job.groups.dp) for g in part}
    if dist.get_rank() == 0:
        output.parent.mkdir(parents=True, exist_ok=True)
        unfinished = output.with_name(output.name + ".tmp")
        with unfinished.open("w", encoding="utf-8") as file:
            for number, prompt in numbered:
                generation = gathered[number]
                row = {
                    "prompt": prompt.text,
                    "response": tokenizer.decode(generation.tokens),
                    "response_length": len(generation.tokens),
                    "truncated": generation.truncated,
                    "sample_id": number,
                    "meta": prompt.meta,
                }
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        unfinished.replace(output)
        print(f"{len(numbered)} responses in {output}")
    dist.barrier()
    shutdown()


def _generate(
    job: jobs.PPOJob,
    actor: PolicyModel,
    numbered: list[tuple[int, Prompt]],
    stop: list[int],
    complete: Ends | None,
) -> list[Generation]:
    rollout = job.config.rollout
    requests = [GenerationRequest(number, prompt.ids, rollout.max_response_length) for number, prompt in numbered]
    engine = actor.engine(rollout.batch_size, rollout.kv_cache_bytes)
    return engine.generate(
        requests, sampling_params(job.config), stop_ids=stop, seed=job.config.seed, step=0, complete=complete
    )
