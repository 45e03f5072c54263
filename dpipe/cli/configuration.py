"""Commands about the configuration: config."""

import json

import click

from dpipe.cli.options import JSON, OVERRIDE, show


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
        raise click.UsageError("--markdown goes without CONFIG and without --json.")
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
