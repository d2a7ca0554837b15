#!/usr/bin/env bash
# Everything that needs a GPU, in one run of less than eight minutes: the tests of tests/gpu, those of tests/device that
# can run on CUDA, then step time (eager, compiled) and memory beside torch DDP. One rank for each visible GPU.
#
#   benchmarks/gpu_check.sh               from anywhere
#   PYTHON=path/to/python benchmarks/gpu_check.sh
#   OUT=some/folder benchmarks/gpu_check.sh    keeps what each part printed, as files
#
# Python is $PYTHON, else python3 if it has torch, lightning and pytest, else a virtual environment made for the run.
# Exit status: 0 all parts passed, 1 some part failed, 2 nothing could be checked (no GPU).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
out=${OUT:-$scratch}
mkdir -p "$out"

has_packages() { "$1" -c 'import torch, torchmetrics, lightning.pytorch, pytest, pytest_timeout' 2>/dev/null; }

python=${PYTHON:-python3}
if ! has_packages "$python"; then
    if [[ -n ${PYTHON:-} ]]; then
        echo "gpu_check: $PYTHON lacks one of torch, torchmetrics, lightning, pytest, pytest-timeout" >&2
        exit 2
    fi
    if ! nvidia-smi -L >/dev/null 2>&1; then # before downloading gigabytes for nothing
        echo "gpu_check: no GPU here (nvidia-smi finds none); nothing was checked" >&2
        exit 2
    fi
    echo "gpu_check: python3 lacks a package; making a virtual environment"
    # With the system's packages: a torch that fits the driver, where there is one, is kept.
    python3 -m venv --system-site-packages "$scratch/venv" || exit 2
    python=$scratch/venv/bin/python
    "$python" -m pip install -q '.[test]' || { echo "gpu_check: installing the package's needs failed" >&2; exit 2; }
fi

"$python" - <<'PY' || exit 2
import sys
import torch

if not torch.cuda.is_available():
    sys.exit(f"gpu_check: no GPU here that torch {torch.__version__} can use; nothing was checked")
names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
print(f"gpu_check: torch {torch.__version__}, CUDA {torch.version.cuda}, {names}")
PY

failed=()

# part NAME SECONDS COMMAND...: run one part within its time, keep its output, go on if it fails.
part() {
    local name=$1 seconds=$2 start=$SECONDS
    shift 2
    echo "=== $name"
    timeout --kill-after=10 "$seconds" "$@" 2>&1 | tee "$out/$name.txt"
    local status=${PIPESTATUS[0]}
    ((status == 124 || status == 137)) && echo "gpu_check: $name ran past its $seconds s"
    ((status == 0)) || failed+=("$name ($status)")
    echo "=== $name: exit status $status after $((SECONDS - start)) s"
}

part tests 160 "$python" -m pytest tests/gpu -q -o addopts= # one process, and no need of pytest-xdist
part device 80 env TEST_DEVICE=cuda "$python" -m pytest tests/device -q -o addopts=
part step_time 110 "$python" benchmarks/step_time.py --device cuda --blocks 10 --output markdown
part compiled 70 "$python" benchmarks/compiled.py --device cuda --blocks 5 --variants native-view --output markdown
part memory 50 "$python" benchmarks/memory.py --device cuda --models transformer --output markdown

if ((${#failed[@]})); then
    echo "gpu_check: failed: ${failed[*]}"
    exit 1
fi
echo "gpu_check: all parts passed in $SECONDS s"
