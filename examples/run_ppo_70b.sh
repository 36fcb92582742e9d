#!/usr/bin/env bash
# PPO of a 70B actor on four nodes of eight GPUs. This one file is shell AND Python, so that it starts in any of these
# ways; arguments are overrides (trainer.iterations=10) or options (--resume auto) of `mrlhf ppo`.
#
# 1. On each node, with torchrun's options in its own environment variables:
#        export PET_NPROC_PER_NODE=8 PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=node0:29500
#        torchrun --nnodes 4 examples/run_ppo_70b.sh
# 2. On each node, with options; torchrun starts this file with Python:
#        torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 examples/run_ppo_70b.sh
# 3. The same with torchrun --no-python: the first lines below then hand over to Python.
# 4. On each node, by itself; it calls torchrun with what these variables say:
#        NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 bash examples/run_ppo_70b.sh
#    or, under Slurm, as one task per node: srun --ntasks-per-node 1 bash examples/run_ppo_70b.sh
# As one task per GPU (srun --ntasks-per-node 8, mpirun -n 32) it is the rank itself: see slurm/ and mpi/ beside it.
#
# Variables of way 4: NNODES (1), NODE_RANK, MASTER_ADDR, MASTER_PORT (29500), NPROC_PER_NODE (all GPUs that are
# visible), MAX_RESTARTS (0), RDZV_ID, PYTHON; PRINT_COMMAND=1 shows the command instead of running it.
# Another configuration than configs/ppo_70b.yaml: a first argument that ends in .yaml, or MRLHF_CONFIG.

# For the shell the next line does nothing; for Python it begins a string that ends where the Python program begins.
''':'
set -euo pipefail
python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)

start() {
    if [ -n "${PRINT_COMMAND:-}" ]; then
        printf "%q " "$@"
        echo
        exit 0
    fi
    exec "$@"
}

fail() {
    echo "error: $*" >&2
    exit 2
}

as_rank() { start "$python" -u "$0" "$@"; }

# What is given, else all GPUs that this process sees, else one process.
processes() {
    if [ -n "${NPROC_PER_NODE:-${PET_NPROC_PER_NODE:-}}" ]; then
        echo "${NPROC_PER_NODE:-$PET_NPROC_PER_NODE}"
    elif compgen -G "/dev/nvidia[0-9]*" > /dev/null && [ "${CUDA_VISIBLE_DEVICES-all}" != "" ]; then
        echo gpu
    else
        echo 1
    fi
}

# torchrun on this node; the arguments are those of the run. Needs nnodes, node_rank (may be empty), address.
as_agent() {
    local options=(--nnodes "$nnodes" --nproc-per-node "$(processes)" --max-restarts "${MAX_RESTARTS:-0}")
    if [ "$nnodes" = 1 ] && [ -z "$address" ]; then
        options+=(--standalone)
    else
        [ -n "$address" ] || fail "NNODES is $nnodes, but MASTER_ADDR is not set: name the node that all of them can reach"
        options+=(--rdzv-backend c10d --rdzv-endpoint "$address:${MASTER_PORT:-29500}" --rdzv-id "$run_id")
        # torchrun would compare names to find out who serves the rendezvous; aliases and containers mislead it.
        case "$node_rank" in
            "") ;;
            0) options+=(--rdzv-conf is_host=1) ;;
            *) options+=(--rdzv-conf is_host=0) ;;
        esac
    fi
    # torchrun's shared store tells its address in the first round only: a node that comes back would wait for it.
    [ "${MAX_RESTARTS:-0}" = 0 ] || export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    start "$python" -m torch.distributed.run "${options[@]}" "$0" "$@"
}

nnodes=${NNODES:-1} node_rank=${NODE_RANK:-} address=${MASTER_ADDR:-} run_id=${RDZV_ID:-ppo_70b}
if [ -n "${TORCHELASTIC_RUN_ID:-}${LOCAL_RANK:-}" ]; then
    # torchrun --no-python has started this rank.
    as_rank "$@"
elif [ -n "${OMPI_COMM_WORLD_RANK:-}${MV2_COMM_WORLD_RANK:-}" ]; then
    as_rank "$@"
elif [ -n "${SLURM_STEP_ID:-}" ] && [ -n "${SLURM_PROCID:-}" ]; then
    tasks=${SLURM_STEP_NUM_TASKS:-${SLURM_NTASKS:-1}} nodes=${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-1}}
    [ "$tasks" = "$nodes" ] || as_rank "$@"
    nnodes=$nodes node_rank=${SLURM_NODEID:-0} run_id=${RDZV_ID:-$SLURM_JOB_ID.$SLURM_STEP_ID}
    if [ -z "$address" ] && [ "$nodes" != 1 ]; then
        address=$(PYTHONPATH="$root" "$python" -m mrlhf.parallel.slurm "${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}")
    fi
    as_agent "$@"
elif [ -n "${SLURM_JOB_ID:-}" ] && [ "${SLURM_NNODES:-1}" != 1 ] && [ -z "${NNODES:-}" ]; then
    fail "this is the batch script of a Slurm job of $SLURM_NNODES nodes; start it on each node with" \
        "srun --ntasks-per-node 1 bash $0, or as one task per GPU with sbatch examples/slurm/ppo.sbatch"
elif [ -n "${PMI_RANK:-}" ]; then
    as_rank "$@"
elif [ -n "${PET_NNODES:-}" ] && [ -z "${NNODES:-}" ]; then
    # All is said in torchrun's own variables, as Kubeflow sets them.
    start "$python" -m torch.distributed.run "$0" "$@"
else
    as_agent "$@"
fi
exit 0
: <<'# The end of the Python program.'
'''

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def main() -> None:
    """Call ``mrlhf ppo`` with the configuration and what else was given."""
    arguments = sys.argv[1:]
    config = os.environ.get("MRLHF_CONFIG") or os.path.join(ROOT, "examples", "configs", "ppo_70b.yaml")
    if arguments and arguments[0].endswith((".yaml", ".yml")):
        config = arguments.pop(0)
    # In place of the folder of this file: the package beside it, whether or not one is installed.
    sys.path[0] = ROOT
    sys.argv = ["mrlhf", "ppo", config, *arguments]
    from mrlhf.cli import main as mrlhf

    mrlhf()


# Helper processes import this file again.
if __name__ == "__main__":
    main()
# The end of the Python program.
