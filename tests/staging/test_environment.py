"""A node's page cache holds what trials will import before a GPU is held for it."""

import ctypes
import json
import mmap
import os
import subprocess
import sys
import threading

import pytest

from evaljobs.staging import environment

PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import package
import mmap
with open(sys.argv[2], "rb") as file:
    library = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    library[5 << 20]
    from evaljobs.staging import environment
    environment.record_touched(Path(sys.argv[3]))
"""


@pytest.fixture
def learnt(tmp_path):
    """A module and a library of 8 MiB of which a process touched one byte, and what that process wrote down."""
    folder, library, place = tmp_path / "lib", tmp_path / "library.so", tmp_path / "lists" / "list.json"
    folder.mkdir()
    (folder / "package.py").write_text(f"text = {'x' * 300_000!r}\n")
    library.write_bytes(os.urandom(8 << 20))
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", PROGRAM, folder, library, place], env=own, check=True)
    return library, next(folder.rglob("*.pyc")), place


def cached(path):
    """Which pages of a file are in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as pages:
        seen = (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(pages)), seen) == 0
        return [bool(page & 1) for page in seen]


def forget(path):
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_what_a_trial_touched_is_read_ahead(learnt):
    """Bytecode whole, and of a library the part around the touched page, not the rest."""
    library, bytecode, place = learnt
    for path in (library, bytecode):
        forget(path)
    assert not any(cached(library) + cached(bytecode))
    read = environment.read_ahead(place, readers=4, stop=threading.Event())
    assert all(cached(bytecode))
    there = cached(library)
    assert there[(5 << 20) // mmap.PAGESIZE]
    assert not there[0]
    assert read >= bytecode.stat().st_size + environment.BLOCK


def test_what_is_gone_or_no_file_stops_nothing(learnt, tmp_path):
    """A removed file, a pipe without a writer, a folder and a list that is cut off are left to the trials."""
    library, bytecode, place = learnt
    os.mkfifo(tmp_path / "pipe")
    files = json.loads(place.read_text()) | {
        str(tmp_path / name): [[0, 10]] for name in ("pipe", "gone", "lib")
    }
    library.unlink()
    place.write_text(json.dumps(files))
    assert environment.read_ahead(place, readers=4, stop=threading.Event()) >= bytecode.stat().st_size
    place.write_text(place.read_text()[:-9])
    assert environment.read_ahead(place, readers=4, stop=threading.Event()) == 0
    assert environment.read_ahead(tmp_path / "none", readers=4, stop=threading.Event()) == 0


def test_a_list_is_written_again_when_it_is_old(tmp_path):
    """Trials that end together write once; after an hour the list follows the environment."""
    place = tmp_path / "list.json"
    environment.record_touched(place)
    assert {environment.__cached__, environment.__file__} & json.loads(place.read_text()).keys()
    place.write_text("{}")
    environment.record_touched(place)
    assert place.read_text() == "{}"
    old = place.stat().st_mtime - environment.RENEWED_SECONDS
    os.utime(place, (old, old))
    environment.record_touched(place)
    assert json.loads(place.read_text())
