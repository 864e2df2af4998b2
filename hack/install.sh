#!/bin/sh
# In an image: installs a locked list of packages into /opt/venv, by an installer that is gone afterwards.
# usage: install.sh LIST [PATTERN]     only packages whose names begin so (extended regular expression), else all that are missing
#   PACKAGE_CACHE=FOLDER keeps packages between builds; without, nothing is kept
set -eu
list=$1
installer=$(mktemp -d)
trap 'rm -rf "$installer"' EXIT
python3 -m venv "$installer"
"$installer/bin/python" -m pip install --quiet --no-cache-dir --require-hashes -r "$(dirname "$0")/uv.txt"
if [ ! -x /opt/venv/bin/python ]; then
  python3 -m venv --without-pip /opt/venv
  echo /opt/trimtab/lib >"$(/opt/venv/bin/python -c 'import site; print(site.getsitepackages()[0])')/trimtab.pth"
fi
if [ -n "${2:-}" ]; then
  list=$installer/list.txt
  awk -v wanted="^($2)" '/^[A-Za-z0-9]/ { chosen = $0 ~ wanted } chosen' "$1" >"$list"
fi
if [ -n "${PACKAGE_CACHE:-}" ]; then cache="--cache-dir $PACKAGE_CACHE"; else cache=--no-cache; fi
# No links: what is cached may be on another file system, and must not change with the image.
# shellcheck disable=SC2086 # an option and its value
SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt UV_HTTP_TIMEOUT=300 UV_COMPILE_BYTECODE_TIMEOUT=600 UV_LINK_MODE=copy VIRTUAL_ENV=/opt/venv \
  "$installer/bin/uv" pip install --quiet --no-deps --compile-bytecode --require-hashes -r "$list" $cache
