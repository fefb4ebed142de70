"""`python -m app.bench.gpu`: prove and time the CUDA path, in one report."""
