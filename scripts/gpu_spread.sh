#!/usr/bin/env bash
# On a host with several GPUs: everything that is not timed, side by side, each part on its own GPUs and its own share of the processors.
#
#     scripts/gpu_spread.sh [PART[+PART…][:PROCESSORS]…]      tests selftest matrix matrix_gqa cpu_matrix cpu_selftest
#                                                             sparse_prefill fidelity; all if none
#
# tests: scripts/gpu_tests.sh triton gpu. selftest, cpu_selftest: every planted fault, on the triton backend and on the host's. matrix,
# matrix_gqa, cpu_matrix: audits of the demo checkpoints in all numerics, cache formats and backends. sparse_prefill, fidelity: what
# demo_gqa loses when prompts, or steps, are read sparsely, at up to 32K tokens (fidelity: 32,640, the model's most less its questions).
# The matrices and the self-test take all GPUs, other parts one, by turns. Parts joined by + run one after another; without a number each
# such group gets an equal share of the processors. Nothing runs longer than LIMIT seconds after the beginning (default 560). Results go to $OUT,
# or each to its place in audits/ (scripts/places.py); what is printed goes to $LOGS (default: $OUT/logs, or a new folder). MPS=1: audits of a matrix share a GPU through NVIDIA's multi-process service, where there is one; otherwise processes take turns of
# milliseconds (a self-test never does: there a fault of one process would end the others). JOURNALS: a folder; a self-test, and the demo's
# matrix, that were cut off go on when this is called again with it.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 LIMIT=${LIMIT:-560} JOURNALS=${JOURNALS:-$(mktemp -d)}
python=${PYTHON:-python3}
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(tests selftest matrix matrix_gqa cpu_matrix cpu_selftest sparse_prefill fidelity)
gpus=$(nvidia-smi -L 2> /dev/null | wc -l)
share=$(( $(nproc) / ${#parts[@]} ))
[ "$share" -gt 0 ] || { echo "error: ${#parts[@]} parts on $(nproc) processors; name fewer parts"; exit 2; }
export LOGS=${LOGS:-${OUT:+$OUT/logs}}
export LOGS=${LOGS:-$(mktemp -d)}
mkdir -p "$LOGS" "$JOURNALS"
echo "logs: $LOGS"

shared() {  # COMMAND…: with a service of its own, which ends with it
  [ -n "${MPS:-}" ] && command -v nvidia-cuda-mps-control > /dev/null || { "$@"; return; }
  local folder
  folder=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY=$folder CUDA_MPS_LOG_DIRECTORY=$folder
  nvidia-cuda-mps-control -d || { echo "error: the multi-process service did not start; leave MPS unset"; return 2; }
  trap 'echo quit | nvidia-cuda-mps-control' EXIT
  "$@"
}
place() {  # KIND SUBJECT [DEVICE]: where reports go that dsv4 itself writes
  [ -n "${OUT:-}" ] && echo "$OUT" || "$python" -m scripts.places "$@"
}
part() {
  case $1 in
    tests) scripts/gpu_tests.sh triton gpu ;;
    selftest) "$python" -m dsv4 audit selftest --backend triton --device cuda --jobs "$2" --journal "$JOURNALS/selftest.jsonl" --out "$(place selftest all)" ;;
    matrix) shared "$python" scripts/audit_matrix.py --device cuda --jobs "$2" --limit "$LIMIT" --journal "$JOURNALS/matrix.jsonl" ${OUT:+--out "$OUT"} ;;
    matrix_gqa) shared "$python" scripts/audit_matrix.py demo_gqa --device cuda --jobs "$2" --limit "$LIMIT" ${OUT:+--out "$OUT"} ;;
    cpu_matrix) "$python" scripts/audit_matrix.py --jobs "$2" --limit "$LIMIT" ${OUT:+--out "$OUT"} ;;
    cpu_selftest) "$python" -m dsv4 audit selftest --jobs "$2" --out "$(place selftest all cpu)" ;;
    sparse_prefill) "$python" -m dsv4 sparse-prefill demo_gqa --device cuda --backend triton --context 4K,16K,32K --rows 2 --needles 40 \
      --asked-context 4K,16K --out "$(place sparse_prefill demo_gqa)" ;;
    fidelity) "$python" -m dsv4 fidelity demo_gqa --device cuda --backend triton --effort thorough --context 8K,32640 --out "$(place fidelity demo_gqa)" ;;
    *) echo "unknown part $1"; return 2 ;;
  esac
}
gpus_of() {  # PART TURN: what it sees of the GPUs
  case $1 in
    cpu_*) ;;
    matrix*|selftest) seq -s, 0 $(( gpus > 0 ? gpus - 1 : 0 )) ;;
    *) echo $(( gpus > 0 ? $2 % gpus : 0 )) ;;
  esac
}
group() {  # PARTS PROCESSORS TURN: one after another, each within what is left of the time
  local name code wrong=0 left
  for name in ${1//+/ }; do
    left=$(( LIMIT - SECONDS ))
    CUDA_VISIBLE_DEVICES=$(gpus_of "$name" "$3") timeout -k 10 "$(( left > 1 ? left : 1 ))" bash -c "part $name $2" > "$LOGS/$name.log" 2>&1
    code=$?
    [ $code -eq 0 ] || wrong=1
    printf '%-14s %4d s  exit %3d%s  %s\n' "$name" $SECONDS $code "$([ $code -eq 124 ] && echo ': over the limit')" "$(tail -n 1 "$LOGS/$name.log" | cut -c1-120)"
  done
  return $wrong
}
export python gpus
export -f part place shared group gpus_of
pids=() at=0 turn=0 failed=0
for one in "${parts[@]}"; do
  cores=$share
  [[ $one == *:* ]] && cores=${one##*:}
  taskset -c "$at-$(( at + cores - 1 ))" bash -c "SECONDS=$SECONDS; group ${one%%:*} $cores $turn" &
  pids+=($!)
  at=$(( at + cores )) turn=$(( turn + 1 ))
done
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
exit $failed
