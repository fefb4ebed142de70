"""What a Serve config asks of the cluster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.transport.shares import make_private, shares_root
from app.cli.serve_config import (
    check_gpus,
    check_models,
    load_config,
    num_cpus_of,
    remove_shares,
    set_address,
)
from app.cli.serve_keys import OURS, health_paths
from app.settings import device
from app.settings.model_folder import SettingsError
from app.settings.models import parse_each
from tests.actors.stage.greedy_reference import skip_unless_available

pytestmark = pytest.mark.ray  # counting the CPUs of a deployment imports Ray


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("demo", 2 * 1.0),  # half a CPU for the replica, half for its stage; old beside new
        ("two_stages", 2 * 1.5),
        ("two_replicas", 2 * (0.5 + 2 * 1.0)),
        ("split", 2 * (0.5 + 2 * 1.0)),
        ("autoscaled", 2 * (0.5 + 3 * 1.0)),
    ],
)
def test_there_is_room_for_the_new_beside_the_old(name: str, most: float) -> None:
    assert num_cpus_of(load_config(Path(f"configs/serve/{name}.yaml"))) == most


def test_a_file_of_args_alone_is_one_application(tmp_path: Path) -> None:
    path = tmp_path / "flat.yaml"
    demo = load_config(Path("configs/serve/demo.yaml"))
    args = dict(demo["applications"][0]["args"])
    path.write_text(yaml.safe_dump(args))
    assert load_config(path) == demo
    address = args.pop("listen")
    path.write_text(yaml.safe_dump(args))
    assert load_config(path) == demo
    path.write_text(yaml.safe_dump({**args, "listen": "127.0.0.1:9000", "http_options": {}}))
    config = load_config(path)
    assert address not in str(config)
    with pytest.raises(SettingsError, match=r"^http_options: unknown setting"):
        set_address(config, None, None)


@pytest.mark.parametrize(
    ("slo", "found"),
    [
        (None, [100, None]),
        ({"ttft_ms": 500}, [100, 500]),
        ({"tbt_ms": 50}, [50, None]),
        ({"tbt_ms": None}, [None, None]),
        ("relaxed", [None, None]),
    ],
)
def test_settings_alone_have_the_objective_that_their_model_has(
    slo: Any, found: list[float | None], tmp_path: Path
) -> None:
    model = "configs/models/demo"
    args: dict[str, Any] = {"model": {"path": model}, **({} if slo is None else {"slo": slo})}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(args))
    (settings,) = parse_each(load_config(path)["applications"][0]["args"])
    assert [getattr(settings.slo, name) for name in ("tbt_ms", "ttft_ms")] == found
    if slo is None:
        args["model"]["path"] = str(Path(model).resolve())
        path.write_text(yaml.safe_dump(args))
        assert load_config(path) == load_config(Path(model))
    path.write_text(yaml.safe_dump({"applications": [{"import_path": OURS, "args": args}]}))
    assert load_config(path)["applications"][0]["args"] == args  # a whole config stays as it is


@pytest.mark.parametrize(
    ("name", "needed"),
    [("demo", 1), ("two_stages", 2), ("tp2", 2), ("two_models", 2), ("split", 2)],
)
def test_engines_that_would_wait_for_a_gpu_are_refused(
    name: str, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(Path(f"configs/serve/{name}.yaml"))
    check_gpus(config, 0.0)  # by themselves they take the CPU
    monkeypatch.setattr(device, "cuda_of_torch", lambda: None)
    check_gpus(config, 1.0)  # and where torch cannot use what there is
    monkeypatch.setattr(device, "cuda_of_torch", lambda: "13.0")
    check_gpus(config, needed)
    if needed > 1:
        with pytest.raises(SettingsError, match=f"need {needed} GPUs and this machine has 1"):
            check_gpus(config, 1.0)
    for args in [application["args"] for application in config["applications"]]:
        args["parallel"] = {**args.get("parallel", {}), "device": "cuda"}
    with pytest.raises(SettingsError, match="this machine has 0"):
        check_gpus(config, 0.0)


def test_ranks_on_the_cpu_wait_for_no_gpu(tmp_path: Path) -> None:
    def parallel(device: str, gpus_per_rank: int) -> dict[str, Any]:
        return _config(tmp_path, {"parallel": {"device": device, "gpus_per_rank": gpus_per_rank}})

    check_models(parallel("auto", 1))
    with pytest.raises(SettingsError, match=r"^parallel\.gpus_per_rank: .* finds no GPU"):
        check_gpus(parallel("auto", 1), 0.0)
    with pytest.raises(SettingsError, match=r"^parallel\.gpus_per_rank: .* .parallel\.device: cpu"):
        check_models(parallel("cpu", 1))
    check_models(parallel("cpu", 0))


def test_replicas_that_come_later_need_no_gpu_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cuda_of_torch", lambda: "13.0")
    config = load_config(Path("configs/serve/autoscaled.yaml"))
    check_gpus(config, 1.0)
    config["applications"][0]["deployments"][0].pop("autoscaling_config")
    config["applications"][0]["deployments"][0]["num_replicas"] = 3
    with pytest.raises(SettingsError, match="need 3 GPUs"):
        check_gpus(config, 1.0)


@pytest.mark.parametrize(
    ("sleeps", "least", "said"),
    [(True, 1, "fleet.sleeps: needs"), (False, 0, "needs fleet.sleeps: true")],
)
def test_a_fleet_that_sleeps_is_one_that_wakes(sleeps: bool, least: int, said: str) -> None:
    config = load_config(Path("configs/serve/autoscaled.yaml"))
    application = config["applications"][0]
    application["args"]["fleet"]["sleeps"] = sleeps
    application["deployments"][0]["autoscaling_config"]["min_replicas"] = least
    with pytest.raises(SettingsError, match=said):
        set_address(config, None, None)
    application["args"]["fleet"]["sleeps"] = not sleeps
    set_address(config, None, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"route_prefix": "/chat"}, "route_prefix: /chat has no effect with listen"),
        ({"route_prefix": None}, "route_prefix: null has no effect with listen"),
        ({"host": "0.0.0.0"}, "http_options.host: '0.0.0.0' contradicts listen"),
        ({"port": 9000}, "http_options.port: 9000 contradicts listen"),
    ],
)
def test_what_a_replica_that_listens_would_not_heed_is_refused(
    changes: dict[str, Any], said: str
) -> None:
    config = load_config(Path("configs/serve/demo.yaml"))
    config["http_options"] = {"host": "127.0.0.1", "port": 8000}
    set_address(config, None, 8100)  # as given to the command, it may differ
    config = load_config(Path("configs/serve/demo.yaml"))
    if "route_prefix" in changes:
        config["applications"][0].update(changes)
    else:
        config["http_options"] = changes
    with pytest.raises(SettingsError, match=f"^{said}"):
        set_address(config, None, None)


def test_a_host_is_taken_with_brackets_and_named_by_its_option_where_it_is_none() -> None:
    config = load_config(Path("configs/serve/demo.yaml"))
    assert set_address(config, "[::1]", None) == ("::1", 8000)
    assert config["applications"][0]["args"]["listen"] == "[::1]:8000"
    for wrong in ("http://0.0.0.0", "0.0.0.0:80", ""):
        with pytest.raises(SettingsError, match=r"^--host: .* is not a host"):
            set_address(config, wrong, None)


def test_behind_a_proxy_each_application_is_asked_where_it_answers() -> None:
    def application(import_path: str, **prefix: str | None) -> dict[str, Any]:
        return {"import_path": import_path, "args": {"model": {"path": "none"}}, **prefix}

    ours = "app.main:build_app"
    mine = [application("mine:app", route_prefix="/mine"), application("mine:app")]
    chat = [application(ours, route_prefix="/chat"), application(ours, route_prefix=None)]
    config = {"applications": [*mine, *chat]}
    assert health_paths(config) == ["/health", "/chat/health"]
    assert set_address(config, None, None) == ("127.0.0.1", 8000)
    with pytest.raises(SettingsError, match=r"^route_prefix: null leaves no HTTP"):
        set_address({"applications": chat[1:]}, None, None)


def test_shares_of_killed_engines_are_removed_where_the_config_has_them(tmp_path: Path) -> None:
    config = load_config(Path("configs/serve/split.yaml"))
    config["applications"][0]["args"]["kv"]["shared_cache_path"] = str(tmp_path)
    root = shares_root(tmp_path)
    make_private(root)
    share = root / "model" / "stage-0-rank-0" / "0"
    share.mkdir(parents=True)
    for name in ("lock", "00.kv"):
        (share / name).touch()
    remove_shares(config)
    assert list(root.iterdir()) == []


def _config(tmp_path: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """The demo's, with these sections changed. Names in the place of folders are below tmp_path."""
    config = load_config(Path("configs/serve/demo.yaml"))
    args = config["applications"][0]["args"]
    text = yaml.safe_dump(changes).replace("HERE", str(tmp_path))
    for section, values in yaml.safe_load(text).items():
        args[section] = {**args.get(section, {}), **values}
    return config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"tensor_ranks": 3}}, "parallel.tensor_ranks: 8 attention heads cannot be"),
        ({"model": {"path": "HERE/empty"}}, "model.path: .*architecture .none named. is not supp"),
        ({"model": {"path": "HERE/other"}}, "model.path: .*architecture Other is not supported"),
        ({"speculation": {"model": "HERE/draft"}}, "speculation.model: .*architecture Other is no"),
        ({"adapters": {"max_adapters": 1, "paths": {"a": "HERE/no"}}}, "adapters.paths.a: no fold"),
        ({"telemetry": {"directory": "HERE/file/logs"}}, "telemetry.directory: .*file is not a f"),
        ({"batches": {"directory": "HERE/file"}}, "batches.directory: .*file is not a folder"),
    ],
)
def test_what_no_engine_could_start_with_is_refused_before_any_starts(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "file").touch()
    demo = json.loads(Path("configs/models/demo/config.json").read_text())
    other = {"architectures": ["Other"]}
    written = {"empty": {}, "other": other, "draft": demo | other}
    for name, content in written.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    with pytest.raises(SettingsError, match=f"^{message}"):
        check_models(_config(tmp_path, changes))


