"""Files of pretrained models: in one piece or in several, and what is said of those that do not fit together."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megamem.errors import ConversionError
from megamem.hf.source import CONFIG, INDEX, SINGLE, Source, open_source

TENSORS = {name: torch.full((2, 3), float(value)) for value, name in enumerate(("a", "b", "c"))}


def write(folder, files, weight_map=None, config='{"model_type": "llama"}'):
    """A model's folder. files: names of the tensors in each safetensors file."""
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(config)
    for file, names in files.items():
        save_file({name: TENSORS[name] for name in names}, folder / file)
    if weight_map is not None:
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("parts", [1, 2])
def test_tensors_are_found_wherever_they_lie(tmp_path, parts):
    if parts == 1:
        write(tmp_path, {SINGLE: "abc"})
    else:
        write(tmp_path, {"1.safetensors": "ac", "2.safetensors": "b"}, dict(zip("abc", "121", strict=True)))
        index = {name: f"{number}.safetensors" for name, number in zip("abc", "121", strict=True)}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": index}))
    source = open_source(tmp_path)
    assert source.config == {"model_type": "llama"}
    assert source.names == {"a", "b", "c"}
    assert torch.equal(source.get("b"), TENSORS["b"])
    assert source.get("d") is None
    assert source.unused() == {"a", "c"}, "what nobody asked for is told"


def test_tokenizers_lie_beside_the_weights(tmp_path):
    source = open_source(write(tmp_path, {SINGLE: "a"}))
    assert source.tokenizer(tmp_path / "scratch") is None
    (tmp_path / "tokenizer.model").touch()
    assert source.tokenizer(tmp_path / "scratch") == tmp_path / "tokenizer.model"
    (tmp_path / "vocab.json").touch()
    assert source.tokenizer(tmp_path / "scratch") == tmp_path


def test_a_vocabulary_that_transformers_does_not_know(tmp_path, monkeypatch):
    def unknown(*_, **__):
        raise KeyError("tokens")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", unknown)
    with pytest.raises(ConversionError, match=r"a\.gguf: its tokenizer cannot be read \('tokens'\)"):
        Source(tmp_path, {}, {}, gguf="a.gguf").tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "weight_map", "said"),
    [
        ({"1.safetensors": "ab"}, {"a": "1.safetensors", "b": "2.safetensors"}, "2.safetensors: cannot be read"),
        (
            {"1.safetensors": "a", "2.safetensors": "b"},
            {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"},
            f"1.safetensors: b is missing, which {INDEX} says it holds",
        ),
        ({}, None, ": holds no safetensors; save the model with save_pretrained of a current transformers first"),
    ],
)
def test_files_that_do_not_fit_together(tmp_path, files, weight_map, said):
    with pytest.raises(ConversionError) as refused:
        open_source(write(tmp_path, files, weight_map))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "said"), [("[]", "is no JSON object"), ("{", "is not JSON ("), ('"llama"', "is no JSON object")]
)
def test_a_configuration_that_is_none(tmp_path, config, said):
    with pytest.raises(ConversionError) as refused:
        open_source(write(tmp_path, {SINGLE: "a"}, config=config))
    assert f"{tmp_path / CONFIG}: {said}" in str(refused.value)


def test_a_folder_without_a_configuration(tmp_path):
    with pytest.raises(ConversionError, match=r"config\.json: cannot be read \(No such file or directory\)"):
        open_source(tmp_path)
