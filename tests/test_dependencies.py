"""Dependencies whose insides the code relies on lie in the declared range, and hold still.

When a test here fails after an upgrade, read the code it names, mend it, and only then raise the
upper bound in pyproject.toml.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import re
import socket
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from app.ray_environment import ENVIRONMENT
from tests.constraints import PATH, locked, needed

pytestmark = pytest.mark.ray  # not started, but imported by name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DECLARED = [Requirement(line) for line in PROJECT["dependencies"]]
BOUNDED = {"ray", "torch", "transformers", "starlette", "uvicorn", "uvloop", "typer"}
BOUNDED |= {"xgrammar", "llguidance"}

# What is called or overridden -> the parameters that are passed, and the file that relies on it.
PROTOCOL, SERVER = "app/api/http/connections.py", "app/api/http/http_server.py"
EBNF, GUIDANCE = (f"actors/stage/grammars/{name}.py" for name in ("ebnf", "guidance"))
STAGES = "actors/transport/graph_pipeline.py"
HTTP = "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol"
NODE = "ray._private.node:Node"
INSIDES: dict[str, tuple[tuple[str, ...], str]] = {
    "uvicorn:Config": (
        ("http", "ws", "lifespan", "log_config", "log_level", "access_log", "timeout_keep_alive"),
        SERVER,
    ),
    "uvicorn:Config.load": ((), SERVER),
    "uvicorn:Server.startup": (("sockets",), SERVER),
    "uvicorn:Server.shutdown": ((), SERVER),
    HTTP: (("config", "server_state", "app_state"), SERVER),
    f"{HTTP}.connection_made": (("transport",), PROTOCOL),
    f"{HTTP}.connection_lost": (("exc",), PROTOCOL),
    f"{HTTP}.eof_received": ((), PROTOCOL),
    f"{HTTP}.data_received": (("data",), PROTOCOL),
    f"{HTTP}.on_message_begin": ((), PROTOCOL),
    f"{HTTP}.on_headers_complete": ((), PROTOCOL),
    f"{HTTP}.send_400_response": (("msg",), PROTOCOL),
    f"{HTTP}._should_upgrade": ((), PROTOCOL),
    f"{HTTP}.handle_websocket_upgrade": ((), PROTOCOL),
    "starlette.applications:Starlette": (
        ("routes", "middleware", "exception_handlers"),
        "app/api/application.py",
    ),
    "uvloop:new_event_loop": ((), "actors/engine/scheduler.py"),
    "typer.core:TyperGroup.get_command": (("ctx", "cmd_name"), "app/bench/command.py"),
    "typer.core:TyperGroup.list_commands": (("ctx",), "app/bench/command.py"),
    "xgrammar:TokenizerInfo": (("vocab_type", "stop_token_ids"), EBNF),
    "xgrammar:TokenizerInfo.from_huggingface": ((), "actors/stage/grammars/compiler.py"),
    "xgrammar:GrammarCompiler": (("max_threads", "cache_limit_bytes"), EBNF),
    "xgrammar:GrammarCompiler.compile_grammar": ((), EBNF),
    "xgrammar:GrammarMatcher.accept_token": ((), EBNF),
    "xgrammar:GrammarMatcher.fill_next_token_bitmask": ((), EBNF),
    "xgrammar:GrammarMatcher.is_terminated": ((), EBNF),
    "xgrammar:GrammarMatcher.rollback": ((), EBNF),
    "llguidance:LLTokenizer": (("eos_token",), GUIDANCE),
    "llguidance:LLMatcher": (("log_level", "limits"), GUIDANCE),
    "llguidance:LLMatcher.unsafe_compute_mask_ptr": ((), GUIDANCE),
    "llguidance:LLMatcher.try_consume_tokens": ((), GUIDANCE),
    "llguidance:LLMatcher.deep_copy": ((), GUIDANCE),
    "llguidance:regex_to_lark": (("use_ascii",), GUIDANCE),
    "ray.serve._private.api:serve_start": (("http_options", "proxy_location"), "app/cli/serve.py"),
    "ray.job_config:JobConfig._serialize": ((), "app/cli/local_ray.py"),
    "ray.serve.context:ReplicaContext": (("_deployment_config",), "app/batch_service.py"),
    f"{NODE}.kill_log_monitor": (("check_alive",), "app/cli/serve.py"),
    f"{NODE}.kill_monitor": (("check_alive",), "app/cli/serve.py"),
    f"{NODE}.kill_dashboard": (("check_alive",), "app/cli/serve.py"),
    "ray.dag:DAGNode.experimental_compile": (
        ("_submit_timeout", "_max_inflight_executions"),
        STAGES,
    ),
    "ray.dag:DAGNode.with_tensor_transport": (("transport",), STAGES),
}


@pytest.fixture(autouse=True, scope="module")
def environment() -> None:
    """Ray reads it when it is imported, which here may be before the tests that start Ray."""
    os.environ.update(ENVIRONMENT | {"RAY_SERVE_ENABLE_HA_PROXY": "0"})


@pytest.mark.parametrize("requirement", DECLARED, ids=lambda r: r.name)
def test_what_is_installed_lies_in_the_declared_range(requirement: Requirement) -> None:
    installed = metadata.version(requirement.name)
    assert requirement.specifier.contains(installed, prereleases=True), (
        f"{requirement.name} {installed} is installed, pyproject.toml declares {requirement}: "
        "reinstall, or move the bound once the tests pass"
    )


def test_constraints_are_what_the_tests_run_with() -> None:
    known = locked()
    differing = {n: v for n, v in needed().items() if known.get(n) != v}
    assert not differing, (
        f"install with `-c constraints.txt`, or run the tests and `make lock`: {differing}"
    )
    outside = [
        f"{requirement}: {known[canonicalize_name(requirement.name)]}"
        for requirement in DECLARED
        if not requirement.specifier.contains(known[canonicalize_name(requirement.name)])
    ]
    assert not outside, "constraints.txt leaves what pyproject.toml allows: " + ", ".join(outside)


def test_constraints_say_versions_and_nothing_else() -> None:
    """No address of an index, no path: where packages come from is for each machine to say."""
    lines = PATH.read_text().splitlines()
    assert [x for x in lines if not re.fullmatch(r"#.*|[a-z0-9-]+==[0-9a-z.]+", x)] == []
    names = [line for line in lines if not line.startswith("#")]
    assert names == sorted(set(names))


def test_dependencies_whose_insides_are_used_have_an_upper_bound() -> None:
    declared = {requirement.name: requirement.specifier for requirement in DECLARED}
    unbounded = [n for n in BOUNDED if not any(s.operator in ("<", "==") for s in declared[n])]
    assert not unbounded, f"no upper bound in pyproject.toml: {', '.join(sorted(unbounded))}"
    packages = {name.partition(":")[0].partition(".")[0] for name in INSIDES}
    assert packages <= BOUNDED


def test_the_cuda_extra_needs_no_compiler() -> None:
    """flash-attn imports torch to build itself, so no isolated build of it can succeed: it stands
    in an extra of its own, and what the GPU backends need beside it comes as wheels."""
    from kernels.registry import BACKENDS

    extras = {
        name: {Requirement(line).name.replace("-", "_") for line in lines}
        for name, lines in PROJECT["optional-dependencies"].items()
    }
    for name in ("triton", "flash_attn"):
        assert set(BACKENDS[name].packages) <= extras["cuda"]
    assert "flash_attn" in extras["flash"] - extras["cuda"]


@pytest.mark.parametrize("name", INSIDES)
def test_insides_are_where_they_were(name: str) -> None:
    parameters, user = INSIDES[name]
    module, _, path = name.partition(":")
    package = module.partition(".")[0]
    moved = f"{package} {metadata.version(package)} has moved {name}, which {user} relies on"
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        assert hasattr(found, part), moved
        found = getattr(found, part)
    assert callable(found), moved
    if parameters:
        known = inspect.signature(found).parameters
        missing = [parameter for parameter in parameters if parameter not in known]
        assert not missing, f"{moved}: no parameter {', '.join(missing)}"


@pytest.fixture
def served() -> tuple[list[RequestResponseCycle], bytes]:
    """One request through uvicorn's own protocol: the cycle the application saw, and the answer."""
    cycles: list[RequestResponseCycle] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        cycle = send.__self__
        cycles.append(cycle)
        assert cycle.scope is scope, "the scope given to the application is another one"
        assert not cycle.chunked_encoding, "the head counts as sent before it is"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert cycle.chunked_encoding is True, "a body without a length is not chunked"
        assert cycle.flow.write_paused is False
        assert not cycle.transport.is_closing()
        await send({"type": "http.response.body", "body": b"a token", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        config = uvicorn.Config(application, http=HttpToolsProtocol, ws="none", lifespan="off")
        config.load()
        assert callable(config.lifespan_class)
        state = ServerState()
        state.default_headers = [(b"date", b"today")]
        ours, theirs = socket.socketpair()
        await loop.connect_accepted_socket(lambda: HttpToolsProtocol(config, state, {}), theirs)
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
        answer = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 10)
        writer.close()
        return answer

    return cycles, asyncio.run(run())


def test_uvicorn_frames_a_chunk_as_the_server_does(
    served: tuple[list[RequestResponseCycle], bytes],
) -> None:
    (cycle,), answer = served
    head, _, body = answer.partition(b"\r\n\r\n")
    assert isinstance(cycle, RequestResponseCycle)
    assert b"date: today" in head, "ServerState.default_headers are not in the head"
    chunk = b"a token"
    assert body == b"%x\r\n%b\r\n" % (len(chunk), chunk) + b"0\r\n\r\n"


def test_starlette_hands_a_route_that_is_an_object_the_plain_asgi_call() -> None:
    class Endpoint:
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...

    endpoint = Endpoint()
    assert Route("/", endpoint, methods=["POST"]).app is endpoint


def test_transformers_still_wraps_the_tokenizer_that_is_read() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(ROOT / "configs/models/demo"))
    backend = tokenizer.backend_tokenizer
    used = ("no_truncation", "no_padding", "encode", "decode", "get_vocab", "id_to_token")
    missing = [name for name in used if not hasattr(backend, name)]
    assert not missing, f"app/text/processor.py relies on {missing} of the backend tokenizer"
    assert set(tokenizer.all_special_ids) >= {tokenizer.eos_token_id}
    assert "im_start" in tokenizer.chat_template


