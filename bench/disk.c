/* A slow disk for one server: sleeps in each call that reads pages, and in each flush.
 *
 * Preloaded (LD_PRELOAD) into the postmaster, whose children inherit the mapping. PARAPPLY_BENCH_DISK names a file of
 * two 32-bit numbers in the machine's byte order: microseconds for a read, microseconds for a flush. It is mapped, so
 * that whoever may write the file changes both at any time, for all processes at once.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define PAGE_BYTES 8192

static volatile const uint32_t *delays_us; /* read, flush */

__attribute__((constructor)) static void map_delays(void)
{
    const char *path = getenv("PARAPPLY_BENCH_DISK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *found = mmap(NULL, 2 * sizeof(uint32_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED)
        delays_us = found;
    /* Otherwise every sleep is 50 us longer; children inherit it. Source: PR_SET_TIMERSLACK(2const). */
    prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
}

static void wait_us(int which)
{
    uint32_t us = delays_us ? delays_us[which] : 0;
    if (us == 0)
        return;
    int kept = errno;
    struct timespec left = {us / 1000000, (us % 1000000) * 1000L};
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        ;
    errno = kept;
}

static void wait_for_pages(ssize_t got)
{
    if (got > 0 && got % PAGE_BYTES == 0)
        wait_us(0);
}

#define REAL(type, name, ...)                                     \
    static type (*real)(__VA_ARGS__);                             \
    if (!real)                                                    \
        real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

ssize_t pread(int file, void *to, size_t size, off_t at)
{
    REAL(ssize_t, "pread", int, void *, size_t, off_t);
    ssize_t got = real(file, to, size, at);
    wait_for_pages(got);
    return got;
}

ssize_t pread64(int file, void *to, size_t size, off64_t at)
{
    REAL(ssize_t, "pread64", int, void *, size_t, off64_t);
    ssize_t got = real(file, to, size, at);
    wait_for_pages(got);
    return got;
}

ssize_t preadv(int file, const struct iovec *to, int n, off_t at)
{
    REAL(ssize_t, "preadv", int, const struct iovec *, int, off_t);
    ssize_t got = real(file, to, n, at);
    wait_for_pages(got);
    return got;
}

ssize_t preadv64(int file, const struct iovec *to, int n, off64_t at)
{
    REAL(ssize_t, "preadv64", int, const struct iovec *, int, off64_t);
    ssize_t got = real(file, to, n, at);
    wait_for_pages(got);
    return got;
}

int fsync(int file)
{
    REAL(int, "fsync", int);
    wait_us(1);
    return real(file);
}

int fdatasync(int file)
{
    REAL(int, "fdatasync", int);
    wait_us(1);
    return real(file);
}
