"""Weights that a run starts from: which file holds each parameter, whether they fit, and which parameters are new."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megamem.config.model import ModelConfig
from megamem.config.parts import BASE, ModelPart, StartWeights
from megamem.config.run import RunConfig
from megamem.errors import CheckpointError
from megamem.model.stage import Stage, build_stage, meta_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters

Shape = list[int]
Sources = dict[str, tuple[Path, str]]
"""Of each parameter that a file holds, the file and the parameter's name there."""
VOCABULARY = ("embedding.weight", "head.weight")
"""Plain names of matrices with a row for each token, as wide as the layers."""
ADDED = re.compile(r"layers\.\d+\.mixer\..*|side_rows\..*|memory_rows\..*|score_biases\..*")
"""Names of parameters that a memory may bring to a pretrained model."""
OF_MEMORY = ".mixer.memory."
"""Part of the names of parameters that belong to a memory beside attention (`added_memory`)."""


@dataclass(frozen=True)
class WeightsFile:
    """A safetensors file of whole weights by global name: what its header says."""

    path: Path
    shapes: Mapping[str, Shape]
    new_parameters: frozenset[str]
    """Parameters of the model that were not trained: they start as in a new run, or as the file says."""
    tokenizer: str | None
    """`Tokenizer.vocabulary_hash` of what the weights were trained with; None if the file does not say."""
    parts: Mapping[str, ModelPart]
    """The parts of the model that they are of; none of a plain decoder."""
    settings: Mapping[str, Any]
    """Fields of its model section that no tensor shows, as `rope_theta`."""


def whole_model(model: ModelConfig) -> Stage:
    """Return `meta_stage` of a model, which is built once for all who look at its parameters and change nothing."""
    return _whole_model(model.model_dump_json())


@lru_cache(maxsize=4)
def _whole_model(model_json: str) -> Stage:
    """Return `whole_model` of a model as JSON, which a cache can have as key."""
    return meta_stage(ModelConfig.model_validate_json(model_json))


_expected: dict[Path, tuple[ModelConfig, str | None]] = {}
"""Model and tokenizer of files that an earlier run of this process will write."""


def expect_weights(path: Path, model: ModelConfig, tokenizer: str | None) -> None:
    """Let `open_weights` answer for a file that a run will write, until it is there.

    tokenizer: the hash of its vocabulary, if it is known.
    """
    _expected[path] = model, tokenizer


def open_weights(path: Path) -> WeightsFile:
    """Read the header of a weights file. Raises CheckpointError if it cannot be read."""
    if path in _expected and not path.exists():
        model, tokenizer = _expected[path]
        return WeightsFile(path, _shapes(model), frozenset(), tokenizer, model.architecture.parts(model), {})
    try:
        found = path.stat()
        return _opened(path, found.st_mtime_ns, found.st_size)
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None


@lru_cache(maxsize=16)
def _opened(path: Path, changed: int, size: int) -> WeightsFile:
    """Return `open_weights`; the time of its last change and its size tell another file of the same name."""
    with safe_open(path, framework="pt") as file:
        said = file.metadata() or {}
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118, not a dict
    parts = {name: ModelPart.model_validate(part) for name, part in json.loads(said.get("parts", "{}")).items()}
    new_parameters = frozenset(json.loads(said.get("new_parameters", "[]")))
    settings = json.loads(said.get("settings", "{}"))
    return WeightsFile(path, shapes, new_parameters, said.get("tokenizer"), parts, settings)


def shown_files(files: StartWeights | None) -> str:
    """Return the names of weights files for a message."""
    return ", ".join(f"{part} {path}" for part, path in files.items()) if isinstance(files, dict) else str(files)


def new_parameters(config: RunConfig) -> frozenset[str]:
    """Return the parameters of a run's model that none of the files of `training.init_from` has trained.

    They are none where the run starts from no file. Raises: CheckpointError for files that cannot be read, or of parts
    that do not fit the model.
    """
    files = config.training.init_from
    if files is None:
        return frozenset()
    if isinstance(files, Path):
        return open_weights(files).new_parameters
    sources = weight_sources(config)
    copied = {name for name, (_, their) in sources.items() if BASE in files and OF_MEMORY in name and their != name}
    # a base may have memories itself that are not trained yet
    untrained = {path: open_weights(path).new_parameters for path in files.values()}
    copied |= {name for name, (path, their) in sources.items() if their in untrained[path]}
    return (frozenset(_shapes(config.model)) - set(sources)) | copied


def weight_sources(config: RunConfig) -> Sources:
    """Return where the parameters of a run's model start from, those apart that start as in a new run.

    Raises: CheckpointError in one line for the first file that does not fit the model: a tensor that is missing, not
    in the model or of another shape, a part with another width or number of layers, or a file without the part.
    """
    files = config.training.init_from
    if isinstance(files, Path):
        return _of_whole_model(open_weights(files), _shapes(config.model))
    if files and BASE in files:
        return _of_base(open_weights(files[BASE]), _shapes(config.model))
    sources: Sources = {}
    for name, path in (files or {}).items():
        sources.update(_of_part(open_weights(path), name, config.model))
    return sources | _bridges(sources, config)


