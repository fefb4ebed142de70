// What Python sees: C functions, everything else stays hidden.
#pragma once

#define LEGATO_API extern "C" __attribute__((visibility("default")))
