#!/usr/bin/env bash
# On a host with several GPUs: everything that is not timed, side by side, each part on its own GPUs and its own share of the processors.
#
#     scripts/gpu_spread.sh [PART[:PROCESSORS]…]      tests selftest matrix matrix_gqa cpu_matrix cpu_selftest
#                                                     sparse_prefill fidelity; all if none
#
# tests: scripts/gpu_tests.sh triton gpu. selftest, cpu_selftest: every planted fault, on the triton backend and on the host's. matrix,
# matrix_gqa, cpu_matrix: audits of the demo checkpoints in all numerics, cache formats and backends. sparse_prefill, fidelity: what
# demo_gqa loses when prompts, or steps, are read sparsely, at up to 32K tokens. The matrix and the self-test take all
# GPUs, other parts one, by turns; without a number each gets an equal share of the processors. Each ends after LIMIT seconds (default 560). Results go to ${OUT:-audits}, what they print to $OUT/logs.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OUT=${OUT:-audits} LIMIT=${LIMIT:-560}
python=${PYTHON:-python3}
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(tests selftest matrix matrix_gqa cpu_matrix cpu_selftest sparse_prefill fidelity)
gpus=$(nvidia-smi -L 2> /dev/null | wc -l)
share=$(( $(nproc) / ${#parts[@]} ))
[ "$share" -gt 0 ] || { echo "error: ${#parts[@]} parts on $(nproc) processors; name fewer parts"; exit 2; }
mkdir -p "$OUT/logs"

part() {
  case $1 in
    tests) scripts/gpu_tests.sh triton gpu ;;
    selftest) "$python" -m dsv4 audit selftest --backend triton --device cuda --jobs "$2" --out "$OUT" ;;
    matrix) "$python" scripts/audit_matrix.py --device cuda --jobs "$2" --limit "$LIMIT" --out "$OUT" ;;
    matrix_gqa) "$python" scripts/audit_matrix.py demo_gqa --device cuda --jobs "$2" --limit "$LIMIT" --out "$OUT" ;;
    cpu_matrix) "$python" scripts/audit_matrix.py --jobs "$2" --limit "$LIMIT" --out "$OUT" ;;
    cpu_selftest) "$python" -m dsv4 audit selftest --jobs "$2" --out "$OUT" ;;
    sparse_prefill) "$python" -m dsv4 sparse-prefill demo_gqa --device cuda --backend triton --context 4K,16K,32K --rows 2 --needles 40 \
      --asked-context 4K,16K --out "$OUT" ;;
    fidelity) "$python" -m dsv4 fidelity demo_gqa --device cuda --backend triton --effort thorough --context 8K,32K --out "$OUT/32k" ;;
    *) echo "unknown part $1"; return 2 ;;
  esac
}
export python
export -f part
pids=() at=0 gpu=0 all=$(seq -s, 0 $(( gpus > 0 ? gpus - 1 : 0 )))
for one in "${parts[@]}"; do
  name=${one%%:*} cores=$share visible=""
  [[ $one == *:* ]] && cores=${one##*:}
  case $name in
    cpu_*) ;;
    matrix|selftest) visible=$all ;;
    *) visible=$(( gpus > 0 ? gpu++ % gpus : 0 )) ;;
  esac
  CUDA_VISIBLE_DEVICES=$visible taskset -c "$at-$(( at + cores - 1 ))" timeout -k 10 "$LIMIT" bash -c "part $name $cores" > "$OUT/logs/$name.log" 2>&1 &
  pids+=($!)
  at=$(( at + cores ))
done
failed=0
for i in "${!parts[@]}"; do
  wait "${pids[$i]}"; code=$? name=${parts[$i]%%:*}
  [ $code -eq 0 ] || failed=1
  printf '%-13s exit %3d%s  %s\n' "$name" $code "$([ $code -eq 124 ] && echo ': over the limit')" "$(tail -n 1 "$OUT/logs/$name.log" | cut -c1-120)"
done
exit $failed
