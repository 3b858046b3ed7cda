/* The passes for processors with SSE4.2. */
#include "targets.h"
#if HAS_LEVELS
#pragma GCC target("sse4.2")
#define LEVEL sse42
#include "passes.h"
#endif
