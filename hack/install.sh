#!/bin/sh
# In an image: makes /opt/venv of a locked list of packages, by an installer that is gone afterwards.
# usage: install.sh LIST [--cache-dir FOLDER]     without a folder, nothing is kept between builds
set -eu
list=$1
shift
[ $# -gt 0 ] || set -- --no-cache
installer=$(mktemp -d)
trap 'rm -rf "$installer"' EXIT
python3 -m venv "$installer"
"$installer/bin/python" -m pip install --quiet --no-cache-dir --require-hashes -r "$(dirname "$0")/uv.txt"
python3 -m venv --without-pip /opt/venv
echo /opt/trimtab/lib >"$(/opt/venv/bin/python -c 'import site; print(site.getsitepackages()[0])')/trimtab.pth"
# No links: what is cached may be on another file system, and must not change with the image.
SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt UV_HTTP_TIMEOUT=300 UV_LINK_MODE=copy VIRTUAL_ENV=/opt/venv \
  "$installer/bin/uv" pip install --quiet --no-deps --compile-bytecode --require-hashes -r "$list" "$@"
