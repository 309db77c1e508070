#pragma once
#include <sys/prctl.h>

// Swift cannot call prctl(2), which is variadic.

// No core dump, no debugger of the same user, and /proc/PID belongs to root; until the next execve(2). 0, or -1.
static inline int tk_forbid_dumps(void) {
    return prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
}
