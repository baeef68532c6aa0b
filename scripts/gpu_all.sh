#!/usr/bin/env bash
# One command on a machine with a GPU: build nothing, check and time everything, and say what came of each part.
#
#     scripts/gpu_all.sh [PART…]      tests kernels experts decode audit matrix identity together selftest speculation speculation_text
#                                   gqa_decode sweep_llama sweep_qwen termination first_token counters regime host_tier expert_memory
#                                   host_waits start table tiles parallel; all but table, tiles and parallel, which needs two GPUs, if none
#
# tests: scripts/gpu_tests.sh triton gpu. kernels, decode: the benchmarks, beside the peers in $PEERS if that is set
# (scripts/peers.sh). experts: their cost from 1 to 4,096 tokens. audit: the demo checkpoint on the triton backend, plain and on packed caches, and the small GQA model, side by
# side. matrix: the demo's audits in all numerics, cache formats and backends. identity: its text with drafts beside its text without, in
# all numerics; together: the same with rows of the batch engine as one batch.
# selftest: every planted fault on the triton backend. speculation: what rounds cost and every policy's race on traces;
# speculation_text: on the demo's own text. gqa_decode: dense and gathered steps of a GQA model in turns; sweep_llama,
# sweep_qwen: time of a token against batch, all policies, with and without stopping early, 9 minutes; termination: its report on the small
# GQA model with the agreement table and needles of 32K haystacks; first_token: prompts of a whole GQA model, dense and sparse, by
# length; counters: hardware counters of kernels, by ncu; regime: the cost model of both kinds of
# model and its map; host_tier: caches in host memory; expert_memory: routed experts there; host_waits: how often the host
# waits while the demo decodes with drafts; start: from process start to the first token, compiled and not; table: kernels beside the published ones, steps, prompts
# and the start at one commit, as one table; it goes on where it stopped when called again with JOURNALS; tiles: kernels of Gluon beside
# those that they may replace, tile by tile; parallel: a model that two GPUs hold together, its tests first. Parts run one after another, because some are timed; each at most LIMIT seconds
# (default 600). Results go to $OUT, or each to its place in audits/ (scripts/places.py).
# WITHOUT: peers to leave out (default: those that tune or compile themselves for a minute a row).
# JOURNALS: a folder; kernels, matrix, selftest, both parts of speculation and parallel, cut off, go on where they stopped when called again with it.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export LIMIT=${LIMIT:-600} JOURNALS=${JOURNALS:-$(mktemp -d)}
mkdir -p "$JOURNALS"
python=${PYTHON:-python3} limit=$LIMIT without=${WITHOUT:-^(SGLang Triton (FP8|bf16)$|SGLang Triton$|FlashInfer)}
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(tests kernels experts decode audit matrix identity together selftest speculation speculation_text gqa_decode sweep_llama sweep_qwen termination first_token counters regime host_tier expert_memory host_waits start)

