"""Configuration of the data: which sources of tokens are read, how they are mixed and how sequences are made."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from megamem.config.base import ConfigModel


class SourceConfig(ConfigModel):
    """One source of training documents and its share of the training tokens."""

    path: str = Field(min_length=1)
    """Folder of token shards or its fsspec URL, prefix of a Megatron `.bin`/`.idx` pair, `.npy` file of tokens or \
folder of such files, or a task's `.yaml`."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Share of the training sequences drawn from this source, relative to the other sources' weights."""


def bare_paths(value: object) -> object:
    """Return sources with a mapping for each bare path; anything else as it is, for pydantic to judge."""
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list | tuple):
        return value
    return tuple({"path": entry} if isinstance(entry, str) else entry for entry in entries)


class DataConfig(ConfigModel):
    """What is read, and in which order: a pure function of the seed and the global sample index."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    """Training sources. A bare path stands for a source of weight 1."""
    validation: tuple[str, ...] = ()
    """Held-out sources (paths as in `sources`), read document by document from start to end."""
    tokenizer: Path | None = None
    """Tokenizer folder. Its hash must equal the hash stored with the shards; needed for bits per byte."""
    feeding: Literal["sequences", "streams"] = "sequences"
    """`sequences`: each sequence starts with a fresh memory. `streams`: each row reads on through long text \
and keeps its memory from step to step."""
    sequence_length: int = Field(default=4096, ge=2)
    """Tokens per row and step. A whole number of the model's chunks."""
    documents: Literal["join", "pad", "pack", "drop"] = "join"
    """How documents become rows. `join`: one after the other without a gap, cut into rows wherever these end. The \
others start documents at chunk borders, and what does not fill a sequence is padded with ignored labels (`pad`), put \
together with others (`pack`) or left out and counted (`drop`). Streams take `join` and `pad`, tasks all but `join`."""
    reset: Literal["none", "exact"] = "none"
    """Whether a document that begins inside a row starts with a fresh memory (`join` only). `none`: attention and \
memory run on across documents. `exact`: each starts fresh, at any token."""
    end_of_document: int | None = Field(default=None, ge=0)
    """Token that ends the documents of Megatron files (for `join`) and of `.npy` files, which do not state it; the \
tokenizer's if not given."""
    raw_tokens: Literal["uint16", "uint32"] | None = None
    """Type of the tokens in `.npy` files without NumPy's header, as OLMo writes them."""
    allow_padding: bool = False
    """Train even where more than half of all positions are padding, which is refused otherwise."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of the documents and of the mixture."""
    shuffle_shards: int = Field(default=0, ge=0)
    """Shuffle within groups of this many randomly chosen shards; 0 shuffles a whole source at once. Needed \
where remote shards do not all fit into the cache."""
    cache_folder: Path = Path("runs/shard_cache")
    """Where copies of remote shards are kept, and where the documents of `.npy` files begin."""
    cache_gib: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    """Bound of the cache of remote shards, in GiB. The least recently used shards are deleted first."""
    retry_minutes: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    """Minutes for which a store of remote shards that does not answer is tried again, with growing waits; \
then the run ends with exit code 12, after which launchers start it again."""
    prefetch: int = Field(default=4, ge=1)
    """Batches read ahead by the background thread."""

    @field_validator("sources", mode="before")
    @classmethod
    def _bare_paths(cls, value: object) -> object:
        """Accept a single path, and paths without weights inside the list."""
        return bare_paths(value)

    @field_validator("validation", mode="before")
    @classmethod
    def _single_path(cls, value: object) -> object:
        """Accept a single path."""
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _distinct_sources(self) -> "DataConfig":
        """Raise ValueError where a source is listed twice, or for training and validation both."""
        paths = [source.path for source in self.sources]
        repeated = sorted({path for path in paths if paths.count(path) > 1})
        if repeated:
            raise ValueError(f"sources: {repeated[0]} is listed twice; give it one entry and a larger weight")
        held_out = sorted(set(paths) & set(self.validation))
        if held_out:
            raise ValueError(f"validation: {held_out[0]} is also a training source; hold out other documents")
        return self

    @model_validator(mode="after")
    def _documents_fit(self) -> "DataConfig":
        """Raise ValueError where feeding, documents and reset do not go together."""
        if self.feeding == "streams" and self.documents in ("drop", "pack"):
            raise ValueError(f"documents: {self.documents} is for feeding sequences; streams take join or pad")
        if self.reset == "exact" and self.documents != "join":
            raise ValueError(
                f"reset: exact is for documents join; with documents {self.documents} each starts fresh at a chunk's "
                "border anyway"
            )
        return self