def check_start(config: RunConfig, tokenizer: str | None) -> None:
    """Refuse weights to start from that do not fit the run's model, its tokenizer, or each other's.

    tokenizer: the hash of the vocabulary of the run's, if it has one. Raises: CheckpointError in one line.
    """
    weight_sources(config)
    files = config.training.init_from
    paths = [files] if isinstance(files, Path) else list((files or {}).values())
    known = [("data.tokenizer", tokenizer)] if tokenizer else []
    for path in paths:
        file = open_weights(path)
        for other, theirs in known:
            check_tokenizer(file, theirs, other)
        if file.tokenizer is not None:
            known.append((str(path), file.tokenizer))


def check_tokenizer(file: WeightsFile, tokenizer: str | None, of: str = "data.tokenizer") -> None:
    """Raise CheckpointError where weights were trained with another tokenizer.

    tokenizer: the hash of its vocabulary, if it is known; of: whose it is, for the message.
    """
    if file.tokenizer is not None and tokenizer is not None and file.tokenizer != tokenizer:
        raise CheckpointError(
            f"{file.path}: these weights were trained with the tokenizer {file.tokenizer[:12]}, that of {of} is "
            f"{tokenizer[:12]}; all must be of one tokenizer"
        )


def _shapes(model: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of all parameters of a model by global name."""
    return {name: list(parameter.shape) for name, parameter in whole_model(model).named_parameters()}


def _of_whole_model(file: WeightsFile, shapes: Mapping[str, Shape]) -> Sources:
    """Return the sources of a model with these shapes in a file that is of all of it. Raises as `weight_sources`."""
    if wrong := sorted(set(shapes) - set(file.shapes) - file.new_parameters):
        raise CheckpointError(f"{file.path}: {wrong[0]} is missing; the file belongs to another model")
    if wrong := sorted(set(file.shapes) - set(shapes)):
        raise CheckpointError(f"{file.path}: {wrong[0]} is not in the model; the file belongs to another model")
    for name, shape in file.shapes.items():
        if shape != shapes[name]:
            raise CheckpointError(f"{file.path}: {name} has shape {shape}, the model's is {shapes[name]}")
    return {name: (file.path, name) for name in file.shapes}


def attention_name(name: str) -> str | None:
    """Return what a plain model calls a parameter of `added_memory` that is, or starts as, one of its attention's.

    Those of the attention are the plain model's; of the memory, the projections to query, key and value and their norms
    start like them.
    """
    found = re.fullmatch(
        r"(layers\.\d+\.mixer\.)(attention\.|(?:memory\.)+(?=(?:query|key|value)(?:_norm)?\.))(.+)", name
    )
    return None if found is None else found[1] + found[3]


def name_beside(name: str) -> str | None:
    """Return what a layer with an `added_memory` calls a parameter of a plain model's attention."""
    found = re.fullmatch(r"(layers\.\d+\.mixer\.)(.+)", name)
    return None if found is None else f"{found[1]}attention.{found[2]}"


def _of_base(file: WeightsFile, shapes: Mapping[str, Shape]) -> Sources:
    """Return the sources of a model that adds memories to that of a file. Raises as `weight_sources`."""
    sources: Sources = {}
    for name, shape in shapes.items():
        their = name if name in file.shapes else attention_name(name)
        copied = their != name and OF_MEMORY in name
        if their is None or their not in file.shapes or (copied and file.shapes[their] != shape):
            if not copied and not (their is None and ADDED.fullmatch(name)):
                raise CheckpointError(f"{file.path}: {their or name} is missing; the file belongs to another model")
            continue
        if file.shapes[their] != shape:
            raise CheckpointError(f"{file.path}: {their} has shape {file.shapes[their]}, the model's {name} {shape}")
        sources[name] = file.path, their
    if unused := sorted(set(file.shapes) - {their for _, their in sources.values()}):
        raise CheckpointError(
            f"{file.path}: {unused[0]} is not in the model; a base is the model without its memories, "
            "as `megamem convert from-hf` writes it"
        )
    return sources


def load_base(path: Path, model: ModelConfig, seed: int = 0) -> Stage:
    """Return a whole model with the weights of a file, on the CPU in FP32.

    Args:
        path: weights of the model; or of one that adds memories to it, which are left out.
        model: its configuration.
        seed: of what the file lists as new.
    Raises: CheckpointError for weights that do not fit.
    """
    names = base_names(open_weights(path), model)
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, seed)
    with safe_open(path, framework="pt") as tensors, torch.no_grad():
        for name, parameter in stage.named_parameters():
            if name in names:
                parameter.copy_(tensors.get_tensor(names[name]))
    return stage


