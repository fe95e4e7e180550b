"""System calls (asm/unistd_64.h, asm-generic/unistd.h): name, number on x86_64, number on aarch64.

Rule: ALLOWED has what a plain Python program needs; all other calls are refused. No socket, no new
process, no exec, no mount, no shared memory outside the private tmpfs, no keyring, no ptrace, no
io_uring, no bpf, no chmod or lock (Landlock does not handle them), no larger socket buffers (memory
that RLIMIT_AS does not count). `kernel` builds the filter.
"""

from __future__ import annotations

from typing import Final

Numbers = dict[str, tuple[int | None, int | None]]


def _numbers(table: str) -> Numbers:
    rows = [line.split() for line in table.split("\n") if line]
    return {name: (_number(x86_64), _number(aarch64)) for name, x86_64, aarch64 in rows}


def _number(word: str) -> int | None:
    return None if word == "-" else int(word)


# Allowed with any arguments.
ALLOWED: Final = _numbers("""
read 0 63
write 1 64
close 3 57
fstat 5 80
lseek 8 62
mmap 9 222
mprotect 10 226
munmap 11 215
brk 12 214
rt_sigaction 13 134
rt_sigprocmask 14 135
rt_sigreturn 15 139
rt_sigpending 127 136
rt_sigsuspend 130 133
rt_sigtimedwait 128 137
sigaltstack 131 132
pread64 17 67
pwrite64 18 68
readv 19 65
writev 20 66
preadv 295 69
pwritev 296 70
access 21 -
faccessat 269 48
faccessat2 439 439
pipe 22 -
pipe2 293 59
select 23 -
pselect6 270 72
poll 7 -
ppoll 271 73
sched_yield 24 124
mremap 25 216
madvise 28 233
dup 32 23
dup2 33 -
dup3 292 24
pause 34 -
nanosleep 35 101
clock_nanosleep 230 115
getitimer 36 102
setitimer 38 103
alarm 37 -
getpid 39 172
gettid 186 178
getppid 110 173
getuid 102 174
geteuid 107 175
getgid 104 176
getegid 108 177
getgroups 115 158
getresuid 118 148
getresgid 120 150
getpgid 121 155
getpgrp 111 -
getsid 124 156
uname 63 160
ftruncate 77 46
getdents64 217 61
getcwd 79 17
chdir 80 49
fchdir 81 50
rename 82 -
renameat 264 38
renameat2 316 276
mkdir 83 -
mkdirat 258 34
rmdir 84 -
link 86 -
linkat 265 37
unlink 87 -
unlinkat 263 35
symlink 88 -
symlinkat 266 36
readlink 89 -
readlinkat 267 78
umask 95 166
gettimeofday 96 169
getrlimit 97 163
getrusage 98 165
sysinfo 99 179
times 100 153
statfs 137 43
fstatfs 138 44
arch_prctl 158 -
futex 202 98
futex_waitv 449 449
sched_getaffinity 204 123
sched_getparam 143 121
sched_getscheduler 145 120
sched_get_priority_max 146 125
sched_get_priority_min 147 126
set_tid_address 218 96
set_robust_list 273 99
restart_syscall 219 128
clock_gettime 228 113
clock_getres 229 114
getcpu 309 168
exit 60 93
exit_group 231 94
epoll_create1 291 20
epoll_ctl 233 21
epoll_wait 232 -
epoll_pwait 281 22
open 2 -
openat 257 56
stat 4 -
lstat 6 -
newfstatat 262 79
statx 332 291
eventfd2 290 19
getrandom 318 278
copy_file_range 326 285
sendfile 40 71
fallocate 285 47
rseq 334 293
recvfrom 45 207
sendto 44 206
recvmsg 47 212
sendmsg 46 211
shutdown 48 210
getsockopt 55 209
getsockname 51 204
getpeername 52 205
wait4 61 260
waitid 247 95
""")

# Not executed, but answered with success: on an open file of the host they would flush its disk or
# empty its cache, and slow other jobs.
IGNORED: Final = _numbers("""
fsync 74 82
fdatasync 75 83
msync 26 227
fadvise64 221 223
""")

# Allowed for some arguments only (see `kernel.seccomp_program`), or used by the box itself.
SPECIAL: Final = _numbers("""
kill 62 129
tgkill 234 131
clone 56 220
clone3 435 435
unshare 272 97
mount 165 40
umount2 166 39
pivot_root 155 41
capset 126 91
seccomp 317 277
landlock_create_ruleset 444 444
landlock_add_rule 445 445
landlock_restrict_self 446 446
prctl 157 167
ioctl 16 29
fcntl 72 25
socketpair 53 199
prlimit64 302 261
""")
