"""Isolates programs, each in a process without rights.

A lane (`lane`) starts an interpreter that gives up its rights (`launch`), then forks one process
per program (`zygote`), which runs it with its test (`execute`). `kernel` and `syscalls` have the
system calls for it.

Rule: runs inside what it builds, so it imports the standard library and the sandbox alone. Start
reading at `lane`.
"""
