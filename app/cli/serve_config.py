"""Reads a Serve config for `legato serve` and `legato config`, and sets its HTTP address."""

from __future__ import annotations

import errno
import math
import os
import socket
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from actors.engine.config import EngineConfig
from actors.stage.hub_folder import HubError, on_this_node
from actors.transport.shares import MEMORY, remove_unheld, shares_root
from app.api.http.options import at_address, is_host
from app.cli.serve_deployments import check_alone, check_deployments, check_sleep
from app.cli.serve_keys import OURS, prefix_of
from app.cli.serve_shapes import check_shapes
from app.paths import CONFIGS, locate
from app.settings.device import takes_gpus
from app.settings.filled_in import with_objective
from app.settings.model_folder import SettingsError, hub_model, pin_models, read_template
from app.settings.models import engine_groups, entry_of, is_fleet, parse_each, resolve_each
from app.settings.schema import Settings

_OF_A_DEVICE = ("parallel.backend: ", "kv.dtype: ", "model.quantization: ")
_TOPS = ("model", "models", "applications")  # one of them says what is served
_NO_GPU = "torch finds no GPU here; where one will be, write `parallel.device: cuda`"


def load_config(target: Path) -> dict[str, Any]:
    """A Serve config from a YAML file, which may hold `args` alone; for a model folder, a GGUF file
    or a name on the Hugging Face hub the demo's, with default sizes.

    Raises SettingsError naming the file and what is wrong with it.
    """
    found = locate(target)
    is_name = hub_model(str(target)) is not None
    if is_name or found.is_dir():
        return _of_args({"model": {"path": str(target if is_name else found.resolve())}})
    if found.suffix == ".gguf" and found.exists():  # a link is not followed: parts are beside it
        return _of_args({"model": {"path": str(found.absolute())}})
    if not found.exists():
        raise SettingsError(f"no config file, model folder or GGUF file {str(target)!r}")
    return _read(found)


def _of_args(args: dict[str, Any]) -> dict[str, Any]:
    """The demo's config with these `args`, and its address and TBT objective if they name none."""
    config = _read(CONFIGS / "serve/demo.yaml")
    (application,) = config["applications"]
    demo = application["args"]
    own = with_objective(args, demo["slo"]["tbt_ms"])
    application["args"] = {"listen": demo["listen"], **own}
    return config


