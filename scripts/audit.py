"""Compare the locked packages with the known vulnerabilities, by pip-audit.

It asks a database that lists them. Where none can be reached it says so, and exits with 0: nobody
is told that all is well. Exit code 1: a package is known to be vulnerable.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from locked import LOCK, Entry, entries

_OPTIONS = ("--require-hashes", "--disable-pip", "--progress-spinner=off", "--format=json")
_TIMEOUT_S = 300


def report(locked: Sequence[Entry]) -> dict[str, Any]:
    """What pip-audit says of these packages, as it writes JSON."""
    lines = [line for entry in locked for line in entry.lines]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lines))
        file.flush()
        process = subprocess.run(
            [sys.executable, "-m", "pip_audit", "--requirement", file.name, *_OPTIONS],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    try:
        audit: dict[str, Any] = json.loads(process.stdout)
    except json.JSONDecodeError:
        last = (process.stderr.strip().splitlines() or ["it says nothing"])[-1]
        return {"dependencies": [], "failed": last}
    return audit


def verdict(audit: dict[str, Any]) -> tuple[int, str]:
    """The exit code, and what to say."""
    packages = audit["dependencies"]
    vulnerable = [
        f"{package['name']} {package['version']}: {found['id']}, mended in "
        f"{', '.join(found['fix_versions']) or 'no release yet'}"
        for package in packages
        for found in package.get("vulns", ())
    ]
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    audited = len(packages) - len(skipped)
    if vulnerable:
        return 1, "\n".join(["known vulnerabilities:", *vulnerable])
    if not audited:
        why = audit.get("failed") or "no database of vulnerabilities answers here"
        return 0, f"NOT AUDITED for known vulnerabilities: {why}"
    text = f"no known vulnerability in {audited} packages"
    if skipped:
        text += f"; NOT AUDITED: {', '.join(skipped)}"
    return 0, text


def main() -> None:
    locked = entries(LOCK.read_text(encoding="utf-8"))
    audit = report(locked[:1])
    # One package first: without a database it would ask in vain for each of them.
    if any("vulns" in package for package in audit["dependencies"]):
        audit = report(locked)
    code, text = verdict(audit)
    print(f"scripts/audit.py: {text}")
    sys.exit(code)


if __name__ == "__main__":
    main()
