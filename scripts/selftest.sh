#!/bin/sh
# Plant every known bug, on this machine's processors or (scripts/selftest.sh --device cuda --backend triton) on a GPU,
# and write the detection matrix, selftest.md and selftest.json, to its place in audits/.
set -e
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
case " $* " in *" cuda "*) device=$("$python" -c 'from scripts.places import present_device; print(present_device())') ;; *) device=cpu ;; esac
exec "$python" -m dsv4 audit selftest --out "$("$python" -m scripts.places selftest all "$device")" "$@"