class _Loader(yaml.SafeLoader):
    """Refuses what YAML forbids and its base takes: of a key given twice, the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    message = f"{key.value!r} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # not text
        raise SettingsError(f"{path} is not YAML: {error}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not YAML: {error}") from error
    if (
        isinstance(config, dict)
        and "applications" not in config
        and ("model" in config or "models" in config)
    ):
        return _of_args(config)
    applications = config.get("applications") if isinstance(config, dict) else None
    if not isinstance(applications, list) or not applications:
        for key in config if isinstance(config, dict) else ():
            if key not in _TOPS and (close := get_close_matches(str(key), _TOPS, n=1)):
                raise SettingsError(f"{path}: {key}: unknown key; did you mean {close[0]!r}?")
        raise SettingsError(
            f"{path}: needs a list `applications`, as `serve run` reads it, or the settings of one "
            "application, `model` among them; `legato config show` prints a whole config"
        )
    try:
        check_shapes(config)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from error
    for application in applications:
        if not application.get("import_path"):
            raise SettingsError(f"{path}: an application lacks `import_path: app.main:build_app`")
    return config


def check_models(config: dict[str, Any], whole: bool = False) -> list[EngineConfig]:
    """Check the settings of every model, and set the commits of those from the Hugging Face hub.

    whole: what is in the folders too, which takes seconds. Returns the settings of each, resolved.
    Raises SettingsError.
    """
    found = []
    for application in config["applications"]:
        args = application.get("args") or {}
        of_each = resolve_each(args)  # its errors name the model
        for number, (settings, resolved) in enumerate(zip(parse_each(args), of_each, strict=True)):
            try:
                _check_files(settings, resolved, whole)
            except ValueError as error:
                raise SettingsError(f"{entry_of(args, number)}{error}") from error
        if application.get("import_path") == OURS:
            check_deployments(application.get("deployments") or [], args, of_each)
        application["args"] = pin_models(args)
        found += of_each
    return found


def _check_files(settings: Settings, resolved: EngineConfig, whole: bool) -> None:
    """Raises ValueError naming the setting whose files would not do."""
    from actors.stage.folder_check import check_description, check_whole

    paths = {} if settings.adapters is None else settings.adapters.paths
    adapters = [(name, locate(path)) for name, path in paths.items()]
    for name, folder in adapters:
        if not folder.is_dir():
            raise SettingsError(f"adapters.paths.{name}: no folder {str(folder)!r}")
    read_template(settings.model.chat_template)
    batches = None if settings.batches is None else settings.batches.directory
    _check_writable("batches.directory", batches and str(Path(batches).expanduser()))
    _check_writable("telemetry.directory", settings.telemetry.directory)
    check_description(resolved.stage)
    if (spans_to := settings.telemetry.spans_to) is not None:
        from app.telemetry.spans import otlp_exporter

        try:
            otlp_exporter(spans_to).shutdown()
        except ImportError as error:
            raise SettingsError(str(error)) from error
    if whole:
        import torch

        from app.text.processor import load_tokenizer

        device = settings.parallel.device
        on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
        try:
            check_whole(resolved.stage, adapters, on_cpu=on_cpu)
        except ValueError as error:
            if device == "auto" and str(error).startswith(_OF_A_DEVICE):
                raise SettingsError(f"{error} ({_NO_GPU})") from error
            raise
        load_tokenizer(resolved.stage.model_path)


def _check_writable(key: str, directory: str | None) -> None:
    """Raises SettingsError for a folder that neither is here nor can be made."""
    if directory is None:
        return
    above = Path(directory).absolute()
    while not above.exists() and not above.is_symlink():
        above = above.parent
    if not above.is_dir():
        raise SettingsError(f"{key}: {above} is not a folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise SettingsError(f"{key}: {directory} cannot be made, as {above} is not writable")


def download_models(config: dict[str, Any]) -> None:
    """Download the weights that the config takes from the Hugging Face hub. Raises
    SettingsError."""
    for application in config["applications"]:
        for resolved in resolve_each(application["args"]):
            try:
                on_this_node(resolved.stage)
            except HubError as error:
                raise SettingsError(str(error)) from error


def set_address(config: dict[str, Any], host: str | None, port: int | None) -> tuple[str, int]:
    """Set and return the config's HTTP address: the proxies', or a lone replica's own.

    Raises SettingsError if nothing would answer, or `listen` contradicts the rest.
    """
    if host is not None and not is_host(host := host.removeprefix("[").removesuffix("]")):
        raise SettingsError(
            f"--host: {host!r} is not a host: write a name or an address, without http:// and "
            "without a port, which is --port"
        )
    http = config["http_options"] = dict(config.get("http_options") or {})
    listening = [a["args"] for a in config["applications"] if (a.get("args") or {}).get("listen")]
    check_sleep(config)
    if listening:
        check_alone(config)
        own = parse_each(listening[0])[0].listen_address
        for key, value in zip(("host", "port"), own, strict=True):
            if http.get(key, value) != value:
                raise SettingsError(
                    f"http_options.{key}: {http[key]!r} contradicts listen: leave it out"
                )
        http["host"], http["port"] = host or own[0], port or own[1]
        shown = f"[{http['host']}]" if ":" in http["host"] else http["host"]
        listening[0]["listen"] = f"{shown}:{http['port']}"
    elif config.get("proxy_location") == "Disabled":
        raise SettingsError("proxy_location: Disabled leaves no HTTP; set args.listen or HeadOnly")
    elif all(prefix_of(application) is None for application in config["applications"]):
        raise SettingsError("route_prefix: null leaves no HTTP; leave it out, or set it to /")
    else:
        http["host"] = host or http.get("host", "127.0.0.1")
        http["port"] = port or http.get("port", 8000)
    for application in config["applications"]:
        args = application["args"] = dict(application.get("args") or {})
        options = at_address(parse_each(args)[0].api, http["host"])
        if options.allowed_hosts:
            api = {**(args.get("api") or {}), "allowed_hosts": list(options.allowed_hosts)}
            args["api"] = api
    return http["host"], http["port"]


def check_free(host: str, port: int) -> None:
    """Raises SettingsError if nothing can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except (OSError, OverflowError, TypeError) as error:  # taken, or no such address or port
        is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        # `create_server` adds the address to strerror.
        reason = "address already in use" if is_taken else getattr(error, "strerror", 0) or error
        raise SettingsError(
            f"cannot listen on {host}:{port}: {reason}; choose with --host, --port"
        ) from error


