"""Models by their name on a hub, through the hub's library, from a small hub on loopback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from actors.stage.hub_folder import HubModel, parse_hub_name
from actors.stage.weights.checkpoint import Checkpoint
from tests.local_hub import ROOT, TOKEN, LocalHub, run, serving

pytestmark = pytest.mark.heavy  # a process per download: the library reads its variables once

DEMO = {
    n: (ROOT / "configs/models/demo" / n).read_bytes() for n in ("config.json", "tokenizer.json")
}
WEIGHTS = bytes(range(256)) * 48_000  # longer than a chunk of the library, 10 MB
_FETCH = """
import sys
from actors.stage.hub_folder import HubError, all_files, parse_hub_name, pin
model = parse_hub_name(sys.argv[1])
try:
    print(pin(model), all_files(model), sep="\\n")
except HubError as error:
    sys.exit(f"HubError: {error}")
"""


@pytest.fixture
def hub() -> LocalHub:
    files = {**DEMO, "model.safetensors": b"weights"}
    unneeded = {"pytorch_model.bin": b"pickle", "onnx/config.json": b"{}"}
    found = LocalHub()
    found.models["org/demo"] = {"main": files | unneeded, "v1": {**files, "config.json": b"{}"}}
    return found


@pytest.fixture
def served(hub: LocalHub) -> Iterator[LocalHub]:
    with serving(hub):
        yield hub


def fetch(hub: LocalHub, home: Path, name: str, **more: str) -> tuple[str, Path]:
    """The pinned name and the folder or file."""
    ran = run(hub, home, "-c", _FETCH, name, **more)
    assert ran.returncode == 0, ran.stderr
    pinned, path = ran.stdout.splitlines()
    return pinned, Path(path)


def refusal(hub: LocalHub, home: Path, name: str, **more: str) -> str:
    ran = run(hub, home, "-c", _FETCH, name, **more)
    assert ran.returncode == 1, ran.stdout
    (line,) = ran.stderr.splitlines()
    return line.removeprefix("HubError: ")


@pytest.mark.skipif(find_spec("socksio") is not None, reason="the client can use such a proxy")
def test_a_proxy_that_the_client_cannot_use_is_named(served: LocalHub, tmp_path: Path) -> None:
    said = refusal(served, tmp_path, "org/demo", ALL_PROXY="socks5://127.0.0.1:9", NO_PROXY="")
    assert "ALL_PROXY, HTTPS_PROXY or HTTP_PROXY names a SOCKS proxy: `pip install socksio`" in said


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("org/name", HubModel("org/name", "main")),
        ("Org-1/na.me_2@refs/pr/3", HubModel("Org-1/na.me_2", "refs/pr/3")),
        ("org/name/q4.gguf", HubModel("org/name", "main", "q4.gguf")),
        ("org/name/sub/q4.gguf@v1", HubModel("org/name", "v1", "sub/q4.gguf")),
        *[(path, None) for path in (
            "name", "./org/name", "../org", "/org/name", "~/name", "a/b/c", "serve/demo.yaml",
            "models/q4.gguf", "org/name@", "org/../x.gguf", "org/name/",
        )],
    ],
)  # fmt: skip
def test_a_name_is_told_from_a_path(name: str, model: HubModel | None) -> None:
    assert parse_hub_name(name) == model
    if model is not None:
        assert parse_hub_name(str(model)) == model


def test_what_is_needed_is_downloaded_once(hub: LocalHub, tmp_path: Path) -> None:
    with serving(hub):
        pinned, folder = fetch(hub, tmp_path, "org/demo")
        assert pinned == f"org/demo@{hub.commit_of('org/demo', 'main')}"
        assert folder.is_relative_to(tmp_path / "hub")
        needed = ["config.json", "model.safetensors", "tokenizer.json"]
        assert sorted(hub.files_sent()) == needed == sorted(p.name for p in folder.iterdir())
        assert (folder / "model.safetensors").read_bytes() == b"weights"
    hub.requests.clear()
    for variables in ({}, {"HF_HUB_OFFLINE": "1"}):  # without a network, and without trying
        assert fetch(hub, tmp_path, "org/demo", **variables) == (pinned, folder)
    with serving(hub):
        assert fetch(hub, tmp_path, pinned) == (pinned, folder)
        assert not [path for _, path, _ in hub.requests if "org/demo" in path]


def test_of_folders_those_that_a_tokenizer_or_pooling_reads_are_downloaded(
    hub: LocalHub, tmp_path: Path
) -> None:
    needed = ("1_Pooling/config.json", "additional_chat_templates/tool_use.jinja")
    other = ("onnx/config.json", "1x/a.json", "assets/a.json", "adapters/a.json", "add/b/a.json")
    hub.models["org/demo"]["main"] |= dict.fromkeys((*needed, *other), b"{}")
    with serving(hub):
        _, folder = fetch(hub, tmp_path, "org/demo")
    found = {str(path.relative_to(folder)) for path in folder.glob("*/**/*") if path.is_file()}
    assert found == {*needed}


def test_a_revision_is_another_folder(served: LocalHub, tmp_path: Path) -> None:
    pinned, folder = fetch(served, tmp_path, "org/demo@v1")
    assert pinned == f"org/demo@{served.commit_of('org/demo', 'v1')}"
    assert (folder / "config.json").read_bytes() == b"{}"
    said = refusal(served, tmp_path, "org/demo@v2")
    assert said.startswith("org/demo has no revision 'v2' on 127.0.0.1:")


def test_a_model_that_the_hub_does_not_show_is_named(served: LocalHub, tmp_path: Path) -> None:
    assert "has no model org/none, or shows it only to a token (HF_TOKEN)" in refusal(
        served, tmp_path, "org/none"
    )
    served.gated.add("org/demo")
    terms = f"org/demo is gated: accept its terms at {served.address}/org/demo and set HF_TOKEN"
    assert refusal(served, tmp_path, "org/demo").startswith(terms)
    assert fetch(served, tmp_path, "org/demo", HF_TOKEN=TOKEN)[1].is_dir()


def test_without_network_the_cause_is_named(hub: LocalHub, tmp_path: Path) -> None:
    with serving(hub):
        pass  # its port is closed from here on
    said = refusal(hub, tmp_path, "org/demo")
    assert "cannot be reached" in said
    assert said.endswith(f"org/demo@main is not whole in {tmp_path / 'hub'}: [Errno 111] "
                         "Connection refused")  # fmt: skip
    said = refusal(hub, tmp_path, "org/demo", HF_HUB_OFFLINE="1")
    assert said.endswith(
        f"HF_HUB_OFFLINE is set, and org/demo@main is not whole in {tmp_path / 'hub'}"
    )


def test_a_broken_download_is_resumed(served: LocalHub, tmp_path: Path) -> None:
    served.models["org/demo"]["main"]["model.safetensors"] = WEIGHTS
    served.cuts["model.safetensors"] = 11_000_000
    _, folder = fetch(served, tmp_path, "org/demo")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    *_, (_, _, first), (_, _, second) = served.requests
    assert first is None
    assert second is not None
    assert int(second.removeprefix("bytes=").removesuffix("-")) >= 10_000_000


def test_what_an_ended_download_lacks_is_fetched_later(hub: LocalHub, tmp_path: Path) -> None:
    shards = {"layers-1.safetensors": b"1", "layers-2.safetensors": b"2"}
    index = {"weight_map": {f"tensor {number}": name for number, name in enumerate(shards)}}
    sharded = {**DEMO, "model.safetensors.index.json": json.dumps(index).encode()}
    unread = {"consolidated.safetensors": b"both"}
    main = hub.models["org/demo"]["main"] = sharded | unread | shards
    del main["layers-2.safetensors"]
    with serving(hub):
        assert "cannot be downloaded" in refusal(hub, tmp_path, "org/demo")
    said = refusal(hub, tmp_path, "org/demo", HF_HUB_OFFLINE="1")
    assert "org/demo@" in said
    assert "is not whole" in said
    main |= shards
    hub.requests.clear()
    with serving(hub):
        _, folder = fetch(hub, tmp_path, "org/demo")
    assert hub.files_sent() == ["layers-2.safetensors"]
    assert sorted(p.name for p in folder.iterdir()) == sorted([*sharded, *shards])


def test_one_file_goes_before_an_index(hub: LocalHub, tmp_path: Path) -> None:
    """As in transformers: saved anew as one file, a model may leave its old shards behind."""
    one, old = "model.safetensors", "model-00001-of-00001.safetensors"
    index = json.dumps({"weight_map": {"x": old}}).encode()
    zeros, ones = save({"x": torch.zeros(2)}), save({"x": torch.ones(2)})
    hub.models["org/demo"]["main"] = {**DEMO, f"{one}.index.json": index, old: zeros, one: ones}
    with serving(hub):
        _, folder = fetch(hub, tmp_path, "org/demo")
    assert one in hub.files_sent()
    assert old not in hub.files_sent()
    (folder / old).write_bytes(zeros)
    with closing(Checkpoint(folder, torch.float32)) as found:
        assert found.read("x", (2,)).tolist() == [1, 1]
    (folder / old).unlink()
    with closing(Checkpoint(folder, torch.float32)) as found:
        assert found.file_of("x") == folder / one


def test_a_cache_that_another_program_filled_is_read(hub: LocalHub, tmp_path: Path) -> None:
    with serving(hub):
        found = fetch(hub, tmp_path, "org/demo")
    shutil.rmtree(tmp_path / "hub/models--org--demo/trees")
    assert fetch(hub, tmp_path, "org/demo", HF_HUB_OFFLINE="1") == found


def test_pickles_are_not_downloaded(served: LocalHub, tmp_path: Path) -> None:
    del served.models["org/demo"]["main"]["model.safetensors"]
    said = refusal(served, tmp_path, "org/demo")
    assert said == "org/demo holds no safetensors, and pickles are not read"
    assert "pytorch_model.bin" not in served.files_sent()


def test_a_gguf_file_is_named(served: LocalHub, tmp_path: Path) -> None:
    served.models["org/gguf"] = {
        "main": {"q4.gguf": b"GGUF 4", "sub/q8.gguf": b"GGUF 8", "README.md": b"of them"}
    }
    commit = served.commit_of("org/gguf", "main")
    pinned, file = fetch(served, tmp_path, "org/gguf/sub/q8.gguf")
    assert pinned == f"org/gguf/sub/q8.gguf@{commit}"
    assert file.read_bytes() == b"GGUF 8"
    choice = "name a GGUF file of it: org/gguf/q4.gguf, org/gguf/sub/q8.gguf"
    said = refusal(served, tmp_path, "org/gguf")
    assert said == f"org/gguf holds no config.json; {choice}"
    said = refusal(served, tmp_path, "org/gguf/q5.gguf")
    assert said == f"org/gguf has no q5.gguf; {choice}"


def test_parts_of_a_gguf_file_come_with_the_first(served: LocalHub, tmp_path: Path) -> None:
    parts = [f"q4/big-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    stored = {name: name.encode() for name in parts} | {"README.md": b"of them"}
    served.models["org/gguf"] = {"main": stored}
    pinned, file = fetch(served, tmp_path, f"org/gguf/{parts[0]}")
    assert pinned == f"org/gguf/{parts[0]}@{served.commit_of('org/gguf', 'main')}"
    assert sorted(served.files_sent()) == parts
    assert [(file.parents[1] / name).read_text() for name in parts] == parts
    said = refusal(served, tmp_path, "org/gguf")
    assert said.endswith(f"; name a GGUF file of it: org/gguf/{parts[0]}")
    said = refusal(served, tmp_path, f"org/gguf/{parts[1]}")
    assert said == f"{parts[1]} is a part of a file; name the first, {parts[0]}"
    del stored[parts[1]]
    said = refusal(served, tmp_path / "other", f"org/gguf/{parts[0]}")
    assert said == f"org/gguf has no {parts[1]}, a part of {parts[0]}"


_ON_ANOTHER_NODE = """
import sys
from dataclasses import replace
from actors.stage.hub_folder import on_this_node
from actors.stage.spec import StageSpec
spec = StageSpec("/elsewhere", load_format="dummy", hub_model=sys.argv[1])
if len(sys.argv) > 2:
    spec = replace(spec, draft_model_path="/elsewhere", hub_draft_model=sys.argv[1])
spec = on_this_node(spec)
print(spec.model_path, spec.draft_model_path, sep="\\n")
"""


@pytest.mark.parametrize(("drafts", "num_weights"), [(False, 0), (True, 1)])
def test_a_rank_downloads_what_its_node_lacks(
    served: LocalHub, tmp_path: Path, drafts: bool, num_weights: int
) -> None:
    """Random weights need no download, those of a draft model do."""
    pinned = f"org/demo@{served.commit_of('org/demo', 'main')}"
    ran = run(served, tmp_path, "-c", _ON_ANOTHER_NODE, pinned, *["draft"] * drafts)
    folder, draft = ran.stdout.splitlines()
    assert (Path(folder) / "config.json").is_file()
    assert draft == (folder if drafts else "None")
    assert len(list(Path(folder).glob("*.safetensors"))) == num_weights
