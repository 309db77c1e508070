import Foundation
import LedgerTestSupport

/// What processes are told about the world: that the disk is full, or that it is another hour. A library that they load before libc tells them.
final class Illusion {
    private let folder: TemporaryDirectory
    /// The environment of a process that shall believe it.
    let environment: [String: String]

    init() throws {
        folder = try TemporaryDirectory()
        let library = folder.path + "/illusion.so"
        environment = [
            "LD_PRELOAD": library, "ILLUSION_DISK": folder.path + "/full", "ILLUSION_CLOCK": folder.path + "/clock",
        ]
        _ = try folder.write(Self.source, to: "illusion.c")
        try TestCluster.run(["clang", "-shared", "-fPIC", "-O1", "-o", library, folder.path + "/illusion.c"])
        _ = try folder.write(String(repeating: "\0", count: 8), to: "clock")
        // PostgreSQL runs as another user.
        try TestCluster.run(["chmod", "-R", "a+rX", folder.path])
    }

    /// From now on, no file can grow, or they can again.
    func fillDisk(_ isFull: Bool) throws {
        if isFull {
            _ = try folder.write("", to: "full")
        } else {
            try FileManager.default.removeItem(atPath: folder.path + "/full")
        }
    }

    /// From now on, the clock is wrong by so many seconds.
    func setClock(off seconds: Int64) throws {
        // In place: the processes have mapped the file.
        let file = try FileHandle(forWritingTo: URL(fileURLWithPath: folder.path + "/clock"))
        try withUnsafeBytes(of: seconds) { try file.write(contentsOf: Data($0)) }
        try file.close()
    }

    private static let source = """
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <errno.h>
        #include <fcntl.h>
        #include <stdlib.h>
        #include <sys/mman.h>
        #include <sys/stat.h>
        #include <sys/syscall.h>
        #include <sys/time.h>
        #include <sys/uio.h>
        #include <time.h>
        #include <unistd.h>

        static int refused(int fd, off_t end) {
            const char *full = getenv("ILLUSION_DISK");
            struct stat about;
            if (!full || fstat(fd, &about) || !S_ISREG(about.st_mode) || end <= about.st_size || access(full, F_OK)) return 0;
            errno = ENOSPC;
            return 1;
        }
        static off_t length(const struct iovec *parts, int count) {
            off_t sum = 0;
            for (int i = 0; i < count; i++) sum += parts[i].iov_len;
            return sum;
        }
        ssize_t pwrite64(int fd, const void *bytes, size_t count, off_t at) {
            return refused(fd, at + count) ? -1 : syscall(SYS_pwrite64, fd, bytes, count, at);
        }
        ssize_t pwrite(int fd, const void *bytes, size_t count, off_t at) { return pwrite64(fd, bytes, count, at); }
        ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t at) {
            return refused(fd, at + length(parts, count)) ? -1 : syscall(SYS_pwritev, fd, parts, (long)count, at, 0L);
        }
        ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) { return pwritev64(fd, parts, count, at); }
        int posix_fallocate64(int fd, off_t at, off_t count) {
            int (*next)(int, off_t, off_t) = dlsym(RTLD_NEXT, "posix_fallocate64");
            return refused(fd, at + count) ? ENOSPC : next(fd, at, count);
        }
        int posix_fallocate(int fd, off_t at, off_t count) { return posix_fallocate64(fd, at, count); }

        static const long long *shift;
        __attribute__((constructor)) static void map(void) {
            const char *path = getenv("ILLUSION_CLOCK");
            int fd = path ? open(path, O_RDONLY) : -1;
            void *found = fd < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, fd, 0);
            if (found != MAP_FAILED) shift = found;
            if (fd >= 0) close(fd);
        }
        int clock_gettime(clockid_t clock, struct timespec *now) {
            int failed = syscall(SYS_clock_gettime, clock, now);
            if (!failed && clock == CLOCK_REALTIME && shift) now->tv_sec += *shift;
            return failed;
        }
        int gettimeofday(struct timeval *restrict now, void *restrict zone) {
            int failed = syscall(SYS_gettimeofday, now, zone);
            if (!failed && now && shift) now->tv_sec += *shift;
            return failed;
        }
        time_t time(time_t *now) {
            struct timespec full;
            clock_gettime(CLOCK_REALTIME, &full);
            if (now) *now = full.tv_sec;
            return full.tv_sec;
        }
        """
}
