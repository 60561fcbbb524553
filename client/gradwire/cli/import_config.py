"""``gradwire import-config``: a configuration of another trainer as one of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.text import plain


def import_config(
    file: Annotated[Path, typer.Argument(help="A YAML of Axolotl or LLaMA-Factory, or a dataset_info.json.")],
    out: Annotated[Path | None, typer.Argument(help="The file to write; by default RECIPE.yaml beside it.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Translate a configuration, and say of each key without a counterpart what became of it."""
    import yaml

    from gradwire.recipes.importing import imported
    from gradwire.recipes.settings import SettingsError

    try:
        imported_file = imported(file)
        target = out or file.with_name(f"{imported_file.recipe}.yaml")
        if target.exists() and not force:
            raise SettingsError(f"{target} exists: name another file, or --force")
        target.write_text(yaml.safe_dump(imported_file.settings, sort_keys=False, allow_unicode=True), encoding="utf-8")
    except (ValueError, OSError) as error:
        typer.secho(f"gradwire import-config: {plain(str(error))}", fg="red", err=True)
        raise typer.Exit(2) from None
    print(f"{target}: {len(imported_file.settings)} settings of the recipe {imported_file.recipe}")
    for key, what in imported_file.notes.items():
        print(plain(f"  {key}: {what}"))
    print(f"next: gradwire train {imported_file.recipe} {target} --dry-run")
