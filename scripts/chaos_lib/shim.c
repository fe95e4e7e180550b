/* A node's clock, its storage and its file locks as a fault makes them, for the Python processes of that node.
 *
 * Loaded by /etc/ld.so.preload of a node (chaos_lib/shim.py), or by LD_PRELOAD. The page CONTROL/HOSTNAME, of the layout `control`,
 * says at each moment what is broken; without it nothing is. The kernel's own clock stays: the mtime of a file is the
 * file server's. What is mapped into memory (mmap) is not slowed down. With CHAOS_LOCKS_ALONE set, flock() on a file of that name
 * sees no other process, as on a mount with `localflock`. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct control {
  int64_t clock_s;     /* added to the clock */
  int64_t hold_s;      /* every call to storage takes so long; below 0: until storage is back */
  int64_t rate;        /* bytes a second of reads; 0: all there are */
  int64_t stale;       /* 1: storage answers ESTALE */
  int64_t generation;  /* files opened before it are stale for good */
  char storage[4056];  /* the folder that is on this storage */
};
#define FILES 4096
static const struct control *control;
static int64_t born[FILES]; /* generation in which a file was opened */

__attribute__((constructor)) static void begin(void) {
  char host[256] = "", path[1024];
  if (!strstr(program_invocation_short_name, "python") && !strstr(program_invocation_short_name, "evalspan")) return;
  gethostname(host, sizeof host - 1);
  snprintf(path, sizeof path, CONTROL "/%s", host);
  int file = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  void *page = mmap(NULL, sizeof *control, PROT_READ, MAP_SHARED, file, 0);
  syscall(SYS_close, file);
  if (page != MAP_FAILED) control = page;
}

#define REAL(result, name, ...)                             \
  static result (*real)(__VA_ARGS__);                       \
  if (!real) real = (result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static void rest(double seconds) {
  struct timespec left = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
  while (nanosleep(&left, &left) && errno == EINTR) {}
}

static void hold(void) {
  if (control->hold_s > 0) rest(control->hold_s);
  while (control->hold_s < 0) rest(0.05);
}

static int on_storage(const char *path) {
  size_t n = strlen(control->storage);
  return n && !strncmp(path, control->storage, n) && (path[n] == '/' || !path[n]);
}

/* Nonzero, with errno set, where storage refuses the call. */
static int path_refused(int folder, const char *path) {
  char whole[8192];
  if (!control || !(control->hold_s || control->stale) || !path) return 0;
  if (path[0] != '/') {
    char link[64];
    ssize_t n;
    snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
    n = syscall(SYS_readlink, link, whole, 4095);
    if (n < 0) return 0;
    snprintf(whole + n, sizeof whole - n, "/%s", path);
    path = whole;
  }
  if (!on_storage(path)) return 0;
  hold();
  if (!control->stale) return 0;
  errno = ESTALE;
  return 1;
}

static int file_on_storage(int file) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t n = syscall(SYS_readlink, link, path, sizeof path - 1);
  path[n < 0 ? 0 : n] = 0;
  return on_storage(path);
}

static int file_refused(int file) {
  if (!control || file < 0) return 0;
  int64_t then = file < FILES ? born[file] : control->generation;
  if (!(control->hold_s || control->stale || then < control->generation) || !file_on_storage(file)) return 0;
  hold();
  if (!control->stale && then >= control->generation) return 0;
  errno = ESTALE;
  return 1;
}

static ssize_t slowed(int file, ssize_t bytes) {
  if (control && control->rate && bytes > 0 && file_on_storage(file)) rest((double)bytes / control->rate);
  return bytes;
}

static int opened(int file) {
  if (control && file >= 0 && file < FILES) born[file] = control->generation;
  return file;
}

/* --- clock ------------------------------------------------------------------------------------------------------ */

int clock_gettime(clockid_t clock, struct timespec *now) {
  REAL(int, "clock_gettime", clockid_t, struct timespec *);
  int failed = real(clock, now);
  if (!failed && control && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += control->clock_s;
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  REAL(int, "gettimeofday", struct timeval *, void *);
  int failed = real(now, zone);
  if (!failed && control) now->tv_sec += control->clock_s;
  return failed;
}

time_t time(time_t *into) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME_COARSE, &now);
  if (into) *into = now.tv_sec;
  return now.tv_sec;
}

/* --- storage ---------------------------------------------------------------------------------------------------- */

static mode_t mode_of(int flags, va_list more) { return flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0; }

