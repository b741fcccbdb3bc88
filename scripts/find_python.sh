#!/bin/sh
# Prints the first Python >= 3.11 that can make a virtual environment; PYTHON, if set, is asked first.
# With --newest, the newest one, also if it is one of pyenv's that is not active.

works() {
  # Run it: a version manager's shim may stand on PATH for a version that is not active.
  "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# Where pyenv keeps its versions: beside its shims, which are on PATH even where pyenv itself is not.
pyenv_root=$(command -v python3 | sed -n 's|/shims/python3$||p')
pyenv_root=${pyenv_root:-${PYENV_ROOT:-}}

of_pyenv() {
  release=$(ls "$pyenv_root/versions" 2>/dev/null | grep -x "$1\.[0-9]*" | sort -t . -k 3 -n | tail -n 1)
  [ -z "$release" ] || echo "$pyenv_root/versions/$release/bin/python"
}

if [ "${1:-}" = --newest ]; then
  candidates="${PYTHON:-}"
  for minor in 14 13 12 11; do
    candidates="$candidates python3.$minor $(of_pyenv 3.$minor)"
  done
  candidates="$candidates python3"
else
  candidates="${PYTHON:-} python3 python3.11 python3.12 python3.13 python3.14 python"
fi
for candidate in $candidates; do
  works "$candidate" || continue
  "$candidate" -c 'import sys; print(sys.executable)'
  exit 0
done
echo "jax_tt needs Python >= 3.11 with the venv module; none found on PATH." >&2
echo "Install one (Debian, Ubuntu: apt-get install python3 python3-venv) or call: make PYTHON=/path/to/python3 ..." >&2
exit 1
