#!/bin/bash
# Builds PyTorch's own allocator as a plugin: native.so.
# usage: build.sh PYTHON [OUTPUT]      over an installed PyTorch and a GPU; PYTHON is an interpreter that can import torch
#        build.sh --oracle [OUTPUT]    from the libraries that ../torch-oracle/build.sh downloaded; runs on the simulated device
# OUTPUT is target/torch-plugin/native.so by default.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=$here/../../target
what=${1:?an interpreter that can import torch, or --oracle}
output=${2:-$target/torch-plugin/native.so}
mkdir -p "$(dirname "$output")"
output=$(cd "$(dirname "$output")" && pwd)/$(basename "$output")
if [ "$what" = --oracle ]; then
  oracle=$(cd "$(dirname "${OOMPH_TORCH_ORACLE:-$target/torch-oracle/oracle}")" && pwd)
  include="-I$oracle/torch/include -I$oracle/cuda/nvidia/cu13/include"
  torch=$oracle/torch
  runtime=$oracle/libcudart.so.13
else
  torch=$("$what" -c 'import os, torch; print(os.path.dirname(torch.__file__))')
  # The toolkit comes first: it has all headers; the wheels next to torch may lack some.
  cuda=${CUDA_HOME:-/usr/local/cuda}
  first() { find -L "$cuda" "$torch/../nvidia" -name "$1" 2>/dev/null | head -1; }
  runtime=$(first 'libcudart.so.1[23]*')
  header=$(first cuda_runtime_api.h)
  [ -n "$runtime" ] && [ -n "$header" ] || { echo "the CUDA runtime or its headers were not found, neither next to torch nor in CUDA_HOME" >&2; exit 1; }
  include="-I$torch/include -I$(dirname "$header")"
fi
# Store the library paths in the plugin, so that it loads without LD_LIBRARY_PATH.
g++ -O2 -std=c++20 -shared -fPIC -pthread $include "$here/native.cpp" -L"$torch/lib" -lc10_cuda -lc10 "$runtime" \
  -Wl,--allow-shlib-undefined -Wl,--disable-new-dtags -Wl,-rpath,"$torch/lib:$(dirname "$runtime")" -o "$output"
echo "built $output"
