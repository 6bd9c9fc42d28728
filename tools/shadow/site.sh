#!/bin/bash
# Makes a folder with PyTorch as rehearsals need it: the wheel for CUDA without NVIDIA's packages, which are not used.
# usage: site.sh [DIR [VERSION]]   DIR is target/rehearse-site by default, VERSION 2.11.0; downloads 500 to 900 MB once.
# Exit code 77: no such wheel can be had here.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
dir=${1:-$here/../../target/rehearse-site}
version=${2:-2.11.0}
if [ -f "$dir/torch/version.py" ] && grep -q "'$version" "$dir/torch/version.py"; then
  exit 0
fi
if ! python3 -m pip --version > /dev/null 2>&1; then
  echo "pip is not installed; PyTorch cannot be downloaded"
  exit 77
fi
new=$dir.new
rm -rf "$new"
trap 'rm -rf "$new"' EXIT
install() { python3 -m pip install --quiet --no-compile --disable-pip-version-check --target "$new" "$@"; }
install --no-deps "torch==$version" || exit 77
# What PyTorch needs of Python packages; numpy is optional, and without it PyTorch warns.
install typing_extensions sympy networkx jinja2 fsspec filelock numpy setuptools || exit 77
# For torch.compile, in the version that the wheel names.
triton=$(sed -n 's/^Requires-Dist: triton *(\{0,1\}\(==[0-9.]*\).*/triton\1/p' "$new"/torch-*.dist-info/METADATA | head -n 1)
if [ -n "$triton" ]; then
  install --no-deps "$triton" || echo "$triton cannot be downloaded; torch.compile is not rehearsed"
fi
rm -rf "$dir"
mv "$new" "$dir"
echo "made $dir: torch $version"
