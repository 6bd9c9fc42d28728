#!/bin/bash
# Builds the oracle of a release: the allocator library of its torch wheel over a stand-in CUDA runtime. No GPU needed.
# usage: build.sh [DIR [VERSION]]   DIR is target/torch-oracle by default, VERSION 2.11.0 (2.0.1 to 2.15.0 are known to
# work); downloads about 15 MB once, and all 500 to 900 MB of the wheel where the server does not send parts of it.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
dir=${1:-$here/../../target/torch-oracle}
version=${2:-2.11.0}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
cd "$dir"
new=$(mktemp -d -p .)
trap 'rm -rf "$dir/$new"' EXIT
if [ ! -f torch/version.py ]; then
  # headeronly exists from 2.8 on.
  "$here/wheel_files.py" "$new" "torch==$version" 'torch/lib/libc10*.so' 'torch/include/c10/*' \
    'torch/include/torch/headeronly/*' torch/version.py
  mv "$new/torch" torch
fi
# The CUDA that the wheel was built with decides the headers and the name of the runtime library.
cuda=$(sed -n "s/^cuda.*= *'\([0-9.]*\)'.*/\1/p" torch/version.py)
case $cuda in
  11.*) runtime=libcudart.so.11.0 headers="nvidia-cuda-runtime-cu11==$cuda.* nvidia-cuda-nvcc-cu11==$cuda.*" ;;
  12.*) runtime=libcudart.so.12 headers="nvidia-cuda-runtime-cu12==$cuda.* nvidia-cuda-nvcc-cu12==$cuda.*" ;;
  *) runtime=libcudart.so.${cuda%%.*} headers="nvidia-cuda-runtime==$cuda.* nvidia-cuda-crt==$cuda.*" ;;
esac
if [ ! -d cuda ]; then
  for package in $headers; do "$here/wheel_files.py" "$new/cuda" "$package" '*/include/*'; done
  mv "$new/cuda" cuda
fi
release=$(sed -n "s/^__version__ = '\([0-9]*\)\.\([0-9]*\).*/\1 \2/p" torch/version.py)
release=$(printf '%d%02d' $release)
# Wheels up to 2.6 use the old layout of strings.
if nm -D --defined-only torch/lib/libc10.so | grep -q B5cxx11; then abi=1; else abi=0; fi
if [ "$release" -ge 210 ]; then standard=c++20; else standard=c++17; fi
options="-std=$standard -w -fPIC -DRELEASE=$release -D_GLIBCXX_USE_CXX11_ABI=$abi -Itorch/include"
for folder in $(find cuda/ -type d -name include); do options="$options -I$folder"; done
echo "$runtime { global: *; };" > symbols.map
gcc -c -fPIC "$here/never_called.c" -o never_called.o
g++ -O1 -shared $options "$here/stand_in_runtime.cpp" never_called.o \
  -Wl,-soname,"$runtime" -Wl,--version-script=symbols.map -o "$runtime"
# Releases up to 2.7 look for the driver's functions in a libcuda.so.1 that is loaded already.
g++ -shared -fPIC -x c++ /dev/null -L. -Wl,--no-as-needed -l:"$runtime" -Wl,-soname,libcuda.so.1 -o libcuda.so.1
# 2.1 does not use expandable segments without NVML.
if [ "$release" = 201 ]; then
  gcc -shared -fPIC "$here/stand_in_nvml.c" -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1
fi
# Store the library paths in the program, so that it runs without LD_LIBRARY_PATH.
for program in oracle bench; do
  # The bench is for the interface of 2.11.
  if [ "$program" = bench ] && [ "$release" != 211 ]; then continue; fi
  g++ -O2 -pthread $options "$here/$program.cpp" -Ltorch/lib -lc10_cuda -lc10 -L. -l:"$runtime" -Wl,--no-as-needed \
    -l:libcuda.so.1 -Wl,--allow-shlib-undefined -Wl,--disable-new-dtags -Wl,-rpath,"$dir:$dir/torch/lib" -o "$program"
done
echo "built $dir/oracle: torch $version"
