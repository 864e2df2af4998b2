#!/usr/bin/env bash
# Makes .venv exactly as requirements.txt locks it, and installs this checkout into it.
# Does nothing when .venv already matches, so every make target may call it.
#
#   PYTHON=python3.12            the interpreter to use (3.11 or 3.12: MLServer's range)
#   TRIMTAB_TORCH_INDEX=URL      take torch and torchvision from this package index (for instance
#                                PyTorch's CPU index) and leave out the CUDA libraries
#   TRIMTAB_EXTRAS=gurobi        also install requirements/gurobi.txt, which is proprietary; stays until .venv is removed
set -euo pipefail
cd "$(dirname "$0")/.."

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.12 python3.11 python3}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "hack/venv.sh: Python 3.11 or 3.12 is needed (MLServer's range); set PYTHON to one" >&2
  exit 1
}

stamp=.venv/.trimtab-stamp
extras=()
for extra in ${TRIMTAB_EXTRAS:-}; do
  [ "$extra" = gurobi ] || { echo "hack/venv.sh: TRIMTAB_EXTRAS knows gurobi, not $extra" >&2; exit 1; }
  extras+=("requirements/$extra.txt")
done
wanted=$( (cat requirements.txt "${extras[@]}" pyproject.toml hack/uv.txt; pwd; echo "${TRIMTAB_TORCH_INDEX:-}") | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

python=$(find_python)
echo "hack/venv.sh: installing into .venv with $python (the first time takes a few minutes)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r hack/uv.txt
uv="$PWD/.venv/bin/uv"
# Company proxies sign with a certificate of their own: trust what pip was told to trust.
if [ -n "${PIP_CERT:-}" ] && [ -z "${SSL_CERT_FILE:-}" ]; then export SSL_CERT_FILE=$PIP_CERT; fi
export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-300}" VIRTUAL_ENV="$PWD/.venv"

requirements=requirements.txt
if [ -n "${TRIMTAB_TORCH_INDEX:-}" ]; then
  requirements=.venv/requirements-without-torch.txt
  pins=$(.venv/bin/python hack/split_torch.py requirements.txt "$requirements")
  # shellcheck disable=SC2086 # one word a pin
  "$uv" pip install --index-url "$TRIMTAB_TORCH_INDEX" --no-deps $pins
fi
"$uv" pip install --quiet --no-deps --require-hashes -r "$requirements"
for list in "${extras[@]}"; do "$uv" pip install --quiet --no-deps --require-hashes -r "$list"; done
"$uv" pip install --quiet --no-deps --no-build-isolation --editable .
echo "$wanted" >"$stamp"
