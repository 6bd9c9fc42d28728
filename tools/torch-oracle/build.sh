#!/bin/bash
# Builds the oracle: the real allocator library of the torch 2.11.0 wheel over a stand-in CUDA runtime. No GPU needed.
# usage: build.sh [DIR]   DIR is target/torch-oracle by default; downloads about 530 MB once, 50 MB
# stay in DIR.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
dir=${1:-$here/../../target/torch-oracle}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
cd "$dir"
if [ ! -f torch/lib/libc10_cuda.so ]; then
  wheels=$(mktemp -d)
  trap 'rm -rf "$wheels"' EXIT
  pip download -q --no-deps --python-version 3.11 --only-binary=:all: -d "$wheels" \
    torch==2.11.0 nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88
  unzip -qo "$wheels"/torch-*.whl 'torch/lib/libc10*.so' 'torch/include/c10/*' 'torch/include/torch/headeronly/*' -d .
  for wheel in "$wheels"/nvidia_cuda_*.whl; do unzip -qo "$wheel" -d cuda; done
fi
include="-Itorch/include -Icuda/nvidia/cu13/include"
gcc -c -fPIC "$here/never_called.c" -o never_called.o
g++ -O1 -std=c++20 -shared -fPIC $include "$here/stand_in_runtime.cpp" never_called.o \
  -Wl,-soname,libcudart.so.13 -Wl,--version-script="$here/symbols.map" -o libcudart.so.13
# Store the library paths in the program, so that it runs without LD_LIBRARY_PATH.
for program in oracle bench; do
  g++ -O2 -std=c++20 -pthread $include "$here/$program.cpp" -Ltorch/lib -lc10_cuda -lc10 -L. -l:libcudart.so.13 \
    -Wl,--allow-shlib-undefined -Wl,--disable-new-dtags -Wl,-rpath,"$dir:$dir/torch/lib" -o "$program"
  echo "built $dir/$program"
done
