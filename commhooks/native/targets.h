/* Whether this compiler and processor can have levels above plain: GCC's pragmas, on x86. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#define HAS_LEVELS 1
#else
#define HAS_LEVELS 0
#endif
