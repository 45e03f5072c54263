"""The tokenizer and the chat template of a published model, and what is said of broken ones."""

import json
import sys

import pytest

from dpipe.config.load import build
from dpipe.data.rows import local_files, read_rows
from dpipe.errors import ConfigError, DataError
from dpipe.export.run import export_folder
from dpipe.hub.extra import extra_library, hub_function
from dpipe.store.run_folder import save_configuration

published = pytest.importorskip("hub.published")
words = pytest.importorskip("dpipe.hub.words")
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


@pytest.fixture
def folder(tmp_path):
    """A configuration alone: a tokenizer needs no weights."""
    name, _ = published.FAMILIES["llama"]
    getattr(published.transformers, name)(**published.SIZES).save_pretrained(tmp_path)
    return tmp_path


def words_of(folder):
    return words.Words(build({"model": {"hf": str(folder)}}))


def test_chat_is_written_by_the_template(folder):
    published.save_tokenizer(folder)
    found = words_of(folder)
    text = found.chat(CHAT[:1], asks=True)
    assert text == "<|user|>hi<|end|><|assistant|>"
    assert found.decode(found.encode(text)) == text
    assert found.chat(CHAT) == text + "yo<|end|>"
    assert found.end == found.encode("<|end|>")[0]
    assert list(found.start) == []


def test_tokens_before_a_text_are_those_that_the_tokenizer_puts_there(folder):
    published.save_tokenizer(folder, start="<|user|>")
    found = words_of(folder)
    assert list(found.start) == found.encode("<|user|>")


def test_folder_without_a_tokenizer_is_refused(folder):
    with pytest.raises(DataError, match=r"has no tokenizer .*copy tokenizer.json and"):
        words_of(folder)


def test_tokenizer_of_another_model_is_refused(folder):
    published.save_tokenizer(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 50}))
    with pytest.raises(DataError, match=r"has 97 entries, and the model 50: it is another model's"):
        words_of(folder)


def test_model_without_a_template_is_refused_for_chats(folder):
    published.save_tokenizer(folder, template=None)
    found = words_of(folder)
    assert not found.has_template
    with pytest.raises(DataError, match=r"no chat template: take an instruct model, or"):
        found.chat(CHAT)


def test_template_that_refuses_turns_says_why(folder):
    published.save_tokenizer(folder, template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"refuses these turns: .*roles must alternate"):
        words_of(folder).chat(CHAT)


def test_extra_that_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "dpipe.hub.words")
    with pytest.raises(ConfigError, match=r"model.hf needs transformers: pip install 'dpipe\[hf"):
        hub_function("words:Words")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"\[adapter\] needs peft: pip install 'dpipe\[hf"):
        extra_library("peft", "[adapter]")
    monkeypatch.setitem(sys.modules, "pyarrow.ipc", None)
    with pytest.raises(ConfigError, match=r"data.files .*rows.arrow needs pyarrow"):
        list(read_rows(local_files([tmp_path / "rows.arrow"])))


def test_run_of_another_model_is_not_exported(tmp_path):
    save_configuration(tmp_path, build({}))
    with pytest.raises(
        ConfigError, match=r"model.layers 'gpt', .*export is for runs with model.hf"
    ):
        export_folder(tmp_path, tmp_path / "out")
