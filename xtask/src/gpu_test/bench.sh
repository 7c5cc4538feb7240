#!/usr/bin/env bash
# Measures our allocator and its peers on this machine's GPU; see `bench.sh --help`. The results lie in
# bench-results, or in the folder that --out names. Exits with @NO_GPU@ if there is no GPU.
set -u
here=$(cd "$(dirname "$0")" && pwd) || exit 1
@FIND_DRIVER@
if ! command -v python3 > /dev/null; then
  echo "this needs python3" >&2
  exit 1
fi
# A copy may have lost the permission.
[ -x "$here/alloc-lab" ] || chmod +x "$here/alloc-lab"
exec python3 "$here/peers/bench.py" "$@"
