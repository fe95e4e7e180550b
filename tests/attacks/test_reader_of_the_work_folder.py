"""Attacks of another user of the same node who may not write to the work folder: what can be read."""

import os
import stat

import pytest
from support.daemons import daemon
from support.loops import another
from support.simulated.parts import record
from support.with_root import as_user

from coordinator.config.schema import Config
from coordinator.intake.work_folder import open_folder

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot become another user")


@as_root
def test_another_user_sees_nothing_of_a_new_work_folder_and_of_its_files(shared):
    """Made under the widest umask: folders 0700, files 0600, from the root of the work folder down."""
    work = shared / "home" / "work"

    def make():
        os.umask(0)
        open_folder(work, None)
        ears = daemon(work, Config(work_dir=work))
        with ears.coordinator.in_charge():
            ears.coordinator.evaluations.accept(another(record(), 1))
            ears.coordinator.tick()
            ears.tick()

    daemon(shared / "imports")
    as_user(make)
    wide = [
        f"{path.relative_to(shared)} {stat.S_IMODE(path.lstat().st_mode):o}"
        for path in (work, *work.rglob("*"))
        if path.lstat().st_mode & 0o077 and not path.is_symlink()
    ]
    assert wide == []
