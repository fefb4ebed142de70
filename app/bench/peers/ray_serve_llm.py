"""Ray Serve LLM on the shape of the benchmarks, for `legato bench compare`.

Runs in the environment of vLLM and Ray Serve LLM, not in Legato's (README beside this file).
Usage: python ray_serve_llm.py MODEL_FOLDER PORT
"""

import signal
import sys
import threading
from pathlib import Path

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app


def main() -> None:
    folder, port = str(Path(sys.argv[1]).resolve()), int(sys.argv[2])
    config = LLMConfig(
        model_loading_config={"model_id": "m", "model_source": folder},
        engine_kwargs={"dtype": "bfloat16", "max_model_len": 4096, "load_format": "dummy"},
        placement_group_config={"bundles": [{"CPU": 1}]},
        deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
        runtime_env={"env_vars": {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "4"}},
        log_engine_metrics=False,
    )
    done = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: done.set())
    ray.init(num_cpus=8)  # bookkeeping: with two, the engine leaves none for the ingress
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_openai_app({"llm_configs": [config]}), blocking=False)
    done.wait()
    serve.shutdown()


main()
