#!/usr/bin/env bash
# One command on a machine with a GPU: every test that needs one, and a table at the end.
#
#     scripts/gpu_tests.sh [SUITE…]      all but `host` when none is named
#
# triton: kernels at production shapes. small: the small shapes that CI interprets, compiled. gpu: the other tests marked gpu,
# the whole model's among them. graph: training gradients, replayed against eager. training: the fused training kernels.
# greedy: the same text from `reference` and `triton`, by the command line. host: the other tests, here. Tests run in JOBS
# processes where pytest-xdist is installed; default: most of the processors, and no more than one for 10 GiB of GPU memory (twelve on
# 80 GiB left two tests of long contexts without).
#
# A suite that fails or runs over LIMIT seconds (default 540) does not stop the others. Results go to $OUT (default: their place in audits/):
# gpu_tests.json, and the logs as gpu_tests_logs.tar.gz. Needs the packages of pyproject.toml (torch >= 2.11) and, for the
# oracle, transformers.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
limit=${LIMIT:-540} python=${PYTHON:-python3}
out=${OUT:-$("$python" -m scripts.places gpu_tests all)}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
mkdir -p "$out"
suites=("$@")
[ ${#suites[@]} -gt 0 ] || suites=(triton gpu small graph training greedy)
jobs=()
if "$python" -c 'import xdist' 2> /dev/null; then
  most=$(( ($(nproc) * 3 + 3) / 4 ))
  memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2> /dev/null | head -n 1)
  [[ $memory =~ ^[0-9]+$ ]] && fit=$(( memory / 10240 )) && [ "$fit" -ge 1 ] && [ "$fit" -lt "$most" ] && most=$fit
  jobs=(-n "${JOBS:-$most}")
fi

tests() {  # NAME ARGUMENTS…: pytest, its counts left as JUnit XML
  local name=$1; shift
  "$python" -m pytest -q --maxfail=25 --continue-on-collection-errors --junitxml="$logs/$name.xml" ${JOBS_FLAGS:-} "$@"
}
tokens() {  # CHECKPOINT NUMERICS BACKEND PROMPT…: token ids of a greedy generation, one line
  "$python" -m dsv4 generate "$1" --numerics "$2" --backend "$3" --device cuda --max-new-tokens 64 --json "${@:4}" |
    "$python" -c 'import json, sys; print(json.load(sys.stdin)["token_ids"])'
}
same() {  # LABEL ARGUMENTS…: equal ids on both backends; a line of PASS or FAIL
  local label=$1 a b; shift
  a=$(tokens "$1" "$2" reference "${@:3}") && b=$(tokens "$1" "$2" triton "${@:3}") && [ -n "$a" ] && [ "$a" = "$b" ] &&
    echo "PASS $label: ${a:0:60}…" && return
  echo "FAIL $label:"; echo "  reference ${a:-nothing}"; echo "  triton    ${b:-nothing}"
  return 1
}
greedy() {
  local wrong=0
  same "tiny golden, fp32" tests/golden/tiny_fp32 fp32 --token-ids 1,2,3,5,8,13,21,34,55,89 || wrong=1
  for prompt in "The capital of France is" "Once upon a time there was a small"; do
    for numerics in fp32 native; do
      same "demo, $numerics, '$prompt'" demo "$numerics" --prompt "$prompt" || wrong=1
    done
  done
  return $wrong
}
run() {
  case $1 in
    triton) tests triton tests/kernels/test_triton_*.py -m gpu ;;
    small) tests small tests/kernels/test_triton_*.py -m "not gpu" ;;
    gpu) tests gpu tests -m gpu --ignore-glob='tests/kernels/test_triton_*.py' ;;
    host) tests host tests -m "not gpu" --ignore=tests/dsv4/test_memory_use.py --ignore-glob='*/test_triton_*.py' ;;
    graph) "$python" -m scripts.training.check_graph ;;
    training) "$python" -m scripts.training.check_kernels ;;
    greedy) greedy ;;
    *) echo "unknown suite $1"; return 2 ;;
  esac
}
export python logs JOBS_FLAGS="${jobs[*]}"
export -f tests tokens same greedy run
for suite in "${suites[@]}"; do
  echo "== $suite"
  begun=$SECONDS
  timeout -k 10 "$limit" bash -c "run $suite" > "$logs/$suite.log" 2>&1
  echo "$suite $? $((SECONDS - begun))" >> "$logs/exits"
  tail -n 15 "$logs/$suite.log"
done
"$python" - "$logs" "$out" "$*" <<'END'
import json, os, pathlib, re, subprocess, sys, tarfile
import xml.etree.ElementTree as xml

logs, out = map(pathlib.Path, sys.argv[1:3])
rows = []
for line in (logs / "exits").read_text().splitlines():
    suite, code, seconds = line.split()
    text = (logs / f"{suite}.log").read_text(errors="replace")
    count = lambda words: len(re.findall(rf"^(?:{words})\b", text, re.M))
    passed, failed, skipped = count("PASS|ok"), count("FAIL|WRONG"), 0
    if (logs / f"{suite}.xml").exists():
        found = next(xml.parse(logs / f"{suite}.xml").iter("testsuite")).attrib
        failed, skipped = int(found["failures"]) + int(found["errors"]), int(found["skipped"])
        passed = int(found["tests"]) - failed - skipped
    rows.append({"suite": suite, "passed": passed, "failed": failed, "skipped": skipped, "seconds": int(seconds),
                 "exit": int(code)})
try:
    import torch, triton
    about = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU", "torch": torch.__version__,
             "triton": triton.__version__}
except ImportError as missing:
    about = {"device": str(missing)}
about["commit"] = os.environ.get("DSV4_COMMIT") or subprocess.run(
    ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
about["command"] = " ".join(["scripts/gpu_tests.sh", sys.argv[3]]).strip()
(out / "gpu_tests.json").write_text(json.dumps({"about": about, "suites": rows}, indent=1) + "\n")
with tarfile.open(out / "gpu_tests_logs.tar.gz", "w:gz") as archive:
    for log in sorted(logs.glob("*.log")):
        archive.add(log, log.name)
print(f"\n{about.get('device')}, torch {about.get('torch')}, triton {about.get('triton')}, commit {about['commit']}")
print(f"{'suite':10}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}{'exit':>6}")
for r in rows:
    line = f"{r['suite']:10}{r['passed']:8}{r['failed']:8}{r['skipped']:9}{r['seconds']:9}{r['exit']:6}"
    print(line + ("  over the limit" if r["exit"] == 124 else "" if r["passed"] else "  nothing ran"))
sys.exit(any(r["exit"] or not r["passed"] for r in rows))
END
