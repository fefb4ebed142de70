"""Sources of a stage's weights: a folder, a GGUF file, or a seed (`load_format: dummy`)."""
