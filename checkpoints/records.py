"""What the JSON files of a checkpoint hold, and their reading: every value is of its type, or is named.

A checkpoint whose hashes are right may still be none: another version or another program wrote it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from checkpoints.location import Location
from megamem.errors import CheckpointError

T = TypeVar("T")
FORMAT = 1
"""Version of the format."""
PLAIN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Names of files that lie in the checkpoint itself."""
SHOWN = 60
"""Characters of a wrong value that a message shows."""


def _whole_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration that has what a run that resumes looks at. Raises ValueError."""
    for section, key in (("checkpoint", "resume"), ("training", "steps")):
        if not isinstance(config.get(section), dict) or key not in config[section]:
            raise ValueError(f"no configuration of a run, {section}.{key} is missing")
    return config


def _this_format(version: int) -> int:
    """Return the version of the format. Raises ValueError for another one."""
    if version != FORMAT:
        raise ValueError(f"this version of megamem reads {FORMAT}")
    return version


DataType = Literal[
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"
]  # fmt: skip
"""Names of torch data types that tensors of a checkpoint may have."""
Count = Annotated[int, Field(ge=0)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class FileEntry(TypedDict):
    """What the manifest says of one file."""

    bytes: Count
    """Size of the file."""
    sha256: Hash
    """Hash of the file as it was written."""
    extent_bytes: NotRequired[Annotated[int, Field(gt=0)]]
    """Bytes of each extent but the last; files of tensors in an object store only."""
    extents: NotRequired[list[Hash]]
    """SHA-256 of each extent."""


class Manifest(TypedDict):
    """The contents of manifest.json."""

    format: Annotated[int, AfterValidator(_this_format)]
    """Version of the format."""
    files: dict[Annotated[str, Field(pattern=PLAIN)], FileEntry]
    """Every other file by name, but for the marker."""


class PhaseIdentity(TypedDict):
    """What makes two parts of training one phase of a run."""

    first_step: Count
    """Steps of the run before it."""
    data_fingerprint: str
    batch_tokens: Count
    sequence_length: Count


class RunIdentity(TypedDict):
    """What makes two parts of training one run."""

    model: dict[str, Any]
    """The model's configuration, without fields that may change between two parts."""
    data_fingerprint: str
    tokenizer_sha256: str | None
    batch_tokens: Count
    sequence_length: Count
    phases: NotRequired[list[PhaseIdentity]]
    """Those after the first one."""


class RunFacts(RunIdentity):
    """What all checkpoints of a run say of it."""

    config: Annotated[dict[str, Any], AfterValidator(_whole_config)]
    """The resolved configuration."""
    vocabulary_sha256: NotRequired[str | None]
    """Hash of what each token stands for (`Tokenizer.vocabulary_hash`); None without a tokenizer."""
    megamem: str
    """Version that wrote it."""


class BadStepCounts(TypedDict):
    """Steps that were skipped."""

    total: Count
    """Steps since the run began whose values were not finite."""
    streak: list[Count]
    """Numbers of such steps that directly precede the checkpoint."""
    spikes: NotRequired[Count]
    """Steps since the run began that were spikes."""


class SavedRun(RunFacts):
    """The contents of run.json."""

    step: Count
    """Finished optimizer steps."""
    tokens: Count
    """Tokens trained on so far, without padding."""
    samples: Count
    """Sequences read so far."""
    optimizer_steps: Count
    """Updates that the optimizer has made (skipped steps are none)."""
    bad_steps: BadStepCounts
    val_loss: float | None
    """Loss of the validation at this step, if there was one."""
    layout: dict[str, Count]
    """Sizes of pipeline, data and tensor parallelism: `pp`, `dp`, `tp`."""
    placement: list[Count]
    """Number of layers of each stage."""


class TensorEntry(TypedDict):
    """What the index says of one global tensor."""

    dtype: DataType
    """Name of its torch dtype."""
    shape: list[Count]
    """Shape of the global tensor."""
    pieces: list[tuple[list[Count], list[Count], Annotated[str, Field(pattern=PLAIN)]]]
    """Offsets, sizes and file of each piece."""


_RUN, _MANIFEST = TypeAdapter(SavedRun), TypeAdapter(Manifest)
_INDEX: TypeAdapter[dict[str, TensorEntry]] = TypeAdapter(dict[str, TensorEntry])


def read_run(path: Location) -> SavedRun:
    """Read a run.json. Raises CheckpointError naming the file and the first value that is not as it should be."""
    return _read(path, _RUN)


def read_manifest(path: Location) -> Manifest:
    """Read a manifest.json. Raises CheckpointError as `read_run` does, also for another version of the format."""
    return _read(path, _MANIFEST)


def read_index(path: Location) -> dict[str, TensorEntry]:
    """Read an index.json: every tensor by its global name. Raises CheckpointError as `read_run` does."""
    return _read(path, _INDEX)


def _read(path: Location, schema: TypeAdapter[T]) -> T:
    """Read a JSON file whose values have the types of `schema`. Raises CheckpointError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    try:
        return schema.validate_json(text, strict=True)
    except ValidationError as error:
        raise CheckpointError(f"{path}: {_in_words(error)}") from None


def _in_words(error: ValidationError) -> str:
    """Return in one line which value is wrong first."""
    first = error.errors(include_url=False)[0]
    kind, place, value, message = first["type"], first["loc"], first["input"], first["msg"]
    where = ".".join(str(part) for part in place if part != "[key]")
    if kind == "json_invalid":
        return f"cannot be read ({message.removeprefix('Invalid JSON: ')})"
    if not place:
        return "does not hold what it should"
    if kind == "missing":
        return f"{where} is missing"
    shown = repr(value)
    shown = shown if len(shown) <= SHOWN else f"{shown[: SHOWN - 3]}..."
    return f"{where} is {shown}: {message.removeprefix('Value error, ')}"


def check_pieces(path: Location, name: str, entry: TensorEntry) -> None:
    """Raise CheckpointError unless the pieces of a tensor make up the whole of it, each element once.

    Args:
        path: the index, for the message.
        name: global name of the tensor.
        entry: what the index says of it.
    """
    shape, held = entry["shape"], 0
    for offsets, sizes, file in entry["pieces"]:
        inside = len(offsets) == len(sizes) == len(shape) and all(
            offset + size <= whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        )
        if not inside:
            raise CheckpointError(
                f"{path}: {name} has shape {shape}, but a piece in {file} at {offsets} of sizes {sizes}"
            )
        held += prod(sizes)
    if held != prod(shape):
        raise CheckpointError(
            f"{path}: {name} has {prod(shape):,} values, its pieces {held:,}; one is missing or too many"
        )
    if not _tile(shape, [(offsets, sizes) for offsets, sizes, _ in entry["pieces"]]):
        raise CheckpointError(f"{path}: pieces of {name} overlap")


def _tile(shape: Sequence[int], pieces: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return whether rectangles, given by offsets and sizes, cover a tensor of a shape, each element once.

    A rectangle is the sum over its corners, with alternating signs, of all that lies beyond each corner. These are
    independent of each other, so that rectangles add up to the whole where their signed corners do.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, offsets, sizes in [(1, [0] * len(shape), shape), *((-1, offsets, sizes) for offsets, sizes in pieces)]:
        for upper in product((0, 1), repeat=len(shape)):
            corner = tuple(o + s * u for o, s, u in zip(offsets, sizes, upper, strict=True))
            corners[corner] += sign * (-1) ** sum(upper)
    return not any(corners.values())
