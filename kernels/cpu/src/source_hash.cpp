// What this library was built from and for: the loader refuses a stale build.
#include "api.h"

// The hash of the sources, and the instruction sets, apart by spaces.
LEGATO_API const char* legato_built() { return LEGATO_BUILT; }
