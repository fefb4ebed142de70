"""`legato models` and `legato check`: lists supported models, and checks whether one would load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.settings.model_folder import hub_model, model_folder, sampling_defaults
from app.terminal import WRONG_USAGE, fail


def models() -> None:
    """List the supported architectures and weight formats."""
    from actors.stage.folder_check import families, formats

    for name, description in families().items():
        typer.echo(f"{name}: {description}")
    typer.echo("\nFormats of weights:")
    for name, description in formats().items():
        typer.echo(f"{name}: {description}")


def check(
    folder: Annotated[
        Path,
        typer.Argument(help="A Hugging Face folder, a GGUF file, or a name on the hub (org/name)."),
    ],
    tensor_ranks: Annotated[int, typer.Option(min=1, help="Ranks to split it over.")] = 1,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages to split it into.")] = 1,
) -> None:
    """Say whether a model would load, and describe it, without loading it; exit 2 with the
    reason if it would not. Of a name on the hub, its weights are downloaded, once its config and
    tokenizer would do."""
    from actors.stage.folder_check import check_config, check_folder
    from app.text.chat_template import TemplateBusy, TemplateError
    from app.text.processor import check_templates

    try:
        if hub_model(name := str(folder)) is not None:  # what is small first
            check_config(found := model_folder(name), tensor_ranks, stages)
            check_templates(str(found))
        found = model_folder(name, with_weights=True)
        described = check_folder(found, tensor_ranks, stages)
        check_templates(str(found))
        defaults, wrong = sampling_defaults(found)
        recommended = ", ".join(f"{k} {v}" for k, v in defaults.items())
        typer.echo(f"{folder}: ok. {described}")
        for problem in wrong:
            typer.echo(f"Not recommended to requests: {problem}")
        if recommended:
            typer.echo(f"Unless requests or `model.sampling_defaults` say otherwise: {recommended}")
    except ValueError as error:
        fail(error, code=WRONG_USAGE)
    except TemplateError as error:
        fail(f"{folder}: {error}", code=WRONG_USAGE)
    except TemplateBusy as busy:
        fail(busy)


def register(app: typer.Typer) -> None:
    app.command("models")(models)
    app.command("check")(check)
