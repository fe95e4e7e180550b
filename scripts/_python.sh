# Sourced by the commands beside it: runs a module of this folder with .venv (or with $PYTHON): . _python.sh MODULE OPTION…
# Exit codes: 0: every target was met; 1: one was missed, or a run broke; 2: the command cannot run here.
set -euo pipefail
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$top/scripts:$top:$top/tests${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-$top/.venv/bin/python}" -m "$@"
