"""A GGUF file where a model folder may stand: settings, `legato serve` and `legato check`."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from typer.testing import CliRunner

from app.cli.main import app
from app.cli.serve_config import load_config
from app.settings.load import parse, resolve
from app.settings.model_folder import SettingsError, model_folder
from app.settings.models import served_name
from tests.actors.stage.weights import gguf_files


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEGATO_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    gguf_files.write(path, "qwen2", gguf_files.Kind.Q8_0)
    return path


def test_its_settings_are_those_of_a_folder(file: Path) -> None:
    args = load_config(file)["applications"][0]["args"]
    settings = parse(args)
    assert served_name(settings) == "tiny"
    config = resolve(settings)
    assert config.stage.max_model_len == 256
    folder = Path(config.stage.model_path)
    assert folder.parent == file.parent / "cache" / "gguf"
    assert (folder / "model.gguf").resolve() == file
    assert resolve(parse({**args, "model": {"path": str(file.parent)}})).stage == config.stage


def test_parts_are_named_by_the_first_alone(file: Path) -> None:
    """Also by a link, beside which are those of the others, as in the hub's cache."""
    gguf_files.write(file.parent / "big.gguf", "qwen2", max_tensors=30)
    names = [f"big-0000{number}-of-00002.gguf" for number in (1, 2)]
    (file.parent / "links").mkdir()
    for number, name in enumerate(names):
        blob = (file.parent / name).rename(file.parent / f"blob-{number}")
        (file.parent / "links" / name).symlink_to(blob)
    args = load_config(file.parent / "links" / names[0])["applications"][0]["args"]
    assert served_name(parse(args)) == "big"
    assert Path(resolve(parse(args)).stage.model_path).name.startswith("big-")


def test_how_a_model_of_embeddings_pools_is_kept(file: Path) -> None:
    assert not (model_folder(str(file)) / "1_Pooling").exists()
    last = gguf.PoolingType.LAST
    gguf_files.write(
        file, "qwen2", gguf_files.Kind.Q8_0, tune=lambda writer: writer.add_pooling_type(last)
    )
    said = (model_folder(str(file)) / "1_Pooling/config.json").read_text()
    assert json.loads(said) == {"pooling_mode_lasttoken": True}


def test_a_file_that_cannot_be_read_names_the_setting(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(SettingsError, match=r"model\.path: .*tiny\.gguf is not a GGUF file or is"):
        resolve(parse({"model": {"path": str(file)}}))


def test_a_cache_that_cannot_be_written_is_named(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGATO_CACHE", str(file))
    with pytest.raises(SettingsError, match=r"model\.path: .* is kept in .*, see LEGATO_CACHE"):
        resolve(parse({"model": {"path": str(file)}}))


def test_formats_are_listed() -> None:
    found = CliRunner().invoke(app, ["models"])
    assert found.exit_code == 0
    lines = found.output.splitlines()
    assert any(line.startswith("gguf: F32, F16, Q4_0") for line in lines)
    assert any(line.startswith("compressed-tensors: pack-quantized") for line in lines)


def test_check_says_what_is_in_it(file: Path) -> None:
    found = CliRunner().invoke(app, ["check", str(file)])
    assert found.exit_code == 0
    assert "Qwen2ForCausalLM, 3 layers" in found.output
    assert "gguf (Q8_0)" in found.output
    file.write_bytes(b"GGUF")
    found = CliRunner().invoke(app, ["check", str(file)])
    assert found.exit_code == 2


def test_check_refuses_a_tokenizer_of_another_split(file: Path) -> None:
    gguf_files.write(file, "qwen2", tune=lambda writer: writer.add_tokenizer_pre("of-tomorrow"))
    found = CliRunner().invoke(app, ["check", str(file)])
    assert found.exit_code == 2
    assert "tokenizer.ggml.pre 'of-tomorrow' is not known" in " ".join(found.output.split())
