#!/bin/sh
# In an image: lists the packages it consists of, Debian's and Python's, as CycloneDX JSON, by tools that are gone afterwards.
# usage: sbom.sh IMAGE     writes /usr/share/sbom/IMAGE.cdx.json
set -eu
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
python3 -m venv "$tools"
"$tools/bin/python" -m pip install --quiet --no-cache-dir --require-hashes -r "$(dirname "$0")/uv.txt"
if [ -n "${PACKAGE_CACHE:-}" ]; then cache="--cache-dir $PACKAGE_CACHE"; else cache=--no-cache; fi
# shellcheck disable=SC2086 # an option and its value
SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt UV_LINK_MODE=copy VIRTUAL_ENV=$tools \
  "$tools/bin/uv" pip install --quiet --no-deps --require-hashes -r "$(dirname "$0")/sbom.txt" $cache
cd "$tools"
# The merged list names what it describes; each of its parts must, too.
printf '[project]\nname = "%s-python"\nversion = "0"\n' "$1" >pyproject.toml
bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o python.cdx.json /opt/venv/bin/python
bin/debsbom generate --sbom-type cdx --root / --with-licenses --distro-name "$1-debian" -o debian 2>debian.log || { cat debian.log >&2; exit 1; }
mkdir -p /usr/share/sbom
bin/debsbom merge --sbom-type cdx --distro-name "$1" -o "/usr/share/sbom/$1" debian.cdx.json python.cdx.json
