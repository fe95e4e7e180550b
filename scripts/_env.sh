# Sourced by the scripts beside it: one way to make .venv.
#
# Rule: an environment is made once for a state of constraints.txt and pyproject.toml and found again by a stamp. A
# torch that the chosen Python can import is reused (--system-site-packages), since PyPI's brings gigabytes of CUDA.

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$top/.venv
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

say() { printf '==> %s\n' "$*"; }
die() { printf '%s\n' "$*" >&2; exit 2; }

# asks_help OPTION…: is -h or --help among the options?
asks_help() { case " $* " in *" -h "* | *" --help "*) ;; *) return 1 ;; esac; }

# help_first OPTION…: for -h or --help print the script's head comment and end, before anything is installed.
help_first() {
  if asks_help "$@"; then
    sed -n '2,${/^#/!q; s/^# \{0,1\}//p;}' "$0"
    exit 0
  fi
}

# The Python that .venv is made with: $PYTHON, or the first that is 3.11 or later.
find_python() {
  local python
  for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$python"
      return
    fi
  done
  die "No Python 3.11 or later found (\$PYTHON, python3 …). On Debian and Ubuntu: apt-get install python3 python3-venv"
}

# ensure_venv EXTRAS: .venv with evalspan[EXTRAS], editable, at the versions of constraints.txt.
ensure_venv() {
  local extras=$1 python digest stamp constraints site=()
  digest=$(cat "$top/constraints.txt" "$top/pyproject.toml" "$top/scripts/_env.sh" | sha256sum | cut -c1-16)
  # The folder's own path counts: an environment that was moved or copied is broken.
  digest=$digest-$(printf %s "$venv" | sha256sum | cut -c1-8)
  for stamp in "$venv/.stamp-$extras" "$venv/.stamp-hf,dev"; do
    if [ "$(cat "$stamp" 2>/dev/null)" = "$digest" ]; then return; fi
  done
  python=$(find_python) || exit $?
  "$python" -c 'import venv, ensurepip' 2>/dev/null ||
    die "$python lacks the venv module. On Debian and Ubuntu: apt-get install python3-venv"
  if [ ! -x "$venv/bin/python" ]; then
    if "$python" -c 'import torch' 2>/dev/null; then
      say "reusing the torch of $python"
      site=(--system-site-packages)
    fi
    say "making $venv"
    "$python" -m venv "${site[@]}" "$venv" || die "$python -m venv failed: see above"
    if [ ${#site[@]} -gt 0 ] && ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
      # $python is an environment itself, and its packages are not the system's: name their folders.
      "$python" -c 'import sysconfig as s; print(s.get_path("purelib"), s.get_path("platlib"), sep="\n")' > \
        "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent.pth"
    fi
  fi
  constraints=$venv/constraints.txt
  cp "$top/constraints.txt" "$constraints"
  if "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    # What works stays: neither replaced by another version nor joined by gigabytes of CUDA.
    sed -i '/^torch==/d' "$constraints"
    "$venv/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >> "$constraints"
  fi
  say "installing evalspan[$extras] into $venv"
  "$venv/bin/python" -m pip install --quiet --progress-bar off --constraint "$constraints" --editable "$top[$extras]" ||
    die "Installation failed: see above. A network that reaches PyPI (or PIP_INDEX_URL) is needed once."
  printf '%s' "$digest" > "$venv/.stamp-$extras"
}
