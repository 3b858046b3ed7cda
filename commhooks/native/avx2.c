/* The passes for processors with AVX2. */
#include "targets.h"
#if HAS_LEVELS
#pragma GCC target("avx2")
#define LEVEL avx2
#include "passes.h"
#endif
