#!/usr/bin/env bash
# Runs the GPU tests of this folder and adds up their results. Arguments are words that select tests.
# LOG_DIR, if set, is where the output of each program goes besides the screen.
# Exits with 0 if all is well, 1 if a test failed, @NO_GPU@ if there is no GPU.
set -u
logs=${LOG_DIR:-$(mktemp -d)}
mkdir -p "$logs" && logs=$(cd "$logs" && pwd) || exit 1
cd "$(dirname "$0")" || exit 1
@FIND_DRIVER@
passed=0 failed=0 skipped=0 absent=0 programs=0
for program in @TESTS@; do
  programs=$((programs + 1))
  echo "== $program"
  log=$logs/$program.log
  run=("./$program")
  # A copy may have lost the permission.
  [ -x "$program" ] || chmod +x "$program"
  if [ "${program%.py}" != "$program" ]; then
    if ! command -v python3 > /dev/null; then
      echo "skipped: no python3 here"
      absent=$((absent + 1))
      continue
    fi
    run=(python3 "./$program")
  fi
  "${run[@]}" --require-gpu "$@" 2>&1 | tee "$log"
  code=${PIPESTATUS[0]}
  if [ "$code" -eq @NO_GPU@ ]; then
    absent=$((absent + 1))
    continue
  fi
  # Counted line by line, so that a program that crashes half way counts as far as it came.
  count() { grep -c "^test .* \.\.\. $1" "$log"; }
  bad=$(count FAILED)
  passed=$((passed + $(count ok))) failed=$((failed + bad)) skipped=$((skipped + $(count skipped)))
  if [ "$code" -ne 0 ] && [ "$bad" -eq 0 ]; then
    echo "$program ended with $code"
    failed=$((failed + 1))
  fi
done
if [ "$absent" -eq "$programs" ]; then
  echo "no GPU here: nothing was tested"
  exit @NO_GPU@
fi
echo "total: $passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
