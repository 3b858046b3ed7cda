/* The passes for processors with AVX-512, in vectors of 512 bits. */
#include "targets.h"
#if HAS_LEVELS
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define LEVEL avx512
#include "passes.h"
#endif
