"""What Kubernetes is given, as far as it can be held without one: Serve's schema, the settings,
what images hold, and times that leave room for draining."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema

from actors.executor.placement import bundles
from app.settings.models import resolve_each

DEPLOY = Path(__file__).resolve().parents[2] / "configs/deploy"
DOCUMENTS = list(yaml.safe_load_all((DEPLOY / "rayservice.yaml").read_text("utf-8")))
SERVICE = DOCUMENTS[0]["spec"]
CLUSTER = SERVICE["rayClusterConfig"]
GROUPS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]
SERVE = yaml.safe_load(SERVICE["serveConfigV2"])
DEPLOYMENTS = {d["name"]: d for d in SERVE["applications"][0]["deployments"]}
# Of python:3.12-slim, and what installing Legato adds.
IN_THE_IMAGE = {"sh", "bash", "python", "pip", "ray", "legato"}


def containers() -> Iterator[dict[str, Any]]:
    for group in GROUPS:
        yield from group["template"]["spec"]["containers"]


def test_serve_and_the_settings_take_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGATO_API_KEY", "a-key-of-more-than-a-few-letters")
    ServeDeploySchema.model_validate(SERVE)
    resolve_each(SERVE["applications"][0]["args"])


def test_the_cluster_runs_the_ray_that_is_installed() -> None:
    assert CLUSTER["rayVersion"].rpartition(".")[0] == ray.__version__.rpartition(".")[0]
    assert CLUSTER["authOptions"] == {"mode": "token"}
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["dashboard-host"] == "0.0.0.0"


def test_probes_and_hooks_need_nothing_that_the_image_lacks() -> None:
    for container in containers():
        # Absent ones are filled in by the operator, with wget.
        assert set(container["livenessProbe"]) & {"httpGet"}
        assert set(container["readinessProbe"]) & {"httpGet"}
        for hook in container.get("lifecycle", {}).values():
            program, *arguments = hook["exec"]["command"]
            assert program in IN_THE_IMAGE
            if arguments[0] == "-m":
                assert importlib.util.find_spec(arguments[1]) is not None


def test_images_install_only_with_what_they_have() -> None:
    for name in ("Dockerfile.cpu", "Dockerfile.cuda"):
        text = (DEPLOY / name).read_text("utf-8")
        assert re.search(r"^USER (?!root)\w+", text, re.MULTILINE), f"{name} runs as root"
        for line in re.findall(r"^RUN (.*)", text, re.MULTILINE):
            for command in re.split(r"&&|\|\|", line):
                assert command.split()[0] in IN_THE_IMAGE | {
                    "apt-get", "mkdir", "rm", "test", "useradd",
                }  # fmt: skip
        # A volume at a path that the image lacks is root's.
        assert re.search(r"^USER legato$.*^RUN mkdir (/home/legato/)?\.cache$", text, re.M | re.S)


def test_images_are_built_from_sources_alone() -> None:
    """`COPY . .` would bring a library built for another system, environments and history."""
    lines = (DEPLOY.parents[1] / ".dockerignore").read_text("utf-8").splitlines()
    patterns = [line for line in lines if not line.startswith("#")]
    first, *rest = patterns
    assert first == "*"
    let_in = {line[1:] for line in rest if line.startswith("!")}
    project = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "constraints.txt"}
    assert let_in == {"app", "actors", "kernels", "configs"} | project
    assert rest[len(let_in) :] == ["**/__pycache__", "**/*.so"]  # after, to leave out again


def test_the_image_for_gpus_installs_into_the_python_of_ubuntu() -> None:
    """That of pytorch/pytorch since 2.10: marked as managed by apt, with a user 1000 in it."""
    text = (DEPLOY / "Dockerfile.cuda").read_text("utf-8")
    before_pip = text[: text.index("RUN pip install")]
    assert "ENV PIP_BREAK_SYSTEM_PACKAGES=1" in before_pip
    assert re.search(r"^RUN useradd .*--non-unique --uid 1000", text, re.MULTILINE)


def test_a_pod_may_drain_before_it_is_killed() -> None:
    for group in CLUSTER["workerGroupSpecs"]:
        spec = group["template"]["spec"]
        (hook,) = [c["lifecycle"]["preStop"]["exec"]["command"] for c in spec["containers"]]
        drain_s = float(hook[-1])
        assert spec["terminationGracePeriodSeconds"] > drain_s
        assert all(d["graceful_shutdown_timeout_s"] <= drain_s for d in DEPLOYMENTS.values())


def test_every_front_has_a_pod_and_the_service_finds_it() -> None:
    fronts, engines = CLUSTER["workerGroupSpecs"]
    (wanted,) = DEPLOYMENTS["Front"]["ray_actor_options"]["resources"].items()
    assert f'"{wanted[0]}\\": {wanted[1]}'.replace('"', '\\"', 1) in str(
        fronts["rayStartParams"]["resources"]
    )
    assert DEPLOYMENTS["Front"]["num_replicas"] <= fronts["replicas"]
    assert DEPLOYMENTS["Engine"]["autoscaling_config"]["max_replicas"] <= engines["maxReplicas"]
    service = next(d for d in DOCUMENTS if d["kind"] == "Service")
    labels = fronts["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    listens = int(SERVE["applications"][0]["args"]["listen"].rpartition(":")[2])
    assert service["spec"]["ports"][0]["targetPort"] == listens
    (container,) = fronts["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": listens}


def test_an_engine_fills_a_pod_and_fits_beside_no_front() -> None:
    """Two of them in one pod would compute on the same cores, and no pod would be added."""
    (engine,) = resolve_each(SERVE["applications"][0]["args"])
    stages, ranks = engine.stage.num_stages, engine.stage.tensor_ranks
    reserved = sum(b["CPU"] for b in bundles(stages, ranks, engine.cpus_per_rank, 0.0))
    fronts, engines = (
        float(group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
        for group in CLUSTER["workerGroupSpecs"]
    )
    assert fronts < reserved <= engines < 2 * reserved
