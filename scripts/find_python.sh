#!/bin/sh
# Prints the first Python >= 3.11 that can make a virtual environment; PYTHON, if set, is asked first.
for candidate in "${PYTHON:-}" python3 python3.11 python3.12 python3.13 python3.14 python; do
  [ -n "$candidate" ] || continue
  # Run it: a version manager's shim may stand on PATH for a version that is not active.
  "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
  "$candidate" -c 'import sys; print(sys.executable)'
  exit 0
done
echo "jax_tt needs Python >= 3.11 with the venv module; none found on PATH." >&2
echo "Install one (Debian, Ubuntu: apt-get install python3 python3-venv) or call: make PYTHON=/path/to/python3 ..." >&2
exit 1
