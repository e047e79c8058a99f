"""A pretrained model's files: its configuration and its tensors one by one, never a pickle."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoints.weights import IMPORTED_MODEL, IMPORTED_WEIGHTS
from megamem.config.load import read_yaml
from megamem.errors import ConversionError

if TYPE_CHECKING:
    import gguf
    from transformers import PreTrainedModel

IMPORTED = "imported"
"""Architecture of what `megamem convert from-hf` has written: names and tensors are ours already."""
INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"


class Source:
    """Configuration and tensors of a pretrained model."""

    def __init__(
        self, folder: Path, config: Mapping[str, Any], places: Mapping[str, Path | Tensor], gguf: str | None = None
    ) -> None:
        """Note where tensors lie.

        places: by tensor name, the safetensors file it lies in, or the tensor [...] itself. gguf: name of such a file.
        """
        self.folder, self.config, self._places, self._gguf = folder, config, places, gguf
        self._taken: set[str] = set()

    @property
    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._places)

    def get(self, name: str) -> Tensor | None:
        """One tensor; None if there is none of this name."""
        place = self._places.get(name)
        if place is None:
            return None
        self._taken.add(name)
        if isinstance(place, Tensor):
            return place
        with safe_open(place, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def tokenizer(self, scratch: Path) -> Path | None:
        """Folder with the tokenizer's files or a SentencePiece model, None if there is none.

        scratch: where it may be unpacked. Raises: ConversionError for a GGUF file whose tokenizer cannot be read.
        """
        if self._gguf is not None:
            from transformers import AutoTokenizer

            try:
                AutoTokenizer.from_pretrained(self.folder, gguf_file=self._gguf).save_pretrained(scratch)
            except Exception as error:  # transformers raises all kinds for vocabularies it does not know
                raise ConversionError(
                    f"{self.folder / self._gguf}: its tokenizer cannot be read ({' '.join(str(error).split())[:200]})"
                ) from None
            return scratch
        if any((self.folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
            return self.folder
        pieces = self.folder / "tokenizer.model"
        return pieces if pieces.is_file() else None

    def unused(self) -> set[str]:
        """Tensors nobody asked for."""
        return self.names - self._taken


def open_source(path: Path) -> Source:
    """Raise ConversionError naming the file that is missing or cannot be read."""
    if path.is_file() and path.suffix == ".gguf":
        return _open_gguf(path)
    if not path.is_dir():
        raise ConversionError(f"{path}: no such folder or GGUF file")
    if (path / IMPORTED_MODEL).is_file():
        weights = path / IMPORTED_WEIGHTS
        model = read_yaml(path / IMPORTED_MODEL).get("model")
        return Source(path, {"model_type": IMPORTED, "model": model}, dict.fromkeys(_names(weights), weights))
    config = _json(path / CONFIG)
    if (path / INDEX).is_file():
        places = {name: path / file for name, file in _json(path / INDEX).get("weight_map", {}).items()}
        held = {file: set(_names(file)) for file in sorted(set(places.values()))}
        if missing := sorted(name for name, file in places.items() if name not in held[file]):
            raise ConversionError(f"{places[missing[0]]}: {missing[0]} is missing, which {INDEX} says it holds")
    elif (path / SINGLE).is_file():
        places = dict.fromkeys(_names(path / SINGLE), path / SINGLE)
    else:
        pickled = sorted(file.name for file in path.glob("*.bin"))
        why = f"holds pickled weights only ({pickled[0]}), which are not read" if pickled else "holds no safetensors"
        raise ConversionError(f"{path}: {why}; save the model with save_pretrained of a current transformers first")
    return Source(path, config, places)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConversionError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConversionError(f"{path}: is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConversionError(f"{path}: is no JSON object")
    return value


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise ConversionError(f"{path}: cannot be read ({error})") from None


def _scales_rotations(reader: gguf.GGUFReader) -> bool:
    """Return whether a GGUF file has scaled rotary positions, which transformers passes over when it reads one."""
    scalings = [field.contents() for name, field in reader.fields.items() if name.endswith(".rope.scaling.type")]
    return any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors) or any(
        scaling != "none" for scaling in scalings
    )


def _check_whole(path: Path, reader: gguf.GGUFReader) -> None:
    """Raise ConversionError for a GGUF file that transformers would read in part, and fill up with random weights."""
    if (parts := reader.fields.get("split.count")) and parts.contents() > 1:
        raise ConversionError(f"{path}: is one of {parts.contents()} parts; merge them (llama-gguf-split --merge)")
    if any(field.contents() for name, field in reader.fields.items() if name.endswith(".expert_count")):
        raise ConversionError(f"{path}: is a mixture of experts, which is not supported")
    if _scales_rotations(reader):
        raise ConversionError(f"{path}: scaled rotary positions are not read from GGUF; take the model's safetensors")


def _check_all_read(path: Path, reader: gguf.GGUFReader, model: PreTrainedModel, missing: Collection[str]) -> None:
    """Raise ConversionError where the model lacks tensors of a GGUF file, or the file some of the model.

    transformers passes over what it does not know, and draws what it does not find.
    """
    if missing:
        raise ConversionError(f"{path}: holds nothing for {min(missing)}")
    # those that are tied count once
    if (held := len(reader.tensors)) > (read := len(list(model.named_parameters()))):
        raise ConversionError(
            f"{path}: holds {held} tensors, of which transformers reads {read} for a {model.config.model_type}; "
            "take the model's safetensors"
        )


def _open_gguf(path: Path) -> Source:
    """Weights that transformers puts back from llama.cpp's quantised form. Needs the `gguf` package."""
    try:
        import gguf
    except ImportError:
        raise ConversionError(
            f"{path}: reading GGUF needs the packages gguf and accelerate; pip install them"
        ) from None
    from transformers import AutoModelForCausalLM

    try:
        reader = gguf.GGUFReader(path)
        _check_whole(path, reader)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype="float32", output_loading_info=True
        )
    except ConversionError:
        raise
    except Exception as error:  # transformers and gguf raise all kinds for files they cannot read
        raise ConversionError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]})") from None
    model, found = loaded
    _check_all_read(path, reader, model, found["missing_keys"])
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    config = model.config.to_dict()
    config.pop("quantization_config", None)  # of the file; what was loaded is whole
    return Source(path.parent, config, tensors, gguf=path.name)
