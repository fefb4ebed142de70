"""`legato serve`: one machine, one command, the same Serve config that production deploys."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any, NoReturn

import httpx
import psutil
import typer
from rich.status import Status

from actors.transport import semaphores
from app.api.http.keys import ApiKeyError, read_digests
from app.cli.banner import show_banner
from app.cli.forked_workers import ForkServer
from app.cli.local_ray import NUM_FIRST_WORKERS, start_ray
from app.cli.serve_config import (
    check_free,
    check_gpus,
    check_models,
    download_models,
    load_config,
    num_cpus_of,
    remove_shares,
    set_address,
)
from app.cli.serve_deploy import deploy, deploy_again
from app.cli.serve_keys import first_of_ours, health_paths, prefix_of
from app.cli.start_failure import cause_of
from app.paths import DEMO_CONFIG
from app.ray_environment import DRAIN_S, set_environment
from app.settings.model_folder import SettingsError
from app.terminal import FAILED, WRONG_USAGE, console, fail, print_error

_STATUS_PERIOD_S = 1.0
_AFTER_DRAIN_S, _DIE_WITHIN_S = 30.0, 3.0  # of processes, after their streams and once killed


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)


def serve(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="[TARGET]",
            help="A Serve config or settings (YAML), a Hugging Face model folder, a GGUF file, or "
            "a name on the hub: org/name, org/name@revision, org/name/file.gguf.",
        ),
    ] = DEMO_CONFIG,
    host: Annotated[str | None, typer.Option(help="Overrides the config's host.")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Overrides the config's port.")
    ] = None,
) -> None:
    """Serve a model until Ctrl-C: the demo model, any config, any model folder or name.

    A model, or a file of settings alone, gets the demo's address and TBT objective where it names
    none, and defaults otherwise. A path that begins with configs/ and does not exist here is taken
    from Legato's own. On SIGUSR1 the config is read again and deployed beside the running one.

    Other servers' flags are settings here (`legato config reference` has a table): a YAML file with
    model: {path: MODEL, max_model_len: 8192} is served in the place of MODEL.
    """

    # Until there is something to reload, for which its sender will not have waited. As no process
    # that is started from here inherits a handler, it ignores nothing in them.
    signal.signal(signal.SIGUSR1, lambda *_: None)

    def read() -> dict[str, Any]:
        config = load_config(target)
        set_address(config, host, port)
        check_models(config)
        for application in config["applications"]:  # before a model is downloaded and loaded
            keys = ((application.get("args") or {}).get("api") or {}).get("api_keys") or ()
            read_digests(keys)
        return config

    try:
        config = read()
        check_free(config["http_options"]["host"], config["http_options"]["port"])
        download_models(config)  # here, where it can be seen and ended by Ctrl-C
    except (SettingsError, ApiKeyError) as error:
        fail(error, code=WRONG_USAGE)
    set_environment(haproxy=config.get("proxy_location") != "Disabled")
    forks = ForkServer() if ForkServer.is_useful() else None
    raise typer.Exit(_run(config, read, forks))


def _run(
    config: dict[str, Any], read: Callable[[], dict[str, Any]], forks: ForkServer | None
) -> int:
    done, is_ending = threading.Event(), threading.Event()
    asked: SimpleQueue[bool] = SimpleQueue()  # one entry per signal: whether to continue

    def stop(*_: object) -> None:
        done.set()
        asked.put(False)

    def stop_at_once(*_: object) -> NoReturn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        is_ending.set()
        _stop_at_once(config)

    _end_by(stop)
    signal.signal(signal.SIGUSR1, lambda *_: asked.put(True))
    address = _url(config["http_options"])
    client, code = None, FAILED
    ends_s = [_age_s()]
    import ray  # here, because its import takes a second and reads the environment

    with console.status("starting Ray") as status:
        # Ray's CPUs are bookkeeping: enough for the requested replicas on any machine.
        num_cpus = max(os.cpu_count() or 1, NUM_FIRST_WORKERS, num_cpus_of(config))
        raylet, logs = start_ray(num_cpus, forks)
        guards = list[subprocess.Popen[bytes]]()
        watch = (raylet, logs, is_ending, guards, config)
        threading.Thread(target=_end_with_ray, args=watch, daemon=True).start()
        ends_s.append(_age_s())
        signal.signal(signal.SIGTERM, stop)  # replaces Ray's handler, which exits at once
        try:
            check_gpus(config, ray.cluster_resources().get("GPU", 0.0))
            if not done.is_set():
                client = deploy(config)
            problem = _wait(address, health_paths(config), status, done, ends_s)
        except SettingsError as error:
            problem, code = str(error), WRONG_USAGE
        except KeyboardInterrupt:
            problem = "interrupted"
    guards.append(guard := _guard(ray.get_runtime_context().get_session_name()))
    if problem is None and not done.is_set():
        shown = first_of_ours(config["applications"])
        show_banner(shown["args"], address + (prefix_of(shown) or ""), ends_s)
        while asked.get():
            config = deploy_again(client, config, read, num_cpus)
    if problem is not None:
        print_error(problem)
    stopping = "draining and stopping (Ctrl-C again to stop at once)"
    if problem is None and not console.is_terminal:  # a log, where a spinner shows nothing
        console.print(stopping)
    with console.status(stopping):
        signal.signal(signal.SIGINT, stop_at_once)
        # Serve kills its controller during a call; this hides Ray's log of it.
        ray._private.worker._worker_logs_enabled = False
        try:
            if client is not None:  # `serve.shutdown` would always wait 30 s
                promised_s = _drain_s(config) if problem is None else 0.0
                client.shutdown(timeout_s=promised_s + _AFTER_DRAIN_S)
        finally:
            is_ending.set()
        ray.shutdown()
        if forks is not None:
            forks.close()
        guard.kill()
        guard.wait()
        semaphores.remove_orphans()
        remove_shares(config)
    return 0 if problem is None else code


def _end_by(stop: Callable[..., None]) -> None:
    """Call `stop` at a signal that asks to end; the terminal's end does too, unless the server is
    to outlive it (`nohup`)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


