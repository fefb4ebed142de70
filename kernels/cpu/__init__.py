"""CPU backend: a small C++ library (src/), its Python wrappers, and references in plain torch."""
