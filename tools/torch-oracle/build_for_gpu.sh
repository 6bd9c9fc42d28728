#!/bin/bash
# Builds the timing program over an installed PyTorch and the real CUDA runtime, for a machine with a GPU.
# usage: build_for_gpu.sh PYTHON [OUTPUT]   PYTHON is an interpreter that can import torch; OUTPUT is torch_bench.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${1:?an interpreter that can import torch}
output=${2:-torch_bench}
torch=$("$python" -c 'import os, torch; print(os.path.dirname(torch.__file__))')
# The toolkit comes first: it has all headers; the wheels next to torch may lack some.
cuda=${CUDA_HOME:-/usr/local/cuda}
first() { find -L "$cuda" "$torch/../nvidia" -name "$1" 2>/dev/null | head -1; }
runtime=$(first 'libcudart.so.1[23]*')
include=$(first cuda_runtime_api.h)
[ -n "$runtime" ] && [ -n "$include" ] || { echo "the CUDA runtime or its headers were not found, neither next to torch nor in CUDA_HOME" >&2; exit 1; }
g++ -O2 -std=c++20 -pthread -DREAL_GPU -I"$torch/include" -I"$(dirname "$include")" "$here/bench.cpp" \
  -L"$torch/lib" -lc10_cuda -lc10 "$runtime" -Wl,--allow-shlib-undefined \
  -Wl,--disable-new-dtags -Wl,-rpath,"$torch/lib:$(dirname "$runtime")" -o "$output"
echo "built $output"
