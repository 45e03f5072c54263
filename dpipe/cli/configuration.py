"""Commands about the configuration: config, convert."""

import json
from pathlib import Path
from typing import Any

import click

from dpipe.cli.options import JSON, OVERRIDE, show
from dpipe.errors import ConfigError


@click.command()
@click.argument("config", type=click.Path(dir_okay=False), required=False)
@OVERRIDE
@JSON
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown, without CONFIG.")
def config(
    config: str | None, overrides: tuple[str, ...], as_json: bool, as_markdown: bool
) -> None:
    """Print every configuration key, or what the file CONFIG comes to.

    Without CONFIG: each key with its values, default and meaning. With CONFIG: the value of each
    key and from where it is, as a TOML file of the same meaning.

    \b
    Examples:
      dpipe config
      dpipe config job.toml -o model.preset=gpt3-xl
    """
    if as_markdown and (as_json or config is not None):
        raise click.UsageError("--markdown cannot be combined with CONFIG or --json.")
    if config is None:
        if overrides:
            raise click.UsageError("-o overrides a key of a file: name CONFIG.")
        show(_reference(as_json, as_markdown))
    else:
        show(_effective(config, overrides, as_json))


def _reference(as_json: bool, as_markdown: bool) -> str:
    from dpipe.config import reference

    if as_json:
        return json.dumps(reference.as_json(), indent=1)
    if as_markdown:
        return reference.markdown()
    return reference.text()


def _effective(path: str, overrides: tuple[str, ...], as_json: bool) -> str:
    from dpipe.config import effective

    settings = effective.settings(path, overrides)
    if as_json:
        return json.dumps(effective.as_json(settings), indent=1)
    return effective.text(settings)


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--to", "target", type=click.Path(dir_okay=False), help="The TOML file to write.")
def convert(file: str, target: str | None) -> None:
    """Make a configuration of axolotl's FILE (YAML), and say what has no counterpart.

    \b
    Example:
      dpipe convert axolotl.yaml --to finetune.toml
    """
    from dpipe.convert.axolotl import converted

    text, left_out = converted(read_yaml(Path(file)))
    if target is None:
        show(text)
    elif Path(target).exists():
        raise ConfigError(f"{target} exists: name another file with --to")
    else:
        Path(target).write_text(text, "utf-8")
    for line in left_out:
        click.echo(f"{file}: {line}", err=True)


def read_yaml(path: Path) -> dict[str, Any]:
    """Raises `ConfigError` for what is no YAML table."""
    from dpipe.hub.extra import extra_library

    yaml = extra_library("yaml", "dpipe convert")
    try:
        table = yaml.safe_load(path.read_bytes())
    except (OSError, RecursionError, ValueError, yaml.YAMLError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"{path} is not YAML: {text[:300]}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path} must be a YAML table of keys, as axolotl reads it")
    return table
