"""`python -m app.bench.gpu` is `legato bench gpu`."""

import typer

from app.bench.gpu.command import bench_gpu

if __name__ == "__main__":
    typer.run(bench_gpu)