def num_cpus_of(config: dict[str, Any]) -> int:
    """CPUs that all replicas of this config reserve, during an update beside the old ones."""
    from actors.executor.placement import REPLICA_CPUS, bundles  # here: it imports Ray

    total = 0.0
    for application in config["applications"]:
        args = application.get("args") or {}
        models = _models_of(args)
        counts = dict.fromkeys([*models, "Front"] if is_fleet(args) else models, 1)
        for deployment in application.get("deployments") or []:
            scaled = deployment.get("autoscaling_config") or {}
            most = scaled.get("max_replicas") or deployment.get("num_replicas") or 1
            counts[deployment["name"]] = 1 if most == "auto" else most
        total += counts.pop("Front", 0) * REPLICA_CPUS
        each = resolve_each(args)
        for name, model in models.items():
            resolved, stage = each[model], each[model].stage
            groups = bundles(stage.num_stages, stage.tensor_ranks, resolved.cpus_per_rank, 0.0)
            total += counts[name] * sum(bundle["CPU"] for bundle in groups)
    return math.ceil(2 * total)


def _models_of(args: dict[str, Any]) -> dict[str, int]:
    """The deployments of engines, and the number of the model of each."""
    models = {group.deployment: group.model for group in engine_groups(args)}
    return models if is_fleet(args) else {"LLMServer": 0}


def check_gpus(config: dict[str, Any], found: float) -> None:
    """Raises SettingsError if replicas that the config starts with would wait for ever for a GPU.

    found: GPUs of this machine, which `parallel.device: auto` takes."""
    total = 0.0
    for application in config["applications"]:
        args = application.get("args") or {}
        counts = dict[str, int]()
        for deployment in application.get("deployments") or []:
            scaled = deployment.get("autoscaling_config") or {}
            least = scaled.get("min_replicas", 1) if scaled else deployment.get("num_replicas") or 1
            counts[deployment["name"]] = 1 if least == "auto" else least
        each = parse_each(args)
        for name, model in _models_of(args).items():
            parallel = each[model].parallel
            if takes_gpus(parallel.device, found):
                per_rank = 1.0 if parallel.gpus_per_rank is None else parallel.gpus_per_rank
                ranks = parallel.pipeline_stages * parallel.tensor_ranks
                total += counts.get(name, 1) * ranks * per_rank
            elif parallel.gpus_per_rank:
                raise SettingsError(
                    f"{entry_of(args, model)}parallel.gpus_per_rank: here engines compute on the "
                    "CPU, as Ray or torch finds no GPU: leave it out, or set parallel.device: cuda"
                )
    if total > found:
        raise SettingsError(
            f"the engines need {total:g} GPU{'' if total == 1 else 's'} and this machine has "
            f"{found:g}: set parallel.device: cpu, or fewer stages, ranks or replicas"
        )


def remove_shares(config: dict[str, Any]) -> None:
    """Delete the KV that engines of this config shared, and that those which were killed left."""
    folders = {MEMORY}  # where engines of an earlier config may have had theirs
    for application in config["applications"]:
        for settings in parse_each(application.get("args") or {}):
            if settings.kv.shared_cache_path is not None:
                folders.add(Path(settings.kv.shared_cache_path).expanduser().absolute())
    for folder in folders:
        remove_unheld(shares_root(folder))