def test_what_takes_seconds_to_check_is_left_to_config_check(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(Path("configs/models/demo/config.json").read_text())
    without_weights = {"model": {"path": "HERE"}}
    check_models(_config(tmp_path, without_weights))
    with pytest.raises(SettingsError, match=r"^model.path: .* holds no \*.safetensors weights"):
        check_models(_config(tmp_path, without_weights), whole=True)
    drafts = {"speculation": {"model": "HERE"}}
    check_models(_config(tmp_path, drafts))
    with pytest.raises(SettingsError, match=r"^speculation.model: .* holds no \*.safetensors"):
        check_models(_config(tmp_path, drafts), whole=True)
    adapters = {"adapters": {"max_adapters": 1, "paths": {"a": "HERE"}}}
    with pytest.raises(SettingsError, match=r"^adapters.paths.a: .*adapter_config.json is missing"):
        check_models(_config(tmp_path, adapters), whole=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"backend": "triton"}}, "parallel.backend: backend 'triton' runs on cuda"),
        ({"parallel": {"backend": "flash_attn"}}, "parallel.backend: backend 'flash_attn' runs on"),
        ({"model": {"quantization": "fp8"}}, "model.quantization: backend '.*' has no 'fp8'"),
        ({"kv": {"dtype": "fp8"}}, "kv.dtype: "),
    ],
)
def test_what_no_cpu_computes_is_refused_where_the_ranks_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    on = {key: {**changes.get("parallel", {}), "device": key} for key in ("cpu", "cuda")}
    check_models(_config(tmp_path, {**changes, "parallel": on["cuda"]}), whole=True)
    with pytest.raises(SettingsError, match=f"^{message}"):
        check_models(_config(tmp_path, {**changes, "parallel": on["cpu"]}), whole=True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SettingsError, match=rf"^{message}.*\(torch finds no GPU here; where one"):
        check_models(_config(tmp_path, changes), whole=True)


