"""Where a stage's weights come from: a folder, a GGUF file, or a seed (`load_format: dummy`)."""
