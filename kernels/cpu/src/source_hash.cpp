// Which sources this library was built from, to tell a stale one from one that fits its callers.
#include "api.h"

LEGATO_API const char* legato_source_hash() { return LEGATO_SOURCE_HASH; }