def test_ray_asks_of_a_communicator_what_ours_gives() -> None:
    from ray.experimental.channel.communicator import Communicator

    from actors.transport.communicator import StageCommunicator

    missing = StageCommunicator.__abstractmethods__  # type: ignore[attr-defined]
    assert not missing, f"actors/transport/communicator.py lacks {sorted(missing)}"
    assert issubclass(StageCommunicator, Communicator)


def test_ray_keeps_what_is_reached_into_by_name() -> None:
    from ray._private import services, worker
    from ray._raylet import InnerGcsClient
    from ray.actor import ActorHandle
    from ray.dag import compiled_dag_node

    assert hasattr(worker, "_worker_logs_enabled"), "app/cli/serve.py silences Ray's last words"
    assert hasattr(worker, "global_worker"), "app/cli/serve.py ends daemons that have no reader"
    assert hasattr(InnerGcsClient, "publish_error"), "actors/transport/notices.py"
    listener = inspect.getsource(worker.connect)
    assert "target=listen_error_messages," in listener, "app/cli/notices.py stands in for it"
    assert "worker.gcs_error_subscriber = " in listener, "app/cli/notices.py reads it"
    assert "= ConsolePopen(" in inspect.getsource(services.start_ray_process), "local_ray.py"
    assert "self._proxy_actor" in inspect.getsource(compiled_dag_node), STAGES
    assert "_actor_id" in inspect.getsource(ActorHandle), "actors/transport/communicator.py"


def test_ray_reads_every_variable_that_is_set() -> None:
    import ray

    root = Path(ray.__file__).parent
    files = [
        *root.glob("serve/_private/constants.py"),
        *root.glob("_private/ray_constants.py"),
        *root.glob("_private/accelerators/accelerator.py"),
        *root.glob("_common/usage/*.py"),
        *root.glob("dashboard/modules/*/*_consts.py"),
    ]
    python = "\n".join(file.read_text() for file in files)
    raylet = (root / "core/src/ray/raylet/raylet").read_bytes()
    unread = [
        name
        for name in ENVIRONMENT
        if f'"{name}"' not in python and name.removeprefix("RAY_").encode() + b"\0" not in raylet
    ]
    message = f"app/ray_environment.py sets what Ray {ray.__version__} does not read: {unread}"
    assert not unread, message


def test_pytest_has_the_inside_by_which_xdist_groups_tests(request: pytest.FixtureRequest) -> None:
    """Without it groups are ignored in silence, and each worker starts every server."""
    node = request.node
    assert node._nodeid == node.nodeid
