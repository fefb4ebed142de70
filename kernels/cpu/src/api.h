// The exported C functions, called through ctypes; all other symbols are hidden.
#pragma once

#define LEGATO_API extern "C" __attribute__((visibility("default")))
