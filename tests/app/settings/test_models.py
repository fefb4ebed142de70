"""`models`: several models behind one address, each with settings of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.cli.serve_config import load_config, num_cpus_of, set_address
from app.settings.load import parse, resolve
from app.settings.model_folder import SettingsError
from app.settings.models import (
    engine_groups,
    expand,
    parse_each,
    resolve_each,
    served_name,
)

DEMO = "configs/models/demo"


def two(**second: Any) -> dict[str, Any]:
    return {
        "models": [
            {"model": {"path": DEMO, "name": "a"}, "slo": {"tbt_ms": 50}},
            {"model": {"path": DEMO, "name": "org/b c"}, **second},
        ],
        "slo": {"tbt_ms": 100, "ttft_ms": 2000},
        "scheduling": {"max_requests": 8},
        "listen": "127.0.0.1:8000",
    }


def adapters(*names: str) -> dict[str, Any]:
    return {"adapters": {"max_adapters": 4, "paths": {name: f"folder-{name}" for name in names}}}


def deployments(args: dict[str, Any]) -> list[str]:
    return [group.deployment for group in engine_groups(args)]


def test_one_model_is_as_it_always_was() -> None:
    args = {"model": {"path": DEMO}, "slo": {"tbt_ms": 50}}
    assert expand(args) == [args]
    assert parse_each(args) == [parse(args)]
    assert deployments(args) == ["Engine"]


def test_an_entry_takes_from_beside_models_what_it_does_not_say() -> None:
    args = two(scheduling={"max_requests": 2}, fleet={"routing": "least_loaded"})
    first, second = parse_each(args)
    assert [served_name(s) for s in (first, second)] == ["a", "org/b c"]
    assert (first.slo.tbt_ms, first.slo.ttft_ms) == (50, 2000)  # type: ignore[attr-defined]
    assert second.slo.tbt_ms == 100  # type: ignore[attr-defined]
    assert [c.scheduler.max_requests for c in resolve_each(args)] == [8, 2]
    assert first.fleet is not None
    assert second.fleet is not None
    assert (first.fleet.routing, second.fleet.routing) == ("slack", "least_loaded")
    assert first.listen == second.listen
    assert deployments(args) == ["Engine-a", "Engine-org-b-c"]


def test_every_model_has_adapters_of_its_own() -> None:
    args = two(**adapters("x", "y"))
    assert [settings.adapter_names for settings in parse_each(args)] == [(), ("x", "y")]
    args["models"][0] |= {"adapters": {"max_adapters": 2, "max_rank": 8, "paths": {"z": "f"}}}
    first, second = resolve_each(args)
    assert (first.stage.max_adapters, first.stage.max_adapter_rank) == (2, 8)
    assert (second.stage.max_adapters, second.stage.max_adapter_rank) == (4, 16)
    folders = [[(slot, Path(path).name) for slot, path in one.adapters] for one in (first, second)]
    assert folders == [[(0, "f")], [(0, "folder-x"), (1, "folder-y")]]


def test_a_model_of_the_hub_is_served_by_its_name() -> None:
    names = {"org/name@v1": "org/name", "org/name/q4.gguf": "q4", "org/b/q4.gguf@v1": "q4"}
    for path, name in names.items():
        assert served_name(parse({"model": {"path": path}})) == name
        assert served_name(parse({"model": {"path": path, "name": "own"}})) == "own"


def test_every_role_is_a_deployment_of_its_own() -> None:
    divided = {"fleet": {"way": "split"}, "kv": {"shared_cache_gib": 1}}
    one = {"model": {"path": DEMO}, **divided}
    assert deployments(one) == ["Engine-prefill", "Engine-decode"]
    assert {group.fleet for group in engine_groups(one)} == {"Engine"}
    groups = engine_groups(two(**divided))
    assert [(g.fleet, g.deployment, g.model) for g in groups] == [
        ("Engine-a", "Engine-a", 0),
        ("Engine-org-b-c", "Engine-org-b-c-prefill", 1),
        ("Engine-org-b-c", "Engine-org-b-c-decode", 1),
    ]
    named = [{"model": {"path": DEMO, "name": n}} for n in ("a", "a-decode")]
    named[0] |= divided
    with pytest.raises(SettingsError, match="2 deployments would be named Engine-a-decode"):
        engine_groups({"models": named})


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (two() | {"slp": {}}, "slp: unknown setting; did you mean 'slo'"),
        (two() | {"slo": {"tbt": 1}}, "slo.tbt: unknown setting"),
        (two() | {"kv": 3}, "kv: must be a mapping"),
        (two(kv=4), "models.1: kv: must be"),
        (two(slo={"tbt": 2}), "models.1: slo.tbt: unknown"),
        (two(slo={"tbt": 2}, kv={}) | {"kv": {"blocksize": 1}}, "kv.blocksize: unknown"),
    ],
)
def test_what_is_wrong_is_named_where_it_is_written(args: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_each(args)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"models": []}, "models: must be a list of at least one"),
        ({"models": "demo"}, "models: must be a list"),
        ({"models": [DEMO]}, "models.0: must be a mapping"),
        ({"models": [{"slo": {}}]}, "models.0: model: Field required"),
        (two(listen="127.0.0.1:1"), "models.1.listen: not a setting of one model"),
        (two(slo={"tbt": 1}), "models.1: slo.tbt: unknown setting; did you mean 'tbt_ms'"),
        (two(model={"path": "nowhere"}), "models.1: model.path: no folder 'nowhere'"),
        (two(model={"path": DEMO, "name": "a"}), "2 are named 'a'"),
        (
            {"models": [{"model": {"path": DEMO, "name": n}} for n in ("a b", "a-b")]},
            "2 are written 'a-b'",
        ),
        (two() | adapters("x"), "adapters: with `models`, put them into the entries"),
        (two(**adapters("x", "a")), "models.1: adapters.paths.a: the name is that of a model"),
        (
            {"models": [own | adapters("x") for own in two()["models"]]},
            "models.1: adapters.paths.x: the name is that of an adapter of 'a'",
        ),
        (two(adapters={"max_adapters": 0}), "models.1: adapters.max_adapters: "),
        (two(adapters={"max_adapter": 1}), "did you mean 'max_adapters'"),
        ({"model": {"path": DEMO}, **adapters("demo")}, "adapters.paths.demo: the name is that"),
        (DEMO, "args: must be a mapping, such as {model: "),
        (None, "args: must be a mapping"),
        ({"model": {"path": DEMO}, "num_replicas": 2}, "num_replicas: unknown setting; it is one"),
        ({"applications": []}, "applications: unknown setting; it is one of Serve's, in a whole"),
    ],
)
def test_what_cannot_be_is_named(args: Any, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve_each(args)
    assert said in str(caught.value)


@pytest.mark.ray  # counting CPUs imports Ray
def test_the_example_is_two_engines_behind_a_front() -> None:
    config = load_config(Path("configs/serve/two_models.yaml"))
    assert set_address(config, None, 8123) == ("127.0.0.1", 8123)
    assert num_cpus_of(config) == 2 * (0.5 + 2 * 1.0)
    args = config["applications"][0]["args"]
    assert args["listen"] == "127.0.0.1:8123"
    named = {deployment["name"] for deployment in config["applications"][0]["deployments"]}
    assert named == set(deployments(args))


@pytest.mark.parametrize(
    ("shared", "own", "key"),
    [
        ({"kv": {"memory_fraction": 0.5}}, {"kv": {"memory_gib": 1}}, "kv.memory_fraction"),
        ({"kv": {"swap_gib": 1}}, {"scheduling": {"swap": "never"}}, "kv.swap_gib"),
        (
            {"parallel": {"gpus_per_rank": 0.5, "device": "cuda"}},
            {"parallel": {"device": "cpu"}},
            "parallel.gpus_per_rank",
        ),
        (
            {"parallel": {"device": "cuda", "tensor_ranks": 2, "symmetric_memory": True}},
            {"parallel": {"tensor_ranks": 1}},
            "parallel.symmetric_memory",
        ),
    ],
)
def test_what_is_shared_may_be_without_effect_on_some(
    shared: dict[str, Any], own: dict[str, Any], key: str
) -> None:
    models = [{"model": {"path": DEMO, "name": name}} for name in "ab"]
    args = {**shared, "models": [models[0], {**models[1], **own}]}
    section, name = key.split(".")
    first, second = expand(args)
    assert first[section][name] == shared[section][name]
    assert name not in second[section]
    assert resolve_each(args) == [resolve(parse(first)), resolve(parse(second))]
    with pytest.raises(SettingsError, match=rf"^{key}: .*, in every one of `models`"):
        resolve_each({**shared, "models": [{**model, **own} for model in models]})
    again = {**own, section: {**own.get(section, {}), name: shared[section][name]}}
    with pytest.raises(SettingsError, match=rf"^models\.1: {key}: "):
        resolve_each({**shared, "models": [models[0], {**models[1], **again}]})
