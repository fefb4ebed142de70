"""`legato serve`: one machine, one command, the same Serve config that production deploys."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
import yaml
from rich.console import Console
from rich.status import Status

from app.settings import SettingsError, parse, resolve

DEFAULT_CONFIG = Path("configs/serve/demo.yaml")
_console = Console(stderr=True, highlight=False)

# Before Ray Serve is imported: no Python proxy on a token's path (HAProxy in front, replicas
# answer HTTP themselves), on the replica's own event loop, no usage reports, no dashboard.
ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "app.api.http.ingress.middlewares",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # A replica that answers HTTP itself waits this long for a load balancer to look away.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    # A machine that is busy computing may take its time to start a proxy.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # Ray runs its workers 15 nice levels below everybody else's: tokens would wait for anything.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's own processes talk, and listen, on the loopback address alone.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray's daemons poll for clusters of thousands of nodes; on one machine that is idle heat.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    "EVENT_AGENT_REPORT_INTERVAL_SECONDS": "10",
    "SCAN_EVENT_DIR_INTERVAL_SECONDS": "60",
    "RAY_raylet_check_gc_period_milliseconds": "2000",
    "RAY_object_manager_timer_freq_ms": "1000",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "5000",
    "RAY_kill_idle_workers_interval_ms": "5000",
    "RAY_memory_monitor_refresh_ms": "2000",
    "RAY_metrics_report_interval_ms": "60000",
    "RAY_event_stats": "0",
    "RAY_prestart_worker_first_driver": "0",  # a Python process per CPU that nobody asked for
    "RAY_num_workers_soft_limit": "1",  # nor those that have nothing left to do
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_DEDUP_LOGS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)


def serve(
    target: Annotated[
        Path,
        typer.Argument(help="A Serve config (YAML), or a Hugging Face model folder."),
    ] = DEFAULT_CONFIG,
    host: Annotated[str | None, typer.Option(help="Overrides the config's host.")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Overrides the config's port.")
    ] = None,
) -> None:
    """Serve a model until Ctrl-C."""
    try:
        config = load_config(target)
        address = place(config, host, port)
        for application in config["applications"]:
            resolve(parse(application.get("args") or {}))
        _check_free(*address)
    except SettingsError as error:
        _console.print(f"[red]error:[/] {error}")
        raise typer.Exit(2) from None
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    if config.get("proxy_location") == "Disabled":
        os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
    raise typer.Exit(_run(config))


def place(config: dict[str, Any], host: str | None, port: int | None) -> tuple[str, int]:
    """Set where the config's HTTP answers and return it: the proxies', or a lone replica's own.

    Raises SettingsError where nothing would answer, or `listen` contradicts the rest.
    """
    http = config.setdefault("http_options", {})
    listening = [a["args"] for a in config["applications"] if (a.get("args") or {}).get("listen")]
    if listening:
        _check_alone(config)
        own = parse(listening[0]).listen_address
        http["host"], http["port"] = host or own[0], port or own[1]
        shown = f"[{http['host']}]" if ":" in http["host"] else http["host"]
        listening[0]["listen"] = f"{shown}:{http['port']}"
    elif config.get("proxy_location") == "Disabled":
        raise SettingsError("proxy_location: Disabled leaves no HTTP; set args.listen or HeadOnly")
    else:
        http["host"] = host or http.get("host", "127.0.0.1")
        http["port"] = port or http.get("port", 8000)
    return http["host"], http["port"]


def _check_alone(config: dict[str, Any]) -> None:
    """`listen` is for one replica of one application."""
    deployments = [d for a in config["applications"] for d in a.get("deployments") or []]
    several = any(
        d.get("num_replicas") not in (None, 1) or d.get("autoscaling_config") for d in deployments
    )
    if len(config["applications"]) > 1 or several:
        raise SettingsError(
            "listen: only for one replica; for several, drop it and set proxy_location: HeadOnly"
        )
    if config.get("proxy_location") != "Disabled":
        raise SettingsError("listen: needs proxy_location: Disabled, or a proxy takes the port")


def _check_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except (OSError, OverflowError, TypeError) as error:  # taken, or no such address or port
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(
            f"cannot listen on {host}:{port}: {reason}; choose with --host, --port"
        ) from error


def load_config(target: Path) -> dict[str, Any]:
    """A Serve config from a YAML file, or around a model folder. Raises SettingsError."""
    if target.is_dir():
        config = _read(DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else _packaged_default())
        config["applications"][0]["args"]["model"] = {"path": str(target)}
        return config
    if not target.exists():
        raise SettingsError(f"no config file or model folder {str(target)!r}")
    return _read(target)


def _packaged_default() -> Path:
    return Path(__file__).resolve().parents[2] / DEFAULT_CONFIG


def _read(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not YAML: {error}") from error
    if not isinstance(config, dict) or not config.get("applications"):
        raise SettingsError(f"{path}: needs a list `applications`, as `serve run` reads it")
    return config


def _run(config: dict[str, Any]) -> int:
    # Imported here: Ray takes seconds, and reads its environment at import.
    import ray
    from ray import serve as ray_serve
    from ray.serve._private.api import serve_start
    from ray.serve.schema import ServeDeploySchema

    done = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: done.set())
    http = config["http_options"]
    address = f"http://{http['host']}:{http['port']}"
    begin_s = time.monotonic()
    with _console.status("starting Ray") as status:
        # Ray's CPUs are bookkeeping: enough for the replicas asked for, whatever the machine has.
        ray.init(
            num_cpus=max(os.cpu_count() or 1, 4),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
        _stop_unread_daemons()
        try:
            schema = ServeDeploySchema.model_validate(config)
            client = serve_start(
                http_options=schema.http_options.model_dump(),
                proxy_location=schema.proxy_location,
            )
            client.deploy_apps(schema, _blocking=False)
            problem = _wait(ray_serve, address, status, done)
        except KeyboardInterrupt:
            problem = "interrupted"
    if problem is None and not done.is_set():
        _banner(config, address, time.monotonic() - begin_s)
        done.wait()
    if problem is not None:
        _console.print(f"[red]error:[/] {problem}")
    with _console.status("draining and stopping (Ctrl-C again to stop at once)"):
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        # Serve kills its controller in the middle of a call, and Ray tells the user so.
        ray._private.worker._worker_logs_enabled = False
        ray_serve.shutdown()
        ray.shutdown()
    return 0 if problem is None else 1


def _stop_unread_daemons() -> None:
    """End what Ray starts beside a cluster of one and nobody here reads: the copier of workers'
    logs to a driver that asked for none, the autoscaler's monitor, the usage reporter."""
    from ray._private.worker import global_worker

    node = global_worker.node
    node.kill_log_monitor(check_alive=False)
    node.kill_monitor(check_alive=False)
    node.kill_dashboard(check_alive=False)


