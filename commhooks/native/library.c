/* What the library says of itself. */
#include "targets.h"

#define EXPORTED __attribute__((visibility("default")))
#define VERSION 5 /* of the functions' arguments; the same as in library.py */

EXPORTED int commhooks_version(void) { return VERSION; }

/* Return whether this processor, and its operating system, have a level: plain (0), SSE4.2, AVX2 or AVX-512 (3). */
EXPORTED int commhooks_has_level(int level) {
#if HAS_LEVELS
    __builtin_cpu_init();
    switch (level) {
    case 1: return !!__builtin_cpu_supports("sse4.2");
    case 2: return !!__builtin_cpu_supports("avx2");
    case 3:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    default: break;
    }
#endif
    return level == 0;
}
