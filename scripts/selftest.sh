#!/bin/sh
# Plant every known bug, on this machine's processors or (scripts/selftest.sh --device cuda --backend triton) on a GPU,
# and write the detection matrix that is committed: audits/selftest.md and audits/selftest.json.
set -e
cd "$(dirname "$0")/.."
exec "${PYTHON:-.venv/bin/python}" -m dsv4 audit selftest --out audits "$@"
