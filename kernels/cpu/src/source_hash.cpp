// Hash of the sources this library was built from: the loader refuses a stale build.
#include "api.h"

LEGATO_API const char* legato_source_hash() { return LEGATO_SOURCE_HASH; }
