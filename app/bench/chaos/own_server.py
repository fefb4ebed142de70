"""A server of the benchmark's own: `legato serve` in a corner of its own, and its processes.

Where the system lets a user make namespaces (`unshare`), the server gets a small shared memory and
a small disk for its telemetry: both can be filled without harm to other processes, and what stays
behind in shared memory is the server's.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from app.bench.load.client import ask, first_model
from app.bench.report import MeasurementError
from app.bench.server_process import is_alive
from app.paths import locate
from app.settings.model_folder import SettingsError
from app.settings.models import engine_groups
from app.settings.models import is_fleet as has_fleet
from app.terminal import WRONG_USAGE

_ROOT = Path(__file__).resolve().parents[3]
_CONFIG = "serve.yaml"
_READY_WITHIN_S = 240.0
_STOP_WITHIN_S = 90.0
_GONE_WITHIN_S = 15.0
_SOON_S = 1.0
SHARED_MEMORY_MIB, DISK_MIB = 1024, 16

# Part of a process's command line -> its kind.
_KINDS = (
    ("ray::ServeReplica", "replica"),
    ("ray::SchedulerActor", "scheduler"),
    ("ray::StageActor", "stage"),
    ("ray::ServeController", "controller"),
    ("app.text.grammar_worker", "grammar worker"),
    ("app.text.template_worker", "template worker"),
    ("app.cli.main", "command"),
)
SERVING = ("replica", "scheduler", "stage", "controller")
_IN_A_CORNER = (
    f"mount -t tmpfs -o size={SHARED_MEMORY_MIB}m tmpfs /dev/shm && "
    f'mount -t tmpfs -o size={DISK_MIB}m tmpfs "$1" && shift && exec "$@"'
)


@dataclass(slots=True)
class OwnServer:
    """telemetry: the folder the server logs into, as it calls it.

    shared_memory: an open folder: the server's /dev/shm, also once it has ended; None where it
    shares that of the machine.
    engines_of: replicas that each deployment of a fleet's engines shall have, by its name; empty: a
    lone replica. doomed: engines that shall be gone."""

    url: str
    process: subprocess.Popen[bytes]
    folder: Path
    telemetry: Path
    log: Path
    model: str = ""
    shared_memory: int | None = None
    engines_of: dict[str, int] = field(default_factory=dict)
    doomed: frozenset[str] = frozenset()
    known: dict[int, psutil.Process] = field(default_factory=dict)  # every process ever seen
    left_over: list[str] = field(default_factory=list)  # once it has ended: what had not

    @property
    def num_engines(self) -> int:
        """That a fleet shall have; 0: a lone replica."""
        return sum(self.engines_of.values())

    @property
    def root(self) -> Path:
        """The file system as the server sees it."""
        return Path(f"/proc/{self.process.pid}/root")

    def processes(self) -> dict[str, list[psutil.Process]]:
        """The running processes by kind; "ray" for the rest."""
        found: dict[str, list[psutil.Process]] = {}
        with suppress(psutil.Error):
            own = psutil.Process(self.process.pid)
            for process in [own, *own.children(recursive=True)]:
                with suppress(psutil.Error):
                    title = " ".join(process.cmdline())
                    if process.status() == psutil.STATUS_ZOMBIE or not title:
                        continue
                    kind = next((kind for mark, kind in _KINDS if mark in title), "ray")
                    found.setdefault(kind, []).append(process)
                    self.known[process.pid] = process
        return found

    def pids(self, kind: str) -> list[int]:
        """A standby is a stage's process that does not serve yet; which does, the server says: all
        of them, while it does not answer."""
        if kind not in ("stage", "standby"):
            return [process.pid for process in self.processes().get(kind, [])]
        found = [process.pid for process in self.processes().get("stage", [])]
        serving = set(found)
        with suppress(httpx.HTTPError, ValueError):
            serving = {pid for ranks in self.status(_SOON_S)["stage_pids"] for pid in ranks}
        return [pid for pid in found if (pid in serving) == (kind == "stage")]

    def status(self, within_s: float = 15.0) -> dict[str, Any]:
        """The console's; raises httpx.HTTPError or ValueError while it does not answer."""
        answer = ask(f"{self.url}/console/status", within_s)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def engines(self) -> list[dict[str, Any]]:
        """A fleet's engines, as its front shows them; none while it does not answer."""
        try:
            found: list[dict[str, Any]] = self.status().get("engines", [])
        except (httpx.HTTPError, ValueError):
            return []
        return found

    def is_whole(self) -> bool:
        """A fleet has all the engines it shall have, and no others; a lone replica always is."""
        if not self.num_engines:
            return True
        engines = self.engines()
        serving = [engine for engine in engines if engine.get("state") == "serving"]
        doomed = any(engine["id"] in self.doomed for engine in engines)
        return len(serving) == len(engines) == self.num_engines and not doomed

    def redeploy(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the application in the config, and have it deployed."""
        path = self.folder / _CONFIG
        config = yaml.safe_load(path.read_text())
        change(config["applications"][0])
        path.write_text(yaml.safe_dump(config))
        os.kill(self.process.pid, signal.SIGUSR1)

    def alive(self) -> list[psutil.Process]:
        """The processes ever seen that are still alive."""
        return list(filter(is_alive, self.known.values()))

    def shared_files(self) -> list[str]:
        """In shared memory, where that is the server's own."""
        return [] if self.shared_memory is None else sorted(os.listdir(self.shared_memory))


def has_corners() -> bool:
    """Whether this system lets a user make the namespaces."""
    try:
        made = subprocess.run(
            [*_unshare(), "sh", "-c", "mount -t tmpfs tmpfs /dev/shm"], capture_output=True
        )
    except OSError:
        return False
    return made.returncode == 0


def _unshare() -> list[str]:
    return ["unshare", "--user", "--map-root-user", "--mount", "--propagation", "private"]


def free_port() -> int:
    """A loopback port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def own_server(
    config: Path,
    args: Mapping[str, Mapping[str, Any]],
    log: Path,
    *,
    records: bool = False,
    change: Callable[[dict[str, Any]], None] | None = None,
) -> Iterator[OwnServer]:
    """`legato serve` of this config until the block ends, then Ctrl-C.

    args: sections of settings that replace the config's, key by key. records: it also writes logs
    of all that telemetry has, and has a small disk for them where the system allows. change: made
    to the application, beside its args.
    Raises MeasurementError where it does not start, SettingsError where its config is at fault.
    """
    folder = Path(tempfile.mkdtemp(prefix="legato-chaos-"))
    telemetry = folder / "telemetry"
    telemetry.mkdir()
    sections = {
        **args,
        **({"telemetry": {"directory": str(telemetry), "events": True}} if records else {}),
    }
    port = free_port()
    path = folder / _CONFIG
    configured = _configured(config, sections)
    if change is not None:
        change(configured["applications"][0])
    path.write_text(yaml.safe_dump(configured))
    command = [sys.executable, "-m", "app.cli.main", "serve", str(path), "--port", str(port)]
    corner = has_corners()
    if corner:
        command = [*_unshare(), "sh", "-c", _IN_A_CORNER, "sh", str(telemetry), *command]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, cwd=_ROOT, stdout=sink, stderr=subprocess.STDOUT, env=_environment(),
            start_new_session=True,
        )  # fmt: skip
        server = OwnServer(f"http://127.0.0.1:{port}", process, folder, telemetry, log)
        server.engines_of = engines_of(configured["applications"][0])
        try:
            _wait_ready(server)
            if corner:
                server.shared_memory = os.open(server.root / "dev/shm", os.O_RDONLY)
            yield server
        finally:
            stop(server)
            _bury(server)
            if server.shared_memory is not None:
                os.close(server.shared_memory)
            shutil.rmtree(folder, ignore_errors=True)


def _environment() -> dict[str, str]:
    """The environment of a user's shell, without what this process's own cluster has set."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "OMP_"))}
    return {**kept, "PYTHONPATH": str(_ROOT), "RAY_TMPDIR": "/tmp"}


def _configured(config: Path, sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    try:
        read: dict[str, Any] = yaml.safe_load(locate(config).read_text())
        args = read["applications"][0]["args"]
    except OSError as error:
        raise SettingsError(f"{config}: no Serve config: {error.strerror}") from None
    except (yaml.YAMLError, KeyError, IndexError, TypeError) as error:
        raise SettingsError(f"{config}: no Serve config: {error!r}") from None
    for name, section in sections.items():
        args[name] = {**(args.get(name) or {}), **section}
    return read


def is_fleet(config: Path) -> bool:
    """Raises SettingsError for what is no Serve config."""
    return bool(engines_of(_configured(config, {})["applications"][0]))


def engines_of(application: Mapping[str, Any]) -> dict[str, int]:
    """Replicas by deployment of the engines that the console shows: those of the first model.

    Empty without a fleet. Raises SettingsError.
    """
    args = application["args"]
    if not has_fleet(args):
        return {}
    groups = [group for group in engine_groups(args) if group.model == 0]
    given = {d["name"]: d.get("num_replicas") for d in application.get("deployments") or []}
    counts = {group.deployment: given.get(group.deployment) for group in groups}
    return {name: count if isinstance(count, int) else 1 for name, count in counts.items()}


def _wait_ready(server: OwnServer) -> None:
    deadline_s = time.monotonic() + _READY_WITHIN_S
    while time.monotonic() < deadline_s:
        if (code := server.process.poll()) is not None:
            kind = SettingsError if code == WRONG_USAGE else MeasurementError
            raise kind(f"the server ended: {server.log.read_text()[-2000:]}")
        if b"ready in" in server.log.read_bytes():
            server.model = first_model(server.url)
            server.processes()
            return
        time.sleep(0.2)
    raise MeasurementError(f"no server within {_READY_WITHIN_S:g} s; its output is in {server.log}")


def stop(server: OwnServer) -> None:
    """Ctrl-C; what does not follow is killed."""
    server.processes()
    with suppress(ProcessLookupError):
        os.kill(server.process.pid, signal.SIGINT)
    try:
        server.process.wait(_STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()


def _bury(server: OwnServer) -> None:
    """Note what outlived the server, and end it."""
    deadline_s = time.monotonic() + _GONE_WITHIN_S
    while server.alive() and time.monotonic() < deadline_s:
        time.sleep(0.2)
    for process in server.alive():
        with suppress(psutil.Error):
            server.left_over.append(f"process {' '.join(process.cmdline())[:60]}")
            process.kill()
    server.left_over += [f"shared memory {name}" for name in server.shared_files()]
