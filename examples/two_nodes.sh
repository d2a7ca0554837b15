#!/usr/bin/env bash
# Two "nodes" on one machine: each torchrun starts the processes of one of them, as it would on a host of its own.
#
#     examples/two_nodes.sh                                                       # one process each
#     PER_NODE=2 examples/two_nodes.sh --config examples/two_nodes.yaml           # two each, averaged in a hierarchy
#
# On real hosts run the one torchrun command on each of them, with its own --node-rank and the address of the first.
# What is given to this script is handed to digits.py.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
per_node=${PER_NODE:-1}
address=127.0.0.1
# One that is free, and that the system gives nobody who asks for any port.
port=${MASTER_PORT:-$(python - <<'PYTHON'
import random, socket
for port in random.sample(range(20000, 32000), 100):
    with socket.socket() as listener:
        try:
            listener.bind(("", port))
        except OSError:
            continue
        print(port)
        break
PYTHON
)}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

node() {
    exec python -m torch.distributed.run --nnodes=2 --nproc-per-node="$per_node" --node-rank="$1" \
        --master-addr="$address" --master-port="$port" \
        "$here/digits.py" fit --trainer.num_nodes=2 --trainer.devices="$per_node" "${@:2}"
}

node 1 "$@" >/dev/null &
nodes=$!
node 0 "$@" & # its last line is the accuracy
nodes="$nodes $!"
trap 'kill $nodes 2>/dev/null || true; wait' EXIT
wait -n # if one fails, the other would wait for it
wait -n
