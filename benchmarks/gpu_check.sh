#!/usr/bin/env bash
# Everything that needs a GPU, in one run of less than eight minutes: the tests of tests/gpu, those of tests/device that
# can run on CUDA, then step time (eager, compiled), the hooks' time for each MB, and memory, beside torch's.
# Ranks have a GPU each and talk by NCCL; where the name of a part says "shared", two ranks share a GPU over gloo.
#
#   benchmarks/gpu_check.sh               from anywhere
#   benchmarks/gpu_check.sh --dry         all its code on the CPU and the simulated device, to see that it runs
#   PYTHON=path/to/python benchmarks/gpu_check.sh
#   PARTS="tests memory" benchmarks/gpu_check.sh
#   OUT=some/folder benchmarks/gpu_check.sh    keeps what each part printed, as files
#
# Python is $PYTHON, else python3 if it has torch, lightning and pytest, else a virtual environment made for the run.
# Exit status: 0 all parts passed, 1 some part failed, 2 nothing could be checked (no GPU).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
dry=
[[ ${1:-} == --dry ]] && dry=1

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
    if [[ -z $dry ]] && ! nvidia-smi -L >/dev/null 2>&1; then # before downloading gigabytes for nothing
        echo "gpu_check: no GPU here (nvidia-smi finds none); nothing was checked" >&2
        exit 2
    fi
    echo "gpu_check: python3 lacks a package; making a virtual environment"
    # With the system's packages: a torch that fits the driver, where there is one, is kept.
    python3 -m venv --system-site-packages "$scratch/venv" || exit 2
    python=$scratch/venv/bin/python
    "$python" -m pip install -q '.[test]' || { echo "gpu_check: installing the package's needs failed" >&2; exit 2; }
fi

if [[ -n $dry ]]; then
    echo "gpu_check: a dry run; figures mean nothing"
else
    "$python" - <<'PY' || exit 2
import sys
import torch

if not torch.cuda.is_available():
    sys.exit(f"gpu_check: no GPU here that torch {torch.__version__} can use; nothing was checked")
names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
print(f"gpu_check: torch {torch.__version__}, CUDA {torch.version.cuda}, {names}")
PY
fi

failed=()
limit=470 # of all parts together

# part NAME SECONDS COMMAND...: run one part within its time, keep its output, go on if it fails.
part() {
    local name=$1 seconds=$2 start=$SECONDS
    shift 2
    [[ -n ${PARTS:-} && " $PARTS " != *" $name "* ]] && return
    [[ -n $dry ]] && seconds=$limit
    ((seconds > limit - SECONDS)) && seconds=$((limit - SECONDS))
    if ((seconds < 5)); then
        echo "=== $name: no time left"
        failed+=("$name (no time)")
        return
    fi
    echo "=== $name"
    timeout --kill-after=10 "$seconds" "$@" 2>&1 | tee "$out/$name.txt"
    local status=${PIPESTATUS[0]}
    ((status == 124 || status == 137)) && echo "gpu_check: $name ran past its $seconds s"
    ((status == 0)) || failed+=("$name ($status)")
    echo "=== $name: exit status $status after $((SECONDS - start)) s"
}

# Warnings are shown, and fail nothing: what torch has to say on a device nobody may have seen before.
tests=("$python" -m pytest -v -o addopts= -o filterwarnings=default -p no:cacheprovider --timeout=120 --durations=5)
device=(--device cuda) few=() large=transformer output=(--output markdown)
if [[ -n $dry ]]; then
    limit=1800 # on whatever machine
    device=(--device cpu --world-size 1) few=(--steps 1) large=mlp
    export GPU_CHECK_DRY=1
fi
# Where pytest-xdist is there, tests of values share the GPU; those that look at traces and memory run alone.
several=()
"$python" -c 'import xdist' 2>/dev/null && several=(-n 4 --dist loadfile)

part build 90 "$python" -m lightning_ddp_hooks build-native
part tests 180 "${tests[@]}" -rA tests/gpu
if [[ -n $dry ]]; then
    part device 300 "${tests[@]}" tests/device/test_reducer_on_sim.py -k "queued or captured"
else
    part device 90 env TEST_DEVICE=cuda "${tests[@]}" "${several[@]}" tests/device
fi
part step_time 80 "$python" benchmarks/step_time.py "${device[@]}" "${few[@]}" --blocks "${dry:-8}" "${output[@]}" \
    --models stress "$large" --variants native-view python-view alone
part step_time_shared 40 "$python" benchmarks/step_time.py "${device[@]}" "${few[@]}" --world-size 2 \
    --blocks "${dry:-5}" "${output[@]}" --models "$large" --variants native-view python-view
part compiled 60 "$python" benchmarks/compiled.py "${device[@]}" "${few[@]}" --blocks "${dry:-5}" "${output[@]}" \
    --models "$large" --variants native-view
part hooks 40 "$python" benchmarks/hooks.py "${device[@]}" "${output[@]}" --rounds "${dry:-10}" --models "$large" \
    --hooks allreduce fp16 bf16 "powersgd 1" "powersgd 4" # the others do nothing on one rank
part hooks_shared 40 "$python" benchmarks/hooks.py "${device[@]}" --world-size 2 "${output[@]}" \
    --rounds "${dry:-5}" --models "$large" --hooks fp16 "powersgd 4" int8 fp8 topk
part memory 40 "$python" benchmarks/memory.py "${device[@]}" "${output[@]}" --repeats 1 --models "$large" \
    --variants ddp-view python-view native-view

if ((${#failed[@]})); then
    echo "gpu_check: failed: ${failed[*]}"
    exit 1
fi
echo "gpu_check: all parts passed in $SECONDS s"
