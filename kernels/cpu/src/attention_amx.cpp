// The same source on AMX tiles, for pairs of bf16 (attention_tiles.h).
#include "attention_isa.cpp"