# Waits in a read that returns when the command ends. Ray's agents do not notice that, and a worker
# that is just starting, whose command line names the session, notices it after half a minute.
# Days after the guard began, another process may have the number of one that it knows by then.
_GUARD = """
read none
sleep "$GRACE_S"
for known in "$@"; do
    stat=$(cat "/proc/${known%:*}/stat" 2>/dev/null) || continue
    set -- ${stat##*) }
    [ "${20}" = "${known#*:}" ] && kill -9 "${known%:*}" 2>/dev/null
done
for found in $(echo "$SESSION" | grep -lsf - /proc/[0-9]*/cmdline); do
    grep -qs default_worker "$found" || continue  # e.g. a user who reads the session's logs
    pid=${found#/proc/}
    kill -9 "${pid%/cmdline}" 2>/dev/null
done
"""


def _guard(session: str) -> subprocess.Popen[bytes]:
    """A shell that ends this server's processes if the command is killed. session: Ray's name."""
    known = list[str]()
    for process in psutil.Process().children(recursive=True):
        with suppress(OSError):  # it has ended
            known.append(_with_birth(process.pid))
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "guard", *known],
        stdin=subprocess.PIPE,
        env={**os.environ, "SESSION": session, "GRACE_S": "5"},
        start_new_session=True,  # Ctrl-C in a terminal must reach only the command
    )


def _with_birth(pid: int) -> str:
    """The number of a process and when it began, in clock ticks since the machine did: field 22 of
    its `stat`, whose second may hold spaces and parentheses."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return f"{pid}:{stat.rpartition(')')[2].split()[19]}"


def _end_with_ray(
    raylet: subprocess.Popen[bytes],
    logs: str,
    is_ending: threading.Event,
    guards: Sequence[subprocess.Popen[bytes]],
    config: dict[str, Any],
) -> None:
    """Without its raylet nothing is left that could serve, drain, or answer."""
    raylet.wait()
    if not is_ending.is_set():
        print_error(f"Ray's raylet has ended, and with it the server; its logs are in {logs}")
        if guards:  # it knows processes that are children no longer, and ends them now
            os._exit(1)
        _stop_at_once(config, 1)


def _stop_at_once(config: dict[str, Any], code: int = 130) -> NoReturn:
    """End every process of this server at once, and remove what they leave in shared memory."""
    try:
        processes = psutil.Process().children(recursive=True)
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=_DIE_WITHIN_S)
        semaphores.remove_orphans()
        remove_shares(config)
    finally:
        os._exit(code)


def _drain_s(config: dict[str, Any]) -> float:
    """Longest time that a replica of this config may take to finish its streams."""
    deployments = [d for a in config["applications"] for d in a.get("deployments") or []]
    return max([DRAIN_S, *(d.get("graceful_shutdown_timeout_s") or 0.0 for d in deployments)])


def _url(http: dict[str, Any]) -> str:
    host = f"[{http['host']}]" if ":" in http["host"] else http["host"]
    return f"http://{host}:{http['port']}"


def _age_s() -> float:
    """Since this process began."""
    return time.time() - psutil.Process().create_time()


def _wait(
    address: str, paths: Sequence[str], status: Status, done: threading.Event, ends_s: list[float]
) -> str | None:
    """Wait until every application runs and these paths answer on the public address; else the
    problem, or SettingsError where a setting is at fault.

    Appends to ends_s when Serve had placed the replicas, and when they answered."""
    from ray import serve as ray_serve

    is_placed = is_told = False
    # One client, because each reads the system's certificates when made, 30 ms of a core.
    with httpx.Client(base_url=address, timeout=2.0, trust_env=False) as client:
        next_s = 0.0
        while not done.is_set():
            answers = all(_answers(client, path) for path in paths)
            if not answers and time.monotonic() < next_s:  # Serve's status takes 40 ms of a core
                done.wait(0.2)
                continue
            next_s = time.monotonic() + _STATUS_PERIOD_S
            applications = ray_serve.status().applications
            states = {name: str(a.status.value) for name, a in applications.items()}
            for name, application in applications.items():
                trouble = application.message or ""
                for deployment in application.deployments.values():
                    trouble = deployment.message or trouble
                if states[name] in ("DEPLOY_FAILED", "UNHEALTHY") or "Error" in trouble:
                    return cause_of(trouble)
                if "to be scheduled" in trouble and not is_told:  # it may wait for ever
                    is_told = True
                    console.print(f"Serve: {' '.join(trouble.split())}", markup=False)
            if not is_placed and all(a.deployments for a in applications.values()):
                is_placed = True
                ends_s.append(_age_s())
            status.update("loading " + ", ".join(f"{n}: {s.lower()}" for n, s in states.items()))
            if states and all(s == "RUNNING" for s in states.values()) and answers:
                ends_s.append(_age_s())
                return None
            done.wait(0.2)
    return "interrupted"


def _answers(client: httpx.Client, path: str) -> bool:
    try:
        response = client.get(path)
    except httpx.HTTPError:
        return False
    # Until HAProxy knows the replicas, a slower Python proxy answers in its place. Of several
    # models each must have an engine.
    return response.status_code == 200 and all(response.json().get("models", {}).values())
