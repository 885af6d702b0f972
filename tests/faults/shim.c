/* Faults at the calls that reach a disk, for a process that is started with LD_PRELOAD.
 *
 * VB_FAULTS holds rules, separated by ';', each of four fields:
 *
 *     KINDS|TEXT|WHICH|ACTION        write,fsync|checkpoints/|3|kill
 *
 * KINDS  of calls: open create write read fsync rename mkdir unlink allocate truncate lock.
 * TEXT   that the path contains, the one a descriptor stands for included (an unnamed file ends in " (deleted)").
 * WHICH  of the matching calls of the process, counted from 1: "3", or "3+" for it and all later ones.
 * ACTION log       only write the call down
 *        kill      SIGKILL instead of the call         tear      half of a write, then SIGKILL
 *        errno=N   fail with that error                 short     half of what a read or write asked for
 *        flip      invert a bit of what a read gave     signal=N  send the signal, then make the call
 *        pause     SIGSTOP, then make the call          eat       take memory until the kernel kills the process
 *
 * Each rule's use is a line "ACTION NUMBER KIND PATH" in the file VB_FAULTS_LOG. The rules are read at the first call that finds
 * them, so that a process forked later than the library was loaded may still set them.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MAX_RULES = 8, DIRECT_BYTES = 4096 };
enum action { NONE, LOG, KILL, TEAR, ERRNO, SHORT, FLIP, SIGNAL, PAUSE, EAT };

struct rule {
    char kinds[128], text[256];
    long first;
    int onwards, number;
    enum action action;
    _Atomic long seen;
};

static struct rule rules[MAX_RULES];
static _Atomic int num_rules;
static int log_file = -1;
static pthread_mutex_t parsing = PTHREAD_MUTEX_INITIALIZER;

static const char *const NAMES[] = {"none", "log", "kill", "tear", "errno", "short", "flip", "signal", "pause", "eat"};

static void parse(void) {
    const char *text = getenv("VB_FAULTS"), *log = getenv("VB_FAULTS_LOG");
    if (!text) return;
    pthread_mutex_lock(&parsing);
    if (!num_rules) {
        int count = 0;
        char *copy = strdup(text), *rest = copy, *part;
        while ((part = strsep(&rest, ";")) && count < MAX_RULES) {
            struct rule *rule = &rules[count];
            char which[32], action[32];
            if (sscanf(part, "%127[^|]|%255[^|]|%31[^|]|%31s", rule->kinds, rule->text, which, action) != 4) {
                dprintf(2, "shim: no rule: %s\n", part);
                _exit(99);
            }
            rule->first = atol(which);
            rule->onwards = which[strlen(which) - 1] == '+';
            char *value = strchr(action, '=');
            if (value) rule->number = atoi(value + 1), *value = 0;
            for (int i = 1; i <= EAT; i++)
                if (!strcmp(action, NAMES[i])) rule->action = i;
            count++;
        }
        free(copy);
        if (log) log_file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
        num_rules = count;
    }
    pthread_mutex_unlock(&parsing);
}

static int has_kind(const char *kinds, const char *kind) {
    size_t length = strlen(kind);
    for (const char *at = kinds; (at = strstr(at, kind)); at += length)
        if ((at == kinds || at[-1] == ',') && (at[length] == 0 || at[length] == ',')) return 1;
    return 0;
}

static void path_of(int fd, const char *name, char *path) {
    char link[64];
    ssize_t length = 0;
    if (!name || (name[0] != '/' && fd != AT_FDCWD)) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
        if (length < 0) length = 0;
    }
    path[length] = 0;
    if (name) snprintf(path + length, PATH_MAX - length, "%s%s", length ? "/" : "", name);
}

static void eat(void) {
    for (;;) {
        char *more = mmap(0, 16 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (more == MAP_FAILED) abort();
        memset(more, 1, 16 << 20);
    }
}

/* What is to be done at a call; kill, signal, pause and eat are done here. */
static enum action due(const char *kind, int fd, const char *name, const char *other, int *number) {
    if (!num_rules) parse();
    if (!num_rules) return NONE;
    enum action found = NONE;
    int before = errno;
    char path[PATH_MAX * 2];
    path[0] = 0;
    for (int i = 0; i < num_rules; i++) {
        struct rule *rule = &rules[i];
        if (!has_kind(rule->kinds, kind)) continue;
        if (!path[0]) path_of(fd, name, path);
        if (!strstr(path, rule->text) && !(other && strstr(other, rule->text))) continue;
        long seen = ++rule->seen;
        if (seen != rule->first && !(rule->onwards && seen > rule->first)) continue;
        if (log_file >= 0) dprintf(log_file, "%s %ld %s %s\n", NAMES[rule->action], seen, kind, path);
        switch (rule->action) {
        case KILL: syscall(SYS_kill, getpid(), SIGKILL); break;
        case SIGNAL: syscall(SYS_kill, getpid(), rule->number); break;
        case PAUSE: syscall(SYS_kill, getpid(), SIGSTOP); break;
        case EAT: eat(); break;
        case LOG: break;
        default: found = rule->action, *number = rule->number;
        }
    }
    errno = before;
    return found;
}

static size_t half(int fd, size_t size) {
    if (fcntl(fd, F_GETFL) & O_DIRECT) return size >= 2 * DIRECT_BYTES ? size / 2 / DIRECT_BYTES * DIRECT_BYTES : size;
    return size > 1 ? size / 2 : size;
}

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }
#define FAIL_IF_DUE(kind, fd, name, other)                      \
    int number = 0;                                             \
    enum action what = due(kind, fd, name, other, &number);     \
    if (what == ERRNO) { errno = number; return -1; }           \
    (void)what

