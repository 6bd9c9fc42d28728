#!/bin/bash
# Builds the Python wheel into target/wheels, and tests it in new virtual environments.
# usage: wheel.sh          a wheel for this machine
#        wheel.sh --zig    one for any Linux with glibc 2.17 or newer (manylinux_2_17), linked by zig from the package index
# Exit code 77: there is no pip, or the package index cannot be reached.
set -euo pipefail
cd "$(dirname "$0")/.."
most_bytes=12000000
# The target that is tested: the wheel's own environment, without and with PyTorch.
out=$PWD/target/wheels
tools=$PWD/target/wheel-tools
environment=$PWD/target/wheel-environment

python3 -m venv --help > /dev/null 2>&1 || { echo "python3 has no venv; the wheel is not built"; exit 77; }
rm -rf "$out" "$tools" "$environment"
python3 -m venv "$tools"
install() { "$@" --quiet --disable-pip-version-check; }
packages=(maturin)
[ "${1:-}" = --zig ] && packages+=(ziglang cargo-zigbuild)
install "$tools/bin/pip" install "${packages[@]}" || { echo "maturin cannot be downloaded; the wheel is not built"; exit 77; }
export PATH=$tools/bin:$PATH
if [ "${1:-}" = --zig ]; then
    export MATURIN_PEP517_ARGS="--zig --compatibility manylinux_2_17" OOMPH_WHEEL_TARGET=x86_64-unknown-linux-gnu.2.17
fi
install "$tools/bin/pip" wheel . --no-deps --no-build-isolation --wheel-dir "$out"
wheel=$(ls "$out"/oomph-*.whl)
bytes=$(stat -c %s "$wheel")
echo "$(basename "$wheel"): $bytes bytes"
[ "$bytes" -le "$most_bytes" ] || { echo "a wheel has at most $most_bytes bytes"; exit 1; }

python3 -m venv "$environment"
install "$environment/bin/pip" install "$wheel"
# From nothing to advice, in a folder with nothing but a recording.
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cp tools/recording/run-0.pickle.xz "$place"
(cd "$place" && env -i "$environment/bin/oomph" advise run-0.pickle.xz | grep -q "export PYTORCH_ALLOC_CONF=expandable_segments:True")
(cd "$place" && env -i "$environment/bin/python" - << 'PYTHON'
import sys, time
began = time.perf_counter()
import oomph
took = time.perf_counter() - began
assert "torch" not in sys.modules
advice = oomph.advise("run-0.pickle.xz")
assert advice.recommended == "expandable_segments:True", advice
print(f"import oomph: {took * 1000:.1f} ms")
PYTHON
)
# The tests use the installed package. Without PyTorch, most of them; with it, those on the shadow GPU too.
install "$environment/bin/pip" install pytest mypy pandas nbclient ipykernel || { echo "pytest cannot be downloaded"; exit 77; }
"$environment/bin/mypy" --strict python/oomph
# The tests of the build system start builds of their own.
unset MATURIN_PEP517_ARGS OOMPH_WHEEL_TARGET
export OOMPH_INSTALLED=1 OOMPH_BINARY=$environment/bin/oomph
"$environment/bin/python" -m pytest -q -rs -o pythonpath= python/tests
