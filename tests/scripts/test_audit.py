"""The verdict of an audit of the locked packages; a missing audit is reported."""

import re
import subprocess

import audit
import pytest
from locked import Entry


def package(name: str, **more: object) -> dict[str, object]:
    return {"name": name, "version": "1.0", **more}


def test_vulnerable_package_fails_and_is_named() -> None:
    found = {"id": "PYSEC-1", "fix_versions": ["1.1"]}
    unmended = {"id": "PYSEC-2", "fix_versions": []}
    answer = {"dependencies": [package("a", vulns=[found, unmended]), package("b", vulns=[])]}
    code, text = audit.verdict(answer)
    assert code == 1
    assert "a 1.0: PYSEC-1, mended in 1.1" in text
    assert "a 1.0: PYSEC-2, mended in no release yet" in text


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"dependencies": [package("a", skip_reason="?")]}, "NOT AUDITED for .*: no database"),
        ({"dependencies": [], "failed": "no route"}, "NOT AUDITED for .*: no route"),
        ({"dependencies": [package("a", vulns=[])]}, "no known vulnerability in 1 packages$"),
        (
            {"dependencies": [package("a", vulns=[]), package("b", skip_reason="?")]},
            "in 1 packages; NOT AUDITED: b",
        ),
    ],
)
def test_missing_audit_is_reported(answer: dict[str, object], message: str) -> None:
    code, text = audit.verdict(answer)
    assert code == 0
    assert re.search(message, text)


def test_audit_that_fails_is_not_taken_for_a_clean_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(argv: list[str], **settings: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(argv, 1, stdout="", stderr="first\nno such module\n")

    monkeypatch.setattr(audit.subprocess, "run", run)
    answer = audit.report([Entry("a", "1.0", ["a==1.0 --hash=sha256:0"])])
    assert audit.verdict(answer) == (0, "NOT AUDITED for known vulnerabilities: no such module")
