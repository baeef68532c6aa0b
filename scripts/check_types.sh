#!/usr/bin/env bash
# mypy of the public modules, which pyproject.toml lists. kernels, loaders and probes are packages of dsv4 but lie beside
# its folder, where mypy would not find them: it is shown links that lie as the packages do.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir "$tree/dsv4"
ln -s "$root"/dsv4/* "$tree/dsv4/"
ln -s "$root"/{kernels,loaders,probes} "$tree/dsv4/"
cd "$tree"
"$root/.venv/bin/mypy" --config-file "$root/pyproject.toml" --python-executable "$root/.venv/bin/python" \
  --cache-dir "${MYPY_CACHE:-$tree/cache}" "$@"
