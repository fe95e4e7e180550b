# Sourced by the scripts beside it: one way to make .venv.
#
# Rule: an environment is made once for a state of requirements/ (the lock, written by scripts/lock) and pyproject.toml,
# and found again by a stamp. A torch that the chosen Python can import is reused (--system-site-packages), since PyPI's
# brings gigabytes of CUDA.

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

# ensure_venv run|dev: .venv with evalspan, editable, and the packages of the lock: those that run it, or also those that
# test it. Each file is compared with the lock's hash; a torch from an index of the site's own is not.
ensure_venv() {
  local parts=("$1") python digest stamp site=()
  digest=$(cat "$top"/requirements/*.txt "$top/pyproject.toml" "$top/scripts/_env.sh" | sha256sum | cut -c1-16)
  # The folder's own path counts: an environment that was moved or copied is broken.
  digest=$digest-$(printf %s "$venv" | sha256sum | cut -c1-8)
  for stamp in "$venv/.stamp-$1" "$venv/.stamp-dev"; do
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
  say "installing evalspan and the packages of requirements/ into $venv"
  if [ "$1" = dev ]; then parts=(run dev); fi
  { install_locked build "${parts[@]}" && install_torch &&
    install --no-deps --no-build-isolation --editable "$top"; } ||
    die "Installation failed: see above. A network that reaches PyPI (or PIP_INDEX_URL) is needed once."
  printf '%s' "$digest" > "$venv/.stamp-$1"
}

install() { "$venv/bin/python" -m pip install --quiet --progress-bar off "$@"; }

# install_locked PART…: the packages of requirements/PART.txt. The lock is complete, so pip looks for no others; what is
# built from source is built with the packages of build.txt.
install_locked() {
  local part
  for part in "$@"; do
    install --no-deps --no-build-isolation --require-hashes --requirement "$top/requirements/$part.txt" || return
  done
}

# torch, unless one can be imported: PyPI's, of the lock; its version from the site's index or folder, if pip has one.
install_torch() {
  if "$venv/bin/python" -c 'import torch' 2>/dev/null; then return; fi
  local settings
  settings=$("$venv/bin/python" -m pip config list)  # no pipe: `grep -q` would end pip early, which pipefail takes for "no"
  if [[ $settings =~ extra-index-url|find-links ]]; then
    install "$(grep -oE '^torch==[0-9.]+' "$top/requirements/torch.txt")"
  else
    install_locked torch
  fi
}
