"""Installing the project at a commit, and what is refused before anything changes."""

import shutil

import pytest

DEAD = '[[host]]\naddress = "127.0.0.1"\nport = 1\nfolder = "{}"\n'


def test_commit_is_installed_and_found_again(fresh):
    commit = fresh.change({"new.txt": "new"})
    fresh("up")
    for number in range(2):
        assert (fresh.folder(number) / "commit").read_text().strip() == commit
        assert (fresh.folder(number) / "src/new.txt").read_text() == "new"
    (fresh.folder(0) / "src/new.txt").unlink()
    again = fresh("up")
    assert f"has {commit:.12}" in again.output
    assert not (fresh.folder(0) / "src/new.txt").exists()  # left alone: it has that commit


@pytest.mark.slow
def test_other_commit_takes_away_what_it_lacks_and_nothing_else(fresh):
    (fresh.folder(0) / "src/data").mkdir()
    fresh.change({"netem/__main__.py": "", "new.txt": "new"})
    fresh("up")
    there = {path.name for path in (fresh.folder(0) / "src").iterdir()}
    assert {"data", "new.txt", "scripts", ".venv"} <= there
    assert not (fresh.folder(0) / "src/netem/__main__.py").exists()


def test_uncommitted_change_is_reported(fresh):
    (fresh.repository / "scripts/setup").write_text("# changed")
    assert "note: 1 files differ from their last commit" in fresh("up").output


def test_host_that_does_not_answer_is_named_and_the_rest_untouched(bare):
    hosts = bare.write_hosts(DEAD.format(bare.root / "dead"), name="three.toml")
    done = bare("up", hosts=hosts)
    assert done.exit_code == 2
    assert (
        "host 127.0.0.1:1 does not answer: ssh: connect to host 127.0.0.1 port 1: Connection "
        "refused" in done.output
    )
    assert not bare.folder(0).exists()
    assert not bare.folder(1).exists()


def test_old_python_is_refused_before_anything_is_changed(bare):
    hosts = bare.write_hosts('python = "/bin/false"\n', name="old.toml")
    done = bare("up", hosts=hosts)
    assert done.exit_code == 2
    assert "host 127.0.0.2:" in done.output
    assert (
        "needs Python 3.11 or newer, and /bin/false is not; set python in the hosts file"
        in done.output
    )
    assert not bare.folder(0).exists()


@pytest.mark.slow
def test_failed_setup_is_shown_and_leaves_no_commit(fresh):
    fresh.change({"new.txt": "new"})
    (fresh.folder(1) / "src/broken").touch()
    done = fresh("up")
    assert done.exit_code == 1
    assert "host 127.0.0.2:" in done.output
    assert "no such package" in done.output
    assert not (fresh.folder(1) / "commit").exists()
    refused = fresh.run()
    assert refused.exit_code == 2
    assert (
        f"nothing is installed on 127.0.0.2:{fresh.port}; run scripts/cluster up" in refused.output
    )


def test_hosts_of_different_commits_do_not_run(fresh):
    (fresh.folder(1) / "commit").write_text("0123456789abcdef")
    refused = fresh.run()
    assert refused.exit_code == 2
    assert f"127.0.0.2:{fresh.port} has 0123456789ab; run scripts/cluster up" in refused.output


@pytest.mark.slow
def test_host_that_trains_is_not_changed(fresh):
    fresh.play("time.sleep(60)")
    assert fresh.run("--detach", "--name", "long").exit_code == 0
    commit = fresh.change({"new.txt": "new"})
    done = fresh("up")
    assert done.exit_code == 2
    assert "run long is still going; scripts/cluster down stops it" in done.output
    assert (fresh.folder(0) / "commit").read_text().strip() != commit


def test_revision_that_git_does_not_know_is_refused(bare):
    done = bare("up", "--commit", "nowhere")
    assert done.exit_code == 2
    assert "git rev-parse: fatal: Needed a single revision" in done.output


def test_existing_environment_is_used_unchanged(bare):
    """Its packages are checked, and scripts/setup is not run."""
    venv = bare.root / "venv/bin"
    venv.mkdir(parents=True)
    (venv / "python").write_text('#!/bin/sh\necho "$@" >>../../python.log\n')
    (venv / "python").chmod(0o755)
    hosts = bare.write_hosts(name="venv.toml", top=f'venv = "{bare.root}/venv"\n')
    assert bare("up", hosts=hosts).exit_code == 0
    said = (bare.root / "python.log").read_text()
    assert "-m grpc_tools.protoc" in said
    assert "import dpipe.run.build" in said
    assert not (bare.folder(0) / "src/.venv").exists()
    shutil.copy("/bin/false", venv / "python")
    bare.change({"new.txt": "new"})
    done = bare("up", hosts=hosts)
    assert done.exit_code == 1
    assert "failed (1)" in done.output


def test_environment_without_grpcio_tools_says_what_to_install(bare):
    venv = bare.root / "venv/bin"
    venv.mkdir(parents=True)
    (venv / "python").write_text('#!/bin/sh\ncase "$*" in *"import grpc_tools"*) exit 1 ;; esac\n')
    (venv / "python").chmod(0o755)
    done = bare("up", hosts=bare.write_hosts(name="venv.toml", top=f'venv = "{bare.root}/venv"\n'))
    assert done.exit_code == 1
    assert "pip install grpcio-tools" in done.output


def test_put_copies_beside_the_project(cloud, tmp_path):
    (tmp_path / "words.txt").write_text("words")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/one.txt").write_text("one")
    assert cloud("put", tmp_path / "words.txt", tmp_path / "texts").exit_code == 0
    for name in ("words.txt", "texts/one.txt"):
        assert (cloud.folder(1) / "src" / name).read_text() == (tmp_path / name).read_text()
