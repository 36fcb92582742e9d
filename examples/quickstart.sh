#!/usr/bin/env bash
# The three steps of RLHF from nothing, on two CPU processes: tokenizer, SFT, reward model, PPO, then before and after.
# Another seed or folder: SEED=2 RUN_DIR=runs/second bash examples/quickstart.sh
# Arguments are passed on to PPO: bash examples/quickstart.sh trainer.iterations=5
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python}
seed=${SEED:-1}
run=${RUN_DIR:-runs/quickstart}
data=examples/data/quickstart
configs=examples/configs/quickstart
export OMP_NUM_THREADS=1

step() {
    printf '\n== %s\n' "$1" >&2
    "$python" -m torch.distributed.run --standalone --nproc-per-node 2 -m mrlhf "${@:2}" seed="$seed"
}

printf '== tokenizer: SentencePiece on %s\n' "$data/corpus.txt" >&2
"$python" -m mrlhf tokenizer train "$data/corpus.txt" --vocab-size 400 --output "$run/tokenizer" --overwrite
step "step 1, SFT: DP 2" sft "$configs/sft.yaml" tokenizer.path="$run/tokenizer" trainer.output_dir="$run/sft"
step "step 2, reward model: DP 2" reward "$configs/reward.yaml" model.path="$run/sft/model" trainer.output_dir="$run/reward"
ppo=("$configs/ppo.yaml" "reward.sources=[{kind: model, path: $run/reward/model}]" reference.path="$run/sft/model")
step "step 3, PPO: TP 2" ppo "${ppo[@]}" actor.path="$run/sft/model" trainer.output_dir="$run/ppo" "$@"
step "before and after, on prompts that were held out" eval "${ppo[@]}" actor.path="$run/ppo/actor" \
    evaluation.output_dir="$run/eval"
