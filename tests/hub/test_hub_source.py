"""A model is fetched from a hub: what is needed of it, whole, and of one commit."""

import os
import subprocess

import pytest
from fakes.hub import FakeHub, Repository

from dpipe.config.load import build
from dpipe.errors import ConfigError
from dpipe.plan.run_plan import make_model, pinned
from dpipe.stage.model import materialise
from dpipe.store.run_folder import refuse_changes, save_configuration

published = pytest.importorskip("hub.published")
constants = pytest.importorskip("huggingface_hub.constants")
source_of_name = pytest.importorskip("dpipe.hub.model").source_of_name
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of a library's own session
TOKEN = "hf_secret"
COMMITS = ("1" * 40, "2" * 40)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """A model in several files."""
    folder = published.save("llama", tmp_path_factory.mktemp("published"))
    published.save_tokenizer(folder)
    whole = published.reference(folder)
    (folder / "model.safetensors").unlink()
    whole.save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.fixture
def hub(shards, tmp_path, monkeypatch):
    """The model as org/tiny, and a cache that is empty."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    source_of_name.cache_clear()
    with FakeHub({"org/tiny": Repository(shards)}) as server:
        # It reads the environment once, when it is imported.
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        yield server
    source_of_name.cache_clear()


def config_of(name="org/tiny", **model):
    return build({"model": {"hf": name, "context": 11, **model}})


def weights_sent(hub):
    return {name for name in hub.sent if name.endswith(".safetensors")}


def test_only_the_shards_of_a_rank_are_fetched(hub, shards):
    model = make_model(config_of())
    assert not weights_sent(hub), "a prediction needs no weights"
    materialise(model, 5, 0, "cpu")
    last = weights_sent(hub)
    materialise(model, 4, 0, "cpu")
    materialise(model, 5, 0, "cpu")
    every = {path.name for path in shards.glob("*.safetensors")}
    assert len(last) <= 2 and last < weights_sent(hub) < every
    for name in weights_sent(hub):
        assert hub.sent[name] == (shards / name).stat().st_size, "each byte once"


@pytest.mark.parametrize("resets", [False, True], ids=["ended", "reset"])
def test_download_that_is_cut_goes_on(hub, shards, resets):
    model = make_model(config_of())
    hub.cut_after = [3000]
    hub.resets = resets
    layer = materialise(model, 2, 0, "cpu")
    plain = make_model(config_of(str(shards)))
    for name, value in materialise(plain, 2, 0, "cpu").state_dict().items():
        assert value.equal(layer.state_dict()[name])


def test_files_are_of_one_commit_when_a_branch_moves(hub, shards):
    config = config_of()
    model = make_model(config)
    assert pinned(config).model.revision == COMMITS[0]
    hub.repositories["org/tiny"].commit = COMMITS[1]
    with pytest.raises(ConfigError, match="'1{40}' is not a branch, tag or commit"):
        materialise(model, 5, 0, "cpu")


def test_model_that_may_not_be_read_is_refused_with_what_to_do(hub, monkeypatch, shards):
    hub.repositories["org/private"] = Repository(shards, token=TOKEN)
    with pytest.raises(ConfigError, match=r"nor a model on .*HF_TOKEN is not set.*check the name"):
        make_model(config_of("org/private"))
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError, match="the token of HF_TOKEN may not read it"):
        make_model(config_of("org/private"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    materialise(make_model(config_of("org/private")), 5, 0, "cpu")
    hub.repositories["org/gated"] = Repository(shards, gated=True)
    with pytest.raises(ConfigError, match=r"is gated: accept its terms at http.*/org/gated"):
        make_model(config_of("org/gated"))


def test_revision_that_is_not_there_is_refused(hub):
    with pytest.raises(ConfigError, match=r"model.revision 'v2' is not a branch.*leave it out"):
        make_model(config_of(revision="v2"))


def test_repository_without_a_configuration_is_refused(hub, tmp_path):
    (tmp_path / "model-Q4.gguf").write_bytes(b"GGUF")
    hub.repositories["org/quantised"] = Repository(tmp_path)
    with pytest.raises(ConfigError, match=r"no config.json.*hf download org/quantised FILE.gguf"):
        make_model(config_of("org/quantised"))


def test_cache_is_enough_without_a_network(hub, monkeypatch):
    materialise(make_model(config_of()), 5, 0, "cpu")
    hub.down = True
    asked = len(hub.asked)
    source_of_name.cache_clear()
    with pytest.raises(ConfigError, match=r"does not give it: .*check the network and HF_ENDPOINT"):
        make_model(config_of("org/other"))
    materialise(make_model(config_of()), 5, 0, "cpu")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    source_of_name.cache_clear()
    model = make_model(config_of())
    materialise(model, 5, 0, "cpu")
    with pytest.raises(ConfigError, match=r"not complete in the cache .*unset it, or fetch"):
        materialise(model, 2, 0, "cpu")
    assert len(hub.asked) - asked == 2, "offline, nothing is asked"


def test_run_that_goes_on_reads_the_commit_that_it_began_with(hub, tmp_path):
    config = config_of(revision="main").with_(run__folder=str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    save_configuration(tmp_path / "run", pinned(config))
    hub.repositories["org/tiny"].commit = COMMITS[1]
    source_of_name.cache_clear()
    assert pinned(config).model.revision == COMMITS[0]
    refuse_changes(config, ())
    elsewhere = config.with_(run__folder=str(tmp_path / "new"))
    assert pinned(elsewhere).model.revision == COMMITS[1]
    with pytest.raises(ConfigError, match="model.revision was '1{40}' and is '2{40}'"):
        refuse_changes(config.with_(model__revision=COMMITS[1]), ())


def test_environment_says_where_the_hub_is(hub, shards, warm_python, tmp_path):
    hub.repositories["org/tiny"].token = TOKEN
    home = tmp_path / "home"
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": TOKEN}
    code = "from dpipe.hub.source import find_source; print(find_source('org/tiny').folder)"
    done = subprocess.run(
        [warm_python, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert not weights_sent(hub)
    snapshot = home / "hub" / "models--org--tiny" / "snapshots" / COMMITS[0]
    assert done.stdout.strip() == str(snapshot)
    assert (snapshot / "config.json").read_bytes() == (shards / "config.json").read_bytes()
