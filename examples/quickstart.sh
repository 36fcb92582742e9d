#!/usr/bin/env bash
# PPO with tensor parallelism on two CPU processes. Arguments are passed on as overrides (trainer.iterations=10 ...).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
export OMP_NUM_THREADS=1
"$python" tools/make_tiny_model.py --target runs/quickstart/start --seed 0
exec "$python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    -m mrlhf ppo examples/configs/quickstart.yaml "$@"
