#!/usr/bin/env bash
# One command on a machine with a GPU: the tests, GPU ones included, a generation and the timings, with a table at the end.
# Needs an environment with the packages of pyproject.toml (torch >= 2.11) and, for the oracle, transformers. Results go to ${OUT:-audits}.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
out=${OUT:-audits}
mkdir -p "$out"
python3 -m pytest tests -q -x -m gpu 2>&1 | tee "$out/gpu_tests.log" | tail -n 15
gpu=${PIPESTATUS[0]}
python3 -m pytest tests -q -m "not gpu" --ignore=tests/dsv4/test_memory_use.py 2>&1 | tee "$out/cpu_tests.log" | tail -n 25
cpu=${PIPESTATUS[0]}
python3 -m scripts.training.check_kernels 2>&1 | tee "$out/training_kernels.log" | tail -n 30
kernels=${PIPESTATUS[0]}
python3 scripts/bench_reference.py --device cuda --out "$out/bench_reference_gpu.json"
bench=$?
printf '%-28s %s\n' "gpu tests" "exit $gpu" "cpu tests" "exit $cpu" "training kernels" "exit $kernels" "bench" "exit $bench"
exit $((gpu + cpu + kernels + bench))
