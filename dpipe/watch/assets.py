"""The files of the page, which need no server."""

from importlib.resources import files


def page_files() -> dict[str, bytes]:
    """The files of the page by their name."""
    found = {}
    for file in files("dpipe.watch").joinpath("page").iterdir():
        found[file.name] = file.read_bytes()
    return found
