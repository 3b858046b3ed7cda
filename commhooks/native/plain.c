/* The passes for any processor. */
#define LEVEL plain
#include "passes.h"