def test_a_draft_model_that_no_backend_computes_is_refused(tmp_path: Path) -> None:
    """As the served model, whose heads have kernels, would be."""
    skip_unless_available("cpu")
    demo = json.loads(Path("configs/models/demo/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(demo | {"head_dim": 20}))
    on_cpu = {"backend": "cpu", "device": "cpu"}
    changes = {"speculation": {"model": "HERE"}, "parallel": on_cpu}
    check_models(_config(tmp_path, changes))
    problem = r"speculation\.model: parallel\.backend: backend 'cpu' is not available: head_dim"
    with pytest.raises(SettingsError, match=f"^{problem}"):
        check_models(_config(tmp_path, changes), whole=True)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    shutil.copytree("configs/models/demo", tmp_path / "model")
    (tmp_path / "model/tokenizer.json").unlink()
    with pytest.raises(SettingsError, match=r"^model\.path: .* holds no tokenizer\.json"):
        check_models(_config(tmp_path, {"model": {"path": "HERE/model"}}), whole=True)


def test_spans_that_nothing_exports_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(SettingsError, match=r"^telemetry\.spans_to: needs the package"):
        check_models(_config(tmp_path, {"telemetry": {"spans_to": "http://127.0.0.1:4318"}}))


def test_adapters_of_an_entry_are_checked_there(tmp_path: Path) -> None:
    model = {"path": "configs/models/demo"}
    slots = {"max_adapters": 1, "paths": {"x": str(tmp_path)}}
    models = [{"model": {**model, "name": "a"}}, {"model": model, "adapters": slots}]
    config = {"applications": [{"args": {"models": models}}]}
    assert [resolved.stage.max_adapters for resolved in check_models(config)] == [0, 1]
    with pytest.raises(SettingsError, match=r"^models.1: adapters.paths.x: .*adapter_config.json"):
        check_models(config, whole=True)
    slots["paths"] = {"x": str(tmp_path / "none")}
    with pytest.raises(SettingsError, match=r"^models.1: adapters.paths.x: no folder"):
        check_models(config)


def test_folders_that_can_be_made_are_not_made_yet(tmp_path: Path) -> None:
    check_models(_config(tmp_path, {"telemetry": {"directory": "HERE/a/b"}}))
    assert list(tmp_path.iterdir()) == []


def test_files_are_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("caf\u00e9 {{ messages }}", encoding="utf-8")
    model = {"path": "configs/models/demo", "chat_template": f"{tmp_path}/chat.jinja"}
    keys: dict[str, Any] = {"caf\u00e9": {}}
    path = tmp_path / "flat.yaml"
    content = yaml.safe_dump({"model": model, "api": {"api_keys": keys}}, allow_unicode=True)
    path.write_text(content, encoding="utf-8")
    program = (
        "import sys\nfrom pathlib import Path\nfrom app.cli import serve_config as config\n"
        "found = config.load_config(Path(sys.argv[1]))\nconfig.check_models(found)\n"
        "print(ascii([*found['applications'][0]['args']['api']['api_keys']]))"
    )
    own = {key: value for key, value in os.environ.items() if not key.startswith("LC_")}
    ran = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", program, str(path)],
        env={**own, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        text=True,
    )
    assert ran.stdout == "['caf\\xe9']\n", ran.stderr


def test_a_start_does_not_wait_for_torch() -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom app.cli import serve\n"
        "serve.check_models(serve.load_config(Path('configs/serve/demo.yaml')))\n"
        "print({'torch', 'ray', 'transformers'} & {*sys.modules})"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "set()\n", ran.stderr
