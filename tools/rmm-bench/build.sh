#!/bin/bash
# Builds the timing program and the replay over RMM 26.10 from its wheels. Building needs no GPU and
# no nvcc; running needs a GPU and a driver for CUDA 13. The folder contains every library that the
# programs load, so it can be copied to another machine. It also contains RMM's own plugin for
# PyTorch, _torch_allocator.so.
# usage: build.sh [DIR]   DIR is target/rmm-bench by default; downloads 8 MB once.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
dir=${1:-$here/../../target/rmm-bench}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
headers=$dir/headers
if [ ! -d "$headers" ]; then
  wheels=$(mktemp -d)
  trap 'rm -rf "$wheels"' EXIT
  pip download -q --no-deps --only-binary=:all: -d "$wheels" \
    librmm-cu13==26.10.0 rapids-logger==0.3.0 nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88
  for wheel in "$wheels"/*.whl; do unzip -qo "$wheel" -d "$headers"; done
  mv "$headers/librmm/lib64/librmm.so" "$headers/rapids_logger/lib64/librapids_logger.so" "$dir"
fi
if [ ! -f "$dir/_torch_allocator.so" ]; then
  wheel=$(mktemp -d)
  trap 'rm -rf "$wheel" "${wheels:-$wheel}"' EXIT
  pip download -q --no-deps --only-binary=:all: --python-version 3.11 -d "$wheel" rmm-cu13==26.10.0
  unzip -qoj "$wheel"/rmm_cu13-*.whl rmm/librmm/_torch_allocator.so -d "$dir"
fi
for program in bench replay; do
  g++ -O2 -std=c++20 -pthread -DLIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE "$here/$program.cpp" \
    -isystem "$headers/librmm/include/rapids" -isystem "$headers/librmm/include" \
    -isystem "$headers/rapids_logger/include" -isystem "$headers/nvidia/cu13/include" \
    -L"$dir" -lrmm -lrapids_logger "$headers/nvidia/cu13/lib/libcudart_static.a" -ldl -lrt \
    -Wl,--disable-new-dtags '-Wl,-rpath,$ORIGIN' -o "$dir/rmm_$program"
  echo "built $dir/rmm_$program"
done
