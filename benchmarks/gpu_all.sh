#!/usr/bin/env bash
# All that one NVIDIA GPU can tell in five minutes, most telling first: benchmarks/gpu_all.sh OUT [--dry-run]
#
# Runs from the source tree with the Python that has a torch for the GPU (PYTHON=python3). Each part has a time limit and
# writes into OUT as it goes, so that a run which is cut off leaves what it had. A part that fails does not stop the others,
# but for the trial: where the kernels are wrong, nothing else is worth its time. --dry-run rehearses the order without a
# GPU, through Triton's interpreter.
#
# Predictions, written before any GPU ran this (2026-11-23), and what an H200 measured (2026-11-26):
#   statistics, share of the copy bandwidth, 1.5B: float32 0.93 to 0.99: 1.06; bfloat16 0.88 to 0.99: 0.98
#   launches for statistics and decision 2: 2; syncs 0: 0; allocations 0: 0
#   guard / clip_grad_norm_(foreach=True), device, 1.5B bfloat16: 0.35 to 0.45: 0.21
#   2000 small tensors, host: below 0.15 with the extension: 0.035; above 1 without: 0.37
#   guarded fused AdamW / clip + fused AdamW, 124M float32: 0.85 to 0.92: 0.78
#   first start: 10 to 15 s of compiling: 13 s
set -uo pipefail
cd "$(dirname "$0")/.."

out=${1:?usage: benchmarks/gpu_all.sh OUT [--dry-run]}
dry=${2:-}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH=$PWD  # for the processes that tests start
export PYTEST_ADDOPTS="-p no:benchmark"  # which warns of pytest-xdist, and a warning is an error
if [ -n "$dry" ]; then export TRITON_INTERPRET=1; fi

# part NAME SECONDS COMMAND...: its output in OUT/NAME.txt and here, its exit status in OUT/status.txt
part() {
    local name=$1 limit=$2 status
    shift 2
    printf '\n== [%3d s] %s\n' "$SECONDS" "$name"
    timeout "$limit" "$@" 2>&1 | tee "$out/$name.txt" | tail -n 40
    status=${PIPESTATUS[0]}
    echo "$name $status" >> "$out/status.txt"
    return "$status"
}

: > "$out/status.txt"
part machine 20 bash -c "nvidia-smi -q -d CLOCK | head -n 30; g++ --version | head -n 1;
    $python -c 'import sys, torch, triton; print(sys.version, torch.__version__, triton.__version__)'"
if [ -z "$dry" ]; then part extension 60 "$python" setup.py build_ext --inplace; fi
part info 60 "$python" -m fastguard info
part trial 120 "$python" -c "
import sys, torch
from fastguard.kernels.triton import TritonBackend
problem = TritonBackend().problem_on(torch.device('cuda', 0) if torch.cuda.is_available() else torch.device('cpu'), 'activation')
print(problem or 'the kernels are right on this device')
sys.exit(problem is not None)" || exit 1
if [ -z "$dry" ]; then
    part tests-gpu 90 "$python" -m pytest tests/gpu -m gpu -n 4 -q --ignore tests/gpu/test_compute_sanitizer.py
    part gpu 150 "$python" benchmarks/gpu.py --cases llama-1.5b gpt2-124m small-2000 --rounds 20 --out "$out/gpu.json"
    part tests-kernels 120 "$python" -m pytest tests/kernels -m "triton and not slow" -n 8 -q
    part activations 60 "$python" benchmarks/gpu_activations.py --rounds 15 --out "$out/gpu-activations.json"
    part profile 40 ncu --clock-control none --kernel-name stats_kernel --launch-count 2 --set full \
        "$python" benchmarks/gpu.py --cases llama-1.5b --rounds 1
    part sanitizer 60 "$python" -m pytest tests/gpu/test_compute_sanitizer.py -m gpu -q
else
    part gpu 150 "$python" benchmarks/gpu.py --dry-run --out "$out/gpu.json"
    part activations 60 "$python" benchmarks/gpu_activations.py --dry-run --out "$out/gpu-activations.json"
fi
printf '\n== [%3d s] done\n' "$SECONDS"
cat "$out/status.txt"
