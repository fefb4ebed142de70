"""Where a stage's weights come from: safetensors shards, or a seed (`load_format: dummy`)."""
