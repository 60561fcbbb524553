"""A wall clock that jumps for whole processes, while the monotonic clock and all waiting go on, as on a real machine.

A few lines of C come before libc's own functions. libfaketime is not enough here: with it, sleeping on the monotonic
clock fails, so that it ends threads that a jump leaves alone.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

COMPILER = shutil.which("cc")
SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static int (*real)(clockid_t, struct timespec *);
static volatile int64_t *ahead;

__attribute__((constructor)) static void begin(void) {
    real = dlsym(RTLD_NEXT, "clock_gettime");
    int file = open(getenv("WALL_CLOCK"), O_RDONLY);
    void *found = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) ahead = found;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    if (!real) begin();
    int code = real(clock, at);
    if (!code && ahead && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += *ahead;
    return code;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


class JumpingClock:
    """The clock of processes that are started with :attr:`environment`.

    Args:
        folder: For the compiled functions and the position of the clock.
    """

    def __init__(self, folder: Path) -> None:
        assert COMPILER is not None
        self._position, library = folder / "ahead", folder / "clock.so"
        (folder / "clock.c").write_text(SOURCE)
        compiled = [COMPILER, "-shared", "-fPIC", "-O1", "-o", str(library), str(folder / "clock.c"), "-ldl"]
        subprocess.run(compiled, check=True)
        self.jump(0)
        self.environment = {"LD_PRELOAD": str(library), "WALL_CLOCK": str(self._position)}

    def jump(self, days: float) -> None:
        """Set how far the clock is ahead of the real one."""
        with self._position.open("r+b" if self._position.exists() else "wb") as file:
            file.write(struct.pack("q", int(days * 86400)))
