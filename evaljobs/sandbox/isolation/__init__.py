"""Shuts programs in: a lane (`lane`) starts an interpreter that gives up all it has (`launch`), and then forks one process
for each program (`zygote`). What the kernel offers for it stands in `kernel` and `syscalls`.

Rule: runs inside what it builds, so it imports the standard library and the sandbox alone. Start reading at `lane`.
"""
