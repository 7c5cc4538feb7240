#!/usr/bin/env bash
# Builds benches/peer_host.cpp into $1 (default ./peer_host) on a machine with a C++ compiler, the CUDA
# toolkit and PyTorch, whose C++ headers are in its wheel. Prints the library path to export.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-./peer_host}
torch=$(python3 -c 'import torch; print(torch.__path__[0])')
cuda=${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")}
abi=$(python3 -c 'import torch; print(int(torch._C._GLIBCXX_USE_CXX11_ABI))')
wheels=$(python3 -c "import glob, nvidia; print(':'.join(glob.glob(list(nvidia.__path__)[0] + '/*/lib')))" || true)
"${CXX:-g++}" -O2 -std=c++17 -D_GLIBCXX_USE_CXX11_ABI="$abi" -w "$here/peer_host.cpp" -o "$out" \
  -I"$torch/include" -I"$torch/include/torch/csrc/api/include" -I"$cuda/include" \
  -L"$torch/lib" -L"$cuda/lib64" -Wl,--no-as-needed \
  -lc10 -lc10_cuda -ltorch -ltorch_cpu -ltorch_cuda -lcudart -lpthread
echo "export LD_LIBRARY_PATH=$torch/lib:$wheels:$cuda/lib64\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