#define OPEN(name)                                          \
  int name(const char *path, int flags, ...) {              \
    REAL(int, #name, const char *, int, ...);               \
    va_list more; va_start(more, flags);                    \
    mode_t mode = mode_of(flags, more); va_end(more);       \
    return path_refused(AT_FDCWD, path) ? -1 : opened(real(path, flags, mode)); \
  }
#define OPENAT(name)                                        \
  int name(int folder, const char *path, int flags, ...) {  \
    REAL(int, #name, int, const char *, int, ...);          \
    va_list more; va_start(more, flags);                    \
    mode_t mode = mode_of(flags, more); va_end(more);       \
    return path_refused(folder, path) ? -1 : opened(real(folder, path, flags, mode)); \
  }
#define BY_PATH(result, name, failure, declared, typed, passed, folder, path) \
  result name declared {                                    \
    REAL(result, #name, typed);                             \
    return path_refused(folder, path) ? failure : real passed; \
  }
#define BY_FILE(result, name, declared, typed, passed)      \
  result name declared {                                    \
    REAL(result, #name, typed);                             \
    return file_refused(file) ? -1 : real passed;           \
  }
#define READS(name, declared, typed, passed)                \
  ssize_t name declared {                                   \
    REAL(ssize_t, #name, typed);                            \
    return file_refused(file) ? -1 : slowed(file, real passed); \
  }
#define TYPES(...) __VA_ARGS__
#define C const char *

OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)
BY_PATH(int, stat, -1, (C p, struct stat *s), TYPES(C, struct stat *), (p, s), AT_FDCWD, p)
BY_PATH(int, lstat, -1, (C p, struct stat *s), TYPES(C, struct stat *), (p, s), AT_FDCWD, p)
BY_PATH(int, stat64, -1, (C p, struct stat64 *s), TYPES(C, struct stat64 *), (p, s), AT_FDCWD, p)
BY_PATH(int, lstat64, -1, (C p, struct stat64 *s), TYPES(C, struct stat64 *), (p, s), AT_FDCWD, p)
BY_PATH(int, fstatat, -1, (int d, C p, struct stat *s, int f), TYPES(int, C, struct stat *, int), (d, p, s, f), d, p)
BY_PATH(int, fstatat64, -1, (int d, C p, struct stat64 *s, int f), TYPES(int, C, struct stat64 *, int), (d, p, s, f), d, p)
BY_PATH(int, statx, -1, (int d, C p, int f, unsigned m, struct statx *s), TYPES(int, C, int, unsigned, struct statx *),
        (d, p, f, m, s), d, p)
BY_PATH(int, mkdir, -1, (C p, mode_t m), TYPES(C, mode_t), (p, m), AT_FDCWD, p)
BY_PATH(int, rename, -1, (C p, C to), TYPES(C, C), (p, to), AT_FDCWD, p)
BY_PATH(int, unlink, -1, (C p), TYPES(C), (p), AT_FDCWD, p)
BY_PATH(int, rmdir, -1, (C p), TYPES(C), (p), AT_FDCWD, p)
BY_PATH(int, utimensat, -1, (int d, C p, const struct timespec t[2], int f), TYPES(int, C, const struct timespec *, int),
        (d, p, t, f), d, p)
BY_PATH(void *, opendir, NULL, (C p), TYPES(C), (p), AT_FDCWD, p)
BY_FILE(int, fstat, (int file, struct stat *s), TYPES(int, struct stat *), (file, s))
BY_FILE(int, fstat64, (int file, struct stat64 *s), TYPES(int, struct stat64 *), (file, s))
READS(read, (int file, void *b, size_t n), TYPES(int, void *, size_t), (file, b, n))
READS(pread, (int file, void *b, size_t n, off_t o), TYPES(int, void *, size_t, off_t), (file, b, n, o))
READS(pread64, (int file, void *b, size_t n, off64_t o), TYPES(int, void *, size_t, off64_t), (file, b, n, o))
BY_FILE(ssize_t, write, (int file, const void *b, size_t n), TYPES(int, const void *, size_t), (file, b, n))
BY_FILE(ssize_t, pwrite, (int file, const void *b, size_t n, off_t o), TYPES(int, const void *, size_t, off_t),
        (file, b, n, o))
BY_FILE(ssize_t, pwrite64, (int file, const void *b, size_t n, off64_t o), TYPES(int, const void *, size_t, off64_t),
        (file, b, n, o))
BY_FILE(int, fsync, (int file), TYPES(int), (file))
BY_FILE(int, fdatasync, (int file), TYPES(int), (file))
BY_FILE(int, ftruncate, (int file, off_t n), TYPES(int, off_t), (file, n))
BY_FILE(int, ftruncate64, (int file, off64_t n), TYPES(int, off64_t), (file, n))
BY_FILE(int, futimens, (int file, const struct timespec t[2]), TYPES(int, const struct timespec *), (file, t))

/* --- locks ------------------------------------------------------------------------------------------------------ */

int flock(int file, int kind) {
  REAL(int, "flock", int, int);
  const char *alone = getenv("CHAOS_LOCKS_ALONE");
  char link[64], path[4096];
  if (alone) {
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t n = syscall(SYS_readlink, link, path, sizeof path - 1);
    path[n < 0 ? 0 : n] = 0;
    const char *name = strrchr(path, '/');
    if (name && !strcmp(name + 1, alone)) return 0;
  }
  return file_refused(file) ? -1 : real(file, kind);
}