def _wait(ray_serve: Any, address: str, status: Status, done: threading.Event) -> str | None:
    """Until every application runs and answers on the public address; else what went wrong."""
    while not done.is_set():
        applications = ray_serve.status().applications
        states = {name: str(a.status.value) for name, a in applications.items()}
        for name, application in applications.items():
            trouble = application.message or ""
            for deployment in application.deployments.values():
                trouble = deployment.message or trouble
            if states[name] in ("DEPLOY_FAILED", "UNHEALTHY") or "Error" in trouble:
                return _cause(trouble)
        status.update("loading " + ", ".join(f"{n}: {s.lower()}" for n, s in states.items()))
        if states and all(s == "RUNNING" for s in states.values()) and _answers(address):
            return None
        done.wait(0.2)
    return "interrupted"


def _answers(address: str) -> bool:
    try:
        response = httpx.get(f"{address}/health", timeout=2.0)
    except httpx.HTTPError:
        return False
    # Until HAProxy knows the replicas, a slower Python proxy answers on its behalf.
    return response.status_code == 200


def _cause(trouble: str) -> str:
    """The last line of a remote traceback is what the user needs to read."""
    lines = [line.strip() for line in trouble.splitlines() if line.strip()]
    telling = [line for line in lines if "Error:" in line or "Failed:" in line]
    return (telling or lines or ["the application failed to start"])[-1]


def _banner(config: dict[str, Any], address: str, seconds: float) -> None:
    settings = parse(config["applications"][0]["args"])
    name = settings.model.name or Path(settings.model.path).resolve().name
    message = {"role": "user", "content": "Hello!"}
    body = json.dumps({"model": name, "messages": [message], "stream": True})
    out = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    ready = f"(ready in {seconds:.0f} s)"
    out.print(f"\n[bold]Legato[/] serves [bold]{name}[/] at [bold]{address}[/]  {ready}")
    out.print(f"  console  {address}/")
    out.print(f"  try      curl -N {address}/v1/chat/completions \\")
    out.print("             -H 'Content-Type: application/json' \\")
    out.print(f"             -d '{body}'", markup=False)
    out.print("  stop     Ctrl-C\n")
    sys.stdout.flush()
