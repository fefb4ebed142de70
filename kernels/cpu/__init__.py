"""CPU backend: a small C++ library (src/) and its Python wrappers."""