def base_names(file: WeightsFile, model: ModelConfig) -> dict[str, str]:
    """Return what a file calls the parameters of a model, those apart that it lists as new. Raises as `load_base`."""
    names = {}
    for name, shape in _shapes(model).items():
        # attention beside an added memory is that of the base
        their = next((known for known in (name, name_beside(name)) if known in file.shapes), None)
        if their is None and name not in file.new_parameters:
            raise CheckpointError(f"{file.path}: {name} is missing; the file belongs to another model")
        if their is None:
            continue
        if file.shapes[their] != shape:
            raise CheckpointError(f"{file.path}: {their} has shape {file.shapes[their]}, the model's is {shape}")
        names[name] = their
    return names


def _of_part(file: WeightsFile, name: str, model: ModelConfig) -> Sources:
    """Return the sources of the model's part `name` in a file that has such a part, or is of a plain decoder.

    Raises: as `weight_sources`.
    """
    part, shapes = model.architecture.parts(model)[name], _shapes(model)
    if file.parts and name not in file.parts:
        raise CheckpointError(f"{file.path}: has no {name}; it has {', '.join(file.parts)}")
    theirs = _plain_names(file.parts.get(name), [*file.shapes, *file.new_parameters])
    ours = _plain_names(part, shapes)
    if "head.weight" in ours and "embedding.weight" in theirs:
        # a file without an output head has the embedding for one
        theirs.setdefault("head.weight", theirs["embedding.weight"])
    theirs = {plain: own for plain, own in theirs.items() if part.needs(plain)}
    _check_sizes(file, name, part, theirs, {plain: shapes[own] for plain, own in ours.items()})
    for plain in sorted(set(ours) - set(theirs)):
        raise CheckpointError(f"{file.path}: {plain} of the {name} is missing; the file's model is another one")
    for plain in sorted(set(theirs) - set(ours)):
        hint = "its output head is not tied; set model.tie_embeddings: false" if plain == "head.weight" else ""
        reason = hint or "the file's model is another one"
        raise CheckpointError(f"{file.path}: {theirs[plain]} is not in the model's {name}; {reason}")
    found = {ours[plain]: own for plain, own in theirs.items() if own in file.shapes}
    for own, their in found.items():
        if file.shapes[their] != shapes[own]:
            raise CheckpointError(f"{file.path}: {their} has shape {file.shapes[their]}, {own} has {shapes[own]}")
    return {own: (file.path, their) for own, their in found.items()}


def _plain_names(part: ModelPart | None, names: Sequence[str] | Mapping[str, Shape]) -> dict[str, str]:
    """Return the parameters of a part among `names` by their plain names; without a part all are plain."""
    if part is None:
        return {name: name for name in names}
    return {plain: name for name in names if (plain := part.plain_name(name)) is not None}


def _check_sizes(
    file: WeightsFile, name: str, part: ModelPart, theirs: Mapping[str, str], ours: Mapping[str, Shape]
) -> None:
    """Refuse a part of another width, vocabulary or number of layers, naming the key to change.

    Args:
        theirs: names in the file by plain name.
        ours: shapes of the model's parameters by plain name.
    """
    for plain in VOCABULARY:
        found, wanted = file.shapes.get(theirs.get(plain, "")), ours.get(plain)
        if found is None or wanted is None:
            continue
        if found[-1] != wanted[-1]:
            raise CheckpointError(
                f"{file.path}: its {name} is {found[-1]:,} wide, the model's {wanted[-1]:,}; set {part.width_field} to "
                f"{found[-1]}"
            )
        if found[0] != wanted[0]:
            raise CheckpointError(
                f"{file.path}: its {name} has {found[0]:,} rows of vocabulary, the model {wanted[0]:,}; the tokenizer "
                "must be the same (model.vocab_size, model.padded_vocab_size)"
            )
    layers = {plain.split(".")[1] for plain in theirs if plain.startswith("layers.")}
    if len(layers) != part.layers:
        raise CheckpointError(
            f"{file.path}: its {name} has {len(layers)} layers, the model's {part.layers}; set {part.layers_field} to "
            f"{part.first_layer + len(layers)}"
        )


def _bridges(sources: Sources, config: RunConfig) -> Sources:
    """Return the sources of what joins the parts, where all of them come from one file that holds it in these shapes.

    It is of no use to other parts than those it was trained with.
    """
    files, parts = config.training.init_from, config.model.architecture.parts(config.model)
    if not isinstance(files, dict) or set(files) != set(parts) or len(set(files.values())) > 1:
        return {}
    # both parts fit, so the file's model has as many layers of each and names bridges alike
    file, shapes = open_weights(next(iter(files.values()))), _shapes(config.model)
    bridges = {name: shape for name, shape in shapes.items() if any(part.is_bridge(name) for part in parts.values())}
    fits = all(file.shapes.get(name) == shape for name, shape in bridges.items())
    return {name: (file.path, name) for name in bridges} if fits else {}
