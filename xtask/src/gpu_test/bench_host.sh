#!/usr/bin/env bash
# Measures pinned memory beside PyTorch's allocator on this machine's GPU, in turn, and prints one table.
# Argument: how many rounds, 2 if none is given. PyTorch's part needs a C++ compiler, the CUDA toolkit and
# PyTorch here; without them ours is measured alone. Exits with @NO_GPU@ if there is no GPU.
set -u
here=$(cd "$(dirname "$0")" && pwd) || exit 1
@FIND_DRIVER@
# A copy may have lost the permission.
bench=$here/alloc-host-cuda-bench
[ -x "$bench" ] || chmod +x "$bench"
peer=$here/peer_host
if paths=$(bash "$here/build_peer_host.sh" "$peer"); then
  eval "$paths"
else
  echo "PyTorch's part cannot be built here: ours is measured alone" >&2
  peer=-
fi
exec "$bench" beside "$peer" "$@"
