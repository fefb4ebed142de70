"""`legato config check|show|reference`: checks and explains a config without starting anything."""

from __future__ import annotations

import collections.abc
import copy
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
import yaml
from pydantic.fields import FieldInfo

from actors.engine.config import EngineConfig
from app.cli.serve_config import check_models, load_config, set_address
from app.cli.serve_keys import check_serve_keys
from app.paths import DEMO_CONFIG
from app.settings.filled_in import LEFT_OUT, filled_in
from app.settings.model_folder import SettingsError
from app.settings.schema import Settings, fields_of
from app.terminal import WRONG_USAGE, fail

config = typer.Typer(help="Check and explain configurations.", no_args_is_help=True)
Target = Annotated[
    Path,
    typer.Argument(metavar="[TARGET]", help="A Serve config (YAML), or a model's folder or name."),
]


def _checked(target: Path, whole: bool = False) -> tuple[dict[str, Any], list[EngineConfig]]:
    """The config as it was read, and the settings of every model of every application; ends the
    command if one is wrong.

    whole: by what is in the models' folders too."""
    try:
        read = load_config(target)
    except SettingsError as error:
        fail(error, code=WRONG_USAGE)  # it names the file
    config = copy.deepcopy(read)
    try:
        if whole:
            check_serve_keys(config)
        set_address(config, None, None)
        return read, check_models(config, whole)
    except SettingsError as error:
        fail(f"{target}: {error}", code=WRONG_USAGE)


@config.command()
def check(target: Target = DEMO_CONFIG) -> None:
    """Validate a config as `legato serve` would; exit 2 with the key at fault."""
    _checked(target, whole=True)
    typer.echo(f"{target}: ok")


@config.command()
def show(
    target: Target = DEMO_CONFIG,
    resolved: Annotated[
        bool,
        typer.Option(
            "--resolved",
            help="Instead what the engine makes of it, by its own names (JSON); of several models "
            "a list.",
        ),
    ] = False,
) -> None:
    """Print a config with every default filled in (YAML): itself a config, to be saved and served.

    API keys are printed as they are written.
    """
    config, found = _checked(target)
    if resolved:
        each = [dataclasses.asdict(one) for one in found]
        typer.echo(json.dumps(each[0] if len(each) == 1 else each, indent=2, default=str))
        return
    applications = [{**a, "args": filled_in(a["args"])} for a in config["applications"]]
    names = ", ".join(".".join(place) for place in LEFT_OUT)
    typer.echo(f"# Where absent, they adapt to the rest: {names}.")
    filled = {**config, "applications": applications}
    typer.echo(yaml.safe_dump(filled, sort_keys=False, allow_unicode=True, width=1000), nl=False)


@config.command()
def reference() -> None:
    """Print every setting as Markdown: configs/README.md is this command's output."""
    flags = [f"| {theirs} | {ours} |" for theirs, ours in FROM_VLLM.items()]
    typer.echo("\n".join([_INTRODUCTION, *flags, _ORIGIN, *_lines(Settings, "")]))


