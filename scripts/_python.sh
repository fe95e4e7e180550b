# Sourced by the commands beside it: runs a module of this folder with .venv (or with $PYTHON): . _python.sh MODULE OPTION…
set -euo pipefail
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$top/scripts:$top:$top/tests${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-$top/.venv/bin/python}" -m "$@"