/* -- writes --------------------------------------------------------------------------------------------------------- */

#define WRITE(name, params, call)                             \
    ssize_t name params {                                       \
        FAIL_IF_DUE("write", fd, 0, 0);                         \
        if (what == SHORT || what == TEAR) size = half(fd, size); \
        ssize_t done = REAL(name) call;                         \
        if (what == TEAR) syscall(SYS_kill, getpid(), SIGKILL); \
        return done;                                            \
    }
WRITE(write, (int fd, const void *data, size_t size), (fd, data, size))
WRITE(pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
WRITE(pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))

/* Of vectors only the first part is made shorter: the package gives one. */
#define VECTOR(name, kind, params, call)                                        \
    ssize_t name params {                                                       \
        FAIL_IF_DUE(kind, fd, 0, 0);                                            \
        struct iovec cut;                                                       \
        if ((what == SHORT || what == TEAR) && count > 0) {                     \
            cut = parts[0], cut.iov_len = half(fd, cut.iov_len);                \
            parts = &cut, count = 1;                                            \
        }                                                                       \
        ssize_t done = REAL(name) call;                                         \
        if (what == TEAR) syscall(SYS_kill, getpid(), SIGKILL);                 \
        if (what == FLIP && done > 0) ((char *)parts[0].iov_base)[0] ^= 16;     \
        return done;                                                            \
    }
VECTOR(writev, "write", (int fd, const struct iovec *parts, int count), (fd, parts, count))
VECTOR(pwritev, "write", (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at))
VECTOR(pwritev64, "write", (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at))
VECTOR(pwritev2, "write", (int fd, const struct iovec *parts, int count, off_t at, int flags), (fd, parts, count, at, flags))
VECTOR(pwritev64v2, "write", (int fd, const struct iovec *parts, int count, off64_t at, int flags), (fd, parts, count, at, flags))
VECTOR(preadv, "read", (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at))
VECTOR(preadv64, "read", (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at))
VECTOR(preadv2, "read", (int fd, const struct iovec *parts, int count, off_t at, int flags), (fd, parts, count, at, flags))
VECTOR(preadv64v2, "read", (int fd, const struct iovec *parts, int count, off64_t at, int flags), (fd, parts, count, at, flags))

ssize_t sendfile64(int fd, int from, off64_t *at, size_t size) {
    FAIL_IF_DUE("write", fd, 0, 0);
    return REAL(sendfile64)(fd, from, at, what == SHORT || what == TEAR ? half(fd, size) : size);
}

/* -- reads ---------------------------------------------------------------------------------------------------------- */

#define READ(name, params, call)                                        \
    ssize_t name params {                                               \
        FAIL_IF_DUE("read", fd, 0, 0);                                  \
        if (what == SHORT) size = half(fd, size);                       \
        ssize_t done = REAL(name) call;                                 \
        if (what == FLIP && done > 0) ((char *)data)[done / 2] ^= 1;    \
        return done;                                                    \
    }
READ(read, (int fd, void *data, size_t size), (fd, data, size))
READ(pread, (int fd, void *data, size_t size, off_t at), (fd, data, size, at))
READ(pread64, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at))

/* -- the rest ------------------------------------------------------------------------------------------------------- */

#define OPEN(name, params, fd, call)                                    \
    int name params {                                                   \
        mode_t mode = 0;                                                \
        if (flags & (O_CREAT | O_TMPFILE)) {                            \
            va_list rest;                                               \
            va_start(rest, flags);                                      \
            mode = va_arg(rest, mode_t);                                \
            va_end(rest);                                               \
        }                                                               \
        FAIL_IF_DUE(flags & O_CREAT ? "create" : "open", fd, path, 0);  \
        return REAL(name) call;                                         \
    }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPEN(openat, (int fd, const char *path, int flags, ...), fd, (fd, path, flags, mode))
OPEN(openat64, (int fd, const char *path, int flags, ...), fd, (fd, path, flags, mode))

#define CALL(type, name, kind, params, fd, path, other, call)   \
    type name params {                                          \
        FAIL_IF_DUE(kind, fd, path, other);                     \
        return REAL(name) call;                                 \
    }
CALL(int, fsync, "fsync", (int fd), fd, 0, 0, (fd))
CALL(int, fdatasync, "fsync", (int fd), fd, 0, 0, (fd))
CALL(int, flock, "lock", (int fd, int how), fd, 0, 0, (fd, how))
CALL(int, ftruncate, "truncate", (int fd, off_t size), fd, 0, 0, (fd, size))
CALL(int, ftruncate64, "truncate", (int fd, off64_t size), fd, 0, 0, (fd, size))
CALL(int, mkdir, "mkdir", (const char *path, mode_t mode), AT_FDCWD, path, 0, (path, mode))
CALL(int, mkdirat, "mkdir", (int fd, const char *path, mode_t mode), fd, path, 0, (fd, path, mode))
CALL(int, rename, "rename", (const char *path, const char *other), AT_FDCWD, path, other, (path, other))
CALL(int, renameat, "rename", (int fd, const char *path, int to, const char *other), fd, path, other, (fd, path, to, other))
CALL(int, unlink, "unlink", (const char *path), AT_FDCWD, path, 0, (path))
CALL(int, rmdir, "unlink", (const char *path), AT_FDCWD, path, 0, (path))
CALL(int, unlinkat, "unlink", (int fd, const char *path, int flags), fd, path, 0, (fd, path, flags))

#define ALLOCATE(name, type)                                    \
    int name(int fd, type from, type size) {                    \
        int number = 0;                                         \
        if (due("allocate", fd, 0, 0, &number) == ERRNO) return number; \
        return REAL(name)(fd, from, size);                      \
    }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)