_INTRODUCTION = """\
# Configuration

A deployment is a Serve config ([serve/](serve)): `legato serve`, `serve run` and `serve deploy`
read the same file. These are the keys of its `args`; `legato config check FILE` names what is wrong
with one, and `legato config show FILE` prints it with every default, to be saved and used. A file
of these keys alone, `model` or `models` at its top, is for `legato` only, which adds the keys
around `args` of [serve/demo.yaml](serve/demo.yaml) and, where the file names none, its address and
its objective: `slo: {tbt_ms: 100}`, which `tbt_ms: null` turns off. Keys marked *live* also change
while the engine runs, by a deployment's `user_config` or from the console.

Paths are relative to the working folder. One that begins with `configs/` and does not exist there
is the one that came with Legato.

A model (`model.path`, `speculation.model`) that is no path here is looked up as a name on the
Hugging Face hub: `org/name` for its safetensors, `org/name/file.gguf` for a GGUF file (of parts,
the first), and `@revision` after either for a branch, a tag or a commit. It is stored in the hub's
own cache, which `HF_HOME` moves. What is in the cache needs no network, and `HF_HUB_OFFLINE=1`
forbids to use one. `HF_TOKEN` opens gated and private models. `legato serve` downloads before it
starts Ray; under `serve run` and `serve deploy` each rank downloads what its node lacks, with the
environment of that node, within `engine.load_timeout_s`. The commit is fixed when the deployment
starts, so that all its replicas have the same weights. A broken connection is resumed; a download
that was ended keeps the files that were whole.

Several models behind one address are a list, `models`, in the place of `model`
([example](serve/two_models.yaml)). Each entry has a section `model` and, where it differs,
`parallel`, `scheduling`, `slo`, `kv`, `speculation`, `engine` and `fleet`; what it leaves out is
taken from beside `models`. `adapters` are in the entries only, and no two of them have the same
name. The engines of an entry are the deployment `Engine-NAME`, with replicas and scaling of their
own. With `fleet.way` engines are a deployment per role: `Engine-prefill` and `Engine-decode`
(`Engine-NAME-prefill`, ...) or `Engine-both` ([example](serve/split.yaml)).

## From vLLM

| vLLM | here |
|---|---|"""
FROM_VLLM: Mapping[str, str] = {
    "`--host`, `--port`": "the same of `legato serve`, or `listen`",
    "`--served-model-name`": "`model.name`",
    "`--revision`": "`model.path: org/name@revision`",
    "`--load-format dummy`": "`model.load_format: dummy`",
    "`--dtype`, `--quantization`": "`model.dtype`, `model.quantization`",
    "`--max-model-len`": "`model.max_model_len`",
    "`--chat-template`": "`model.chat_template`",
    "`--tool-call-parser`, `--reasoning-parser`": "`model.tool_parser`, `model.reasoning_parser`",
    "`--tensor-parallel-size`": "`parallel.tensor_ranks`",
    "`--pipeline-parallel-size`": "`parallel.pipeline_stages`",
    "`--data-parallel-size`": "`fleet`, and `num_replicas` of the deployment `Engine` "
    "([example](serve/two_replicas.yaml))",
    "`--enforce-eager`": "`parallel.cuda_graphs: false`",
    "`--max-num-seqs`": "`scheduling.max_requests`",
    "`--max-num-batched-tokens`": "`slo.tbt_ms`, from which the tokens of each step follow; "
    "`scheduling.token_budget` fixes them instead",
    "`--gpu-memory-utilization`": "`kv.memory_fraction`, of what weights leave",
    "`--kv-cache-dtype`, `--block-size`": "`kv.dtype`, `kv.block_size`",
    "`--no-enable-prefix-caching`": "`kv.prefix_cache: false`",
    "`--speculative-config`": "`speculation.drafter`, `speculation.model`, "
    "`speculation.max_drafts`",
    "`--api-key`": "`api.api_keys`",
    "`--enable-lora`, `--max-loras`": "`adapters.max_adapters`",
    "`--max-lora-rank`, `--lora-modules`": "`adapters.max_rank`, `adapters.paths`",
}
_ORIGIN = """
## Settings

This file is the output of `legato config reference`.
"""
_HEAD = ("| key | type | default | meaning |", "|---|---|---|---|")


def _lines(section: Any, prefix: str) -> Iterator[str]:
    """The rows of a section's own keys, then its subsections, each under a heading."""
    fields = fields_of(section)
    sections = {n: s for n, f in fields.items() if (s := _section(f)) is not None}
    many = {name for name in sections if _is_mapping(fields[name].annotation)}
    yield from _HEAD
    for name, field in fields.items():
        if name not in sections or name in many:
            extra = field.json_schema_extra
            live = " *live*" if isinstance(extra, dict) and extra["live"] else ""
            cells = (
                f"`{prefix}{name}`",
                _type(field),
                _default(field),
                f"{field.description}{live}",
            )
            yield f"| {' | '.join(cells)} |"
    for name, nested in sections.items():
        yield from ("", f"### `{name}`", "")
        yield from _lines(nested, f"{prefix}{name}.{'KEY.' if name in many else ''}")


def _section(field: FieldInfo) -> Any:
    """The nested section of a field, which may be optional or have several, by keys."""
    return next(filter(fields_of, (field.annotation, *get_args(field.annotation))), None)


def _is_mapping(kind: Any) -> bool:
    return get_origin(kind) is collections.abc.Mapping


def _default(field: FieldInfo) -> str:
    """The default in YAML notation."""
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, frozenset):
        default = sorted(default)
    return f"`{default}`" if isinstance(default, str) else f"`{json.dumps(default)}`"


def _type(field: FieldInfo) -> str:
    """The type in words, with its bounds."""
    words = {"ge": "at least", "gt": "above", "lt": "below", "le": "at most"}
    bounds = [
        f", {word} {getattr(bound, name):.9g}"
        for bound in field.metadata
        for name, word in words.items()
        if hasattr(bound, name)
    ]
    kind = field.annotation
    optional = type(None) in get_args(kind)
    if optional:
        (kind,) = (part for part in get_args(kind) if part is not type(None))
    return f"{_kind(kind)}{''.join(bounds)}{' or `null`' if optional else ''}"


def _kind(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if _is_mapping(kind):
        return "mapping"
    if get_origin(kind) in (tuple, frozenset):
        return f"list of {_kind(get_args(kind)[0])}"
    return {int: "integer", float: "number", str: "text", bool: "boolean"}[kind]


def register(app: typer.Typer) -> None:
    app.add_typer(config, name="config")
