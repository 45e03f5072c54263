"""What a lab must not leave."""

from collections.abc import Iterator
from pathlib import Path

from netem import lab, shell


def left_of(name: str) -> list[str]:
    """Namespaces, folders and processes of a lab."""
    namespaces = [
        word
        for word in shell.run(["ip", "netns", "list"]).split()
        if word.startswith(f"dpipe-{name}-")
    ]
    folder = lab.STATE / name
    return (
        namespaces
        + [str(folder)] * folder.exists()
        + [pid for pid, line in _processes() if f"{folder}/" in line]
    )


def _processes() -> Iterator[tuple[str, str]]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.parent.name, path.read_bytes().decode(errors="replace")
        except OSError:  # it has ended since
            continue