place() {  # KIND SUBJECT: where reports go that dsv4 itself writes
  [ -n "${OUT:-}" ] && echo "$OUT" || "$python" -m scripts.places "$@"
}
audit() {
  local wrong=0 running=()
  for caches in "auto auto" "fp8 fp4"; do
    read -r cache index <<< "$caches"
    "$python" -m dsv4 audit run demo --backend triton --device cuda --numerics qat --cache "$cache" --index-cache "$index" \
      --out "$(place audit demo)" &
    running+=($!)
  done
  "$python" -m dsv4 audit run demo_gqa --backend triton --device cuda --numerics native --out "$(place audit demo_gqa)" &
  running+=($!)
  for one in "${running[@]}"; do wait "$one" || wrong=1; done
  return $wrong
}
parallel() {
  "$python" -m pytest -q -m gpu tests/gpu/test_ranks.py &&
    "$python" scripts/bench_parallel.py --ranks 1 --only part --journal "$JOURNALS/parallel.jsonl" ${OUT:+--out "$OUT"} &&
    "$python" scripts/bench_parallel.py --journal "$JOURNALS/parallel.jsonl" ${OUT:+--out "$OUT"}
}
table() {  # what was measured before, at this commit, stays
  local at=$JOURNALS/table wrong=0 numerics
  "$python" scripts/bench_kernels.py --only "$("$python" scripts/bench_table.py --rows)" --journal "$JOURNALS/table.jsonl" \
    --without "$without" --out "$at/kernels" || wrong=1
  for numerics in native qat; do
    [ -f "$at/$numerics/done" ] || { "$python" scripts/bench_decode.py --numerics $numerics --batch 1,8,17,32,64 --context 8K \
      --transformers 0 --prefill 8K,128K --out "$at/$numerics" && touch "$at/$numerics/done"; } || wrong=1
  done
  [ -f "$at/start/done" ] || { "$python" scripts/measure_start.py --out "$at/start" && touch "$at/start/done"; } || wrong=1
  "$python" scripts/bench_table.py "$at" ${OUT:+--out "$OUT"} || wrong=1
  return $wrong
}
tiles() {
  local wrong=0 script
  for script in fp8 attention merging experts index; do
    "$python" "scripts/tune_$script.py" --seconds $((LIMIT / 6)) || wrong=1
  done
  return $wrong
}
part() {
  case $1 in
    tests) scripts/gpu_tests.sh triton gpu ;;
    kernels) "$python" scripts/bench_kernels.py --journal "$JOURNALS/kernels.jsonl" ${OUT:+--out "$OUT"} --without "$without" ;;
    experts) "$python" scripts/bench_experts.py ${OUT:+--out "$OUT"} ;;
    decode) "$python" scripts/bench_decode.py --prefill 8K,128K ${OUT:+--out "$OUT"} ;;
    audit) audit ;;
    matrix) "$python" scripts/audit_matrix.py --device cuda --jobs "$(nproc)" --limit "$LIMIT" --journal "$JOURNALS/matrix.jsonl" ${OUT:+--out "$OUT"} ;;
    identity) "$python" scripts/measure_speculation.py ${OUT:+--out "$OUT"} ;;
    together) "$python" scripts/measure_speculation.py --together --rows 8 --texts 16 ${OUT:+--out "$OUT"} ;;
    selftest) "$python" -m dsv4 audit selftest --backend triton --device cuda --journal "$JOURNALS/selftest.jsonl" --out "$(place selftest all)" ;;
    speculation) "$python" scripts/bench_speculation.py --journal "$JOURNALS/speculation.jsonl" ${OUT:+--out "$OUT"} ;;
    speculation_text) "$python" scripts/bench_speculation.py --checkpoint demo --journal "$JOURNALS/speculation_text.jsonl" ${OUT:+--out "$OUT"} ;;
    gqa_decode) "$python" scripts/bench_decode.py --dummy-weights qwen2.5-7b --attention block-bound --batch 1 --context 128K,1M ${OUT:+--out "$OUT"} ;;
    first_token) "$python" scripts/bench_first_token.py --dummy-weights llama-8b --seconds $((LIMIT * 4 / 5)) ${OUT:+--out "$OUT"} ;;
    counters) "$python" scripts/measure_counters.py --seconds $((LIMIT * 4 / 5)) ${OUT:+--out "$OUT"} ;;
    sweep_llama | sweep_qwen) width=$([ "$1" = sweep_llama ] && echo llama-8b || echo qwen3-8b)
      "$python" scripts/bench_decode.py --dummy-weights "$width" --sweep ${OUT:+--out "$OUT/$width"} ;;
    termination) "$python" -m dsv4 termination demo_gqa --context 2K,4K,8K,32640 --rows 2 --queries 8 --budget 2K --looser 1e-2,1e-1 \
      --needles 100 --needle-context 32K --needles-a-haystack 100 --device cuda --out "$(place termination demo_gqa)" ;;
    regime) "$python" -m dsv4 regime measure --out "$(place regime gqa)"
      "$python" -m dsv4 regime measure --model csa --contexts 4K,16K,64K,256K,1M --batches 1,8 --out "$(place regime csa)" ;;
    host_tier) "$python" scripts/bench_host_tier.py ${OUT:+--out "$OUT"} ;;
    expert_memory) "$python" scripts/bench_expert_memory.py ${OUT:+--out "$OUT"} ;;
    parallel) parallel ;;
    start) "$python" scripts/measure_start.py ${OUT:+--out "$OUT"} &&
      "$python" scripts/measure_start.py --dummy-weights flash --layers 8 --runs 1 ${OUT:+--out "$OUT/flash"} ;;
    table) table ;;
    tiles) tiles ;;
    host_waits) "$python" scripts/measure_host_waits.py ${OUT:+--out "$OUT"} ;;
    *) echo "unknown part $1"; return 2 ;;
  esac
}
export python without
export -f part audit parallel table tiles place
table=() failed=0
for name in "${parts[@]}"; do
  echo "== $name"
  begun=$SECONDS
  timeout -k 10 "$limit" bash -c "part $name"
  code=$?
  [ $code -eq 0 ] || failed=1
  table+=("$(printf '%-10s %6d s  exit %3d%s' "$name" $((SECONDS - begun)) $code "$([ $code -eq 124 ] && echo ': over the limit')")")
done
printf '\n'
printf '%s\n' "${table[@]}"
exit $failed
