"""The configuration of a whole run: `RunConfig` and its sections besides the model and the data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from megamem.config.auto import AutoConfig, AutoField, noted, value_at
from megamem.config.base import ConfigModel
from megamem.config.budget import HALF, NONE, steps_for
from megamem.config.checkpoint import CheckpointConfig
from megamem.config.data import DataConfig
from megamem.config.embedding_cache import check_embedding_cache
from megamem.config.evaluation import EvaluationConfig
from megamem.config.lanes import check_lanes
from megamem.config.logs import LoggingConfig
from megamem.config.model import ModelConfig
from megamem.config.optimizer import OptimizerConfig
from megamem.config.origin import OriginConfig
from megamem.config.parallel import ParallelConfig
from megamem.config.parts import check_parts
from megamem.config.phase import phase_starts
from megamem.config.training import TrainingConfig
from megamem.config.window_order import check_window_order

RunName = Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]
"""The name of a run, or of a curriculum, and of its folder."""


class RunConfig(ConfigModel):
    """Everything about a run. `megamem train` takes a YAML file of it and `section.key=value` overrides."""

    name: RunName
    """Name of the run and of its folder."""
    runs_folder: Path = Path("runs")
    """Folder of run folders."""
    model: ModelConfig
    """Shape of the model and its mixers."""
    data: DataConfig
    """What is read and how."""
    training: TrainingConfig
    """Length, batch, window, precision."""
    parallel: ParallelConfig = ParallelConfig()
    """How the work is split over processes."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is saved to go on from."""
    logging: LoggingConfig = LoggingConfig()
    """Metrics and traces."""
    origin: OriginConfig | None = None
    """Where a branch comes from; a run that begins at its first step has none."""
    lesson: str | None = None
    """Name of the lesson that the run is, of the curriculum whose folder `runs_folder` is. `megamem train` writes it; a
    run by itself has none."""
    auto: AutoConfig = AutoConfig()
    """What of it the planner chooses."""

    @model_validator(mode="before")
    @classmethod
    def _note_auto(cls, given: object) -> object:
        return noted(given)

    @property
    def auto_values(self) -> dict[AutoField, int | str]:
        """The values of the fields that were given as `auto`."""
        return {field: value_at(self, field) for field in self.auto.fields}

    @property
    def run_folder(self) -> Path:
        """The folder that this run writes to."""
        return self.runs_folder / self.name

    @property
    def weights(self) -> Path:
        """The file of the trained weights, in the run folder."""
        return self.run_folder / "model.safetensors"

    @property
    def full_name(self) -> str:
        """The run's name where runs of other folders are beside it: that of a lesson begins with its curriculum's."""
        return self.name if self.lesson is None else f"{self.runs_folder.name}/{self.name}"

    @property
    def chunks(self) -> int:
        """The number of chunks of a sequence."""
        return self.data.sequence_length // self.model.chunk_size

    @property
    def bptt_chunks(self) -> int:
        """The number of chunks of a window."""
        return self.training.bptt_chunks or self.chunks

    @property
    def chunks_per_call(self) -> int:
        """The number of chunks that a layer reads before the next layer does: one, or all of a window."""
        return self.bptt_chunks if self.training.window_order == "layers" else 1

    @property
    def calls_per_window(self) -> int:
        """How often a layer is called for a window."""
        return self.bptt_chunks // self.chunks_per_call

    @property
    def interleaved(self) -> bool:
        """True where chunks of micro-batches alternate in a pipeline, as a memory goes from its end to its start."""
        return bool(self.model.architecture.state_specs(self.model))

    @property
    def global_rows(self) -> int:
        """The number of sequences of one optimizer step over all ranks."""
        return self.training.batch_tokens // self.data.sequence_length

    @property
    def steps(self) -> int:
        """The number of optimizer steps of the run; a budget of tokens without padding until data is open."""
        return self.training.steps or steps_for(self.training.tokens or 0, self.training.batch_tokens)

    @property
    def phases(self) -> tuple[RunConfig, ...]:
        """The configuration of each phase as that of a run without later ones; that of the first is the run's own."""
        found = [self._changed({}, {"phases": ()})]
        for phase in self.training.phases:
            found.append(found[-1]._changed(**phase.changes()))
        return tuple(found)

    @property
    def phase_starts(self) -> tuple[int, ...]:
        """The number of steps before each phase, 0 before the first."""
        return phase_starts(self.training.phases, self.training.batch_tokens)

    def _changed(self, data: dict[str, Any], training: dict[str, Any]) -> RunConfig:
        """Return the configuration with other fields in two sections, validated."""
        changed_data = DataConfig.model_validate({**dict(self.data), **data})
        changed_training = TrainingConfig.model_validate({**dict(self.training), **training})
        return RunConfig.model_validate({**dict(self), "data": changed_data, "training": changed_training})

    @model_validator(mode="after")
    def _batch_fits(self) -> RunConfig:
        """Raise ValueError where lengths, batch or windows do not fit each other."""
        training, length, chunk = self.training, self.data.sequence_length, self.model.chunk_size
        if training.steps is None and training.tokens is None:
            raise ValueError("training: give either steps or tokens")
        if training.steps and training.tokens:
            # a resolved configuration has both; as long as no data is open, only what no padding explains is refused
            least, most = (steps_for(training.tokens, training.batch_tokens, share) for share in (NONE, HALF))
            if training.steps < least or (training.steps > most and not self.data.allow_padding):
                raise ValueError(
                    f"training: give either steps or tokens ({training.tokens:,} tokens are not {training.steps:,} "
                    f"steps of {training.batch_tokens:,})"
                )
        if chunk > length:
            raise ValueError(f"model.chunk_size {chunk} is longer than data.sequence_length {length}")
        if length % chunk:
            raise ValueError(f"data.sequence_length {length} is not divisible by model.chunk_size {chunk}")
        self.model.architecture.check_sequences(self.model, self.data)
        if training.window_order == "layers":
            check_window_order(self.model, self.parallel)
        if self.chunks % self.bptt_chunks:
            raise ValueError(
                f"training.bptt_chunks {self.bptt_chunks} does not divide the {self.chunks} chunks of a sequence"
            )
        architecture = self.model.architecture
        if self.bptt_chunks < (needed := architecture.training_window(self.model)):
            raise ValueError(
                f"training.bptt_chunks {self.bptt_chunks} leaves parameters of {architecture.kind} without gradients: "
                f"what it writes in one chunk is read in the next; use at least {needed}"
            )
        for layer in range(self.model.layers):
            mixer = self.model.mixer_at(layer)
            if self.bptt_chunks < (needed := mixer.training_window(self.model.layer_model(layer))):
                raise ValueError(
                    f"training.bptt_chunks {self.bptt_chunks} leaves parameters of {mixer.kind} (model layer {layer}) "
                    f"without gradients: what it writes in one chunk is read in the next; use at least {needed}"
                )
        stride = self.evaluation.sliding_stride
        if stride and chunk % stride:
            raise ValueError(f"evaluation.sliding_stride {stride} does not divide model.chunk_size {chunk}")
        if training.batch_tokens % length:
            raise ValueError(
                f"training.batch_tokens {training.batch_tokens} is not a multiple of data.sequence_length {length}"
            )
        if self.global_rows % training.micro_batch_size:
            raise ValueError(
                f"training.micro_batch_size {training.micro_batch_size} does not divide the {self.global_rows} "
                "sequences of a batch"
            )
        return self

    @model_validator(mode="after")
    def _steps_fit(self) -> RunConfig:
        """Raise ValueError for steps beyond the last one; `check_steps` does so once data says how many there are."""
        first, last = self.logging.profile_steps or (1, 1)
        if first > last:
            raise ValueError(f"logging.profile_steps {[first, last]} must be a first and a last step")
        if (record := self.logging.record_step) and self.parallel.pp == 1:
            raise ValueError(f"logging.record_step {record} needs a pipeline, but parallel.pp is 1")
        if self.training.steps is not None:
            self.check_steps()
        return self

    def check_steps(self) -> None:
        """Raise ValueError where recorded or kept steps, warm-up or decay lie beyond the steps of the run."""
        steps = self.steps
        kept = (("checkpoint.keep_steps:", step) for step in self.checkpoint.keep_steps)
        recorded = ("logging.record_step", self.logging.record_step or 0)
        for name, step in (recorded, *kept):
            if step > steps:
                raise ValueError(f"{name} {step} is beyond the {steps} steps of the run")
        if (profile := self.logging.profile_steps) and profile[1] > steps:
            raise ValueError(
                f"logging.profile_steps {list(profile)} must be a first and a last step of the {steps} of the run"
            )
        warmup = self.optimizer.warmup(steps)
        decay = self.optimizer.decay(steps) if self.optimizer.schedule == "wsd" else 0
        if warmup + decay > steps:
            raise ValueError(
                f"optimizer: {warmup} steps of warm-up and {decay} of decay are more than the {steps} of the run"
            )

    @model_validator(mode="after")
    def _objective_fits(self) -> RunConfig:
        objective, architecture = self.training.objective, self.model.architecture
        if objective.causal != architecture.causal:
            fitting = "autoencode" if objective.causal else "next_token"
            raise ValueError(
                f"training.objective {objective.kind} does not go with model.architecture {architecture.kind}; use "
                f"{fitting}"
            )
        parts = architecture.parts(self.model)
        check_parts(architecture.kind, parts, self.training.init_from, self.training.freeze)
        if self.training.distill is not None:
            self.training.distill.check(self.model, self.parallel, self.data, self.training.objective)
        self.training.objective.check(self.model)
        self.training.objective.check_sequences(self.model, self.data)
        return self

    @model_validator(mode="after")
    def _cache_fits(self) -> RunConfig:
        check_embedding_cache(self.model, self.data, self.training, self.parallel)
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> RunConfig:
        """Raise ValueError where the stages of the pipeline do not fit the layers or ZeRO."""
        parallel, layers = self.parallel, self.model.layers
        if parallel.pp > layers:
            raise ValueError(f"parallel.pp {parallel.pp} is more than the {layers} layers of the model (model.layers)")
        if parallel.pp > 1 and parallel.zero_stage > 1:
            raise ValueError(
                f"parallel.zero_stage {parallel.zero_stage} does not go with parallel.pp {parallel.pp}: it would "
                "reduce and partition gradients after each of a stage's many backward passes; use zero_stage 0 or 1"
            )
        if isinstance(parallel.placement, tuple):
            given = list(parallel.placement)
            if len(given) != parallel.pp:
                raise ValueError(
                    f"parallel.placement {given} names {len(given)} stages, but parallel.pp is {parallel.pp}"
                )
            if 0 in given:
                raise ValueError(f"parallel.placement {given} leaves stage {given.index(0)} without layers")
            if sum(given) != layers:
                raise ValueError(
                    f"parallel.placement {given} places {sum(given)} layers, but the model has {layers} (model.layers)"
                )
        return self

    @model_validator(mode="after")
    def _layout_fits(self) -> RunConfig:
        """Raise ValueError where tensor parallelism, precision, ZeRO or time limits do not fit the run."""
        model, tp = self.model, self.parallel.tp
        sizes: dict[str, int] = {}
        # from the last layer: an encoder, which comes first, has the model's own sizes where it is given none
        for part in map(model.part, reversed(range(model.layers))):
            heads, kv_heads, width = part.model.heads, part.model.resolved_kv_heads, part.model.resolved_ffn_size
            own = {"heads": heads, "kv_heads": kv_heads, "ffn_size": width}
            sizes |= {f"{part.section}.{name}": size for name, size in own.items()}
        field, size = model.vocabulary_share
        sizes[f"model.{field}"] = size
        for name, size in sizes.items():
            if size % tp:
                hint = "; padded_vocab_size may be larger" if name == "model.vocab_size" else ""
                raise ValueError(f"{name} {size} is not divisible by parallel.tp {tp}{hint}")
        model.architecture.check_layout(self.parallel, model)
        beside = f" with {model.rows_per_chunk - model.chunk_size} rows beside the tokens"
        for rows, added in ((model.chunk_size, ""), (model.rows_per_chunk, beside)):
            if self.parallel.sequence_parallel and rows % tp:
                raise ValueError(
                    f"parallel.sequence_parallel: model.chunk_size {model.chunk_size}{added} is not divisible by "
                    f"parallel.tp {tp}"
                )
        if self.training.precision == "bf16" and self.parallel.zero_stage == 0:
            raise ValueError(
                "parallel.zero_stage 0 cannot keep FP32 master weights for training.precision bf16; "
                f"use zero_stage {'1, 2 or 3' if self.parallel.pp == 1 else '1'}, or precision fp32"
            )
        if self.parallel.zero_stage == 3 and model.tie_embeddings:
            raise ValueError(
                "parallel.zero_stage 3 does not go with model.tie_embeddings true: the embedding is gathered for its "
                "own layer only; use zero_stage 2 or untied embeddings"
            )
        data = self.data
        uneven = data.feeding == "streams" or data.documents == "pack" or data.reset == "exact"
        if self.parallel.zero_stage == 3 and (recompute := self.training.recompute) and uneven:
            raise ValueError(
                f"parallel.zero_stage 3 does not go with training.recompute {str(recompute).lower()} where documents "
                "begin at different places on each rank (data.feeding streams, data.documents pack, data.reset exact): "
                "DeepSpeed would gather parameters in another order on each rank; use zero_stage 2 or recompute false"
            )
        if self.parallel.stall_timeout_s >= self.parallel.timeout_s:
            raise ValueError(
                f"parallel.stall_timeout_s {self.parallel.stall_timeout_s:g} must be below parallel.timeout_s "
                f"{self.parallel.timeout_s:g}, so that the stuck rank is named before collectives give up"
            )
        retry_s = 60 * self.checkpoint.retry_minutes
        if "://" in (self.checkpoint.folder or "") and retry_s >= self.parallel.timeout_s:
            raise ValueError(
                f"checkpoint.retry_minutes {self.checkpoint.retry_minutes:g} must be less than parallel.timeout_s "
                f"{self.parallel.timeout_s:g} s, for which the other ranks wait"
            )
        return self

    @model_validator(mode="after")
    def _phases_fit(self) -> RunConfig:
        """Raise ValueError where a phase does not fit into the run, or is no configuration that could run."""
        phases = self.training.phases
        if not phases:
            return self
        if self.training.tokens is not None:
            raise ValueError("training.phases: their lengths are steps; give training.steps instead of training.tokens")
        if self.data.feeding == "streams":
            raise ValueError("training.phases: lanes of data.feeding streams cannot change; use sequences")
        starts = self.phase_starts
        if starts[-1] >= self.steps:
            raise ValueError(
                f"training.phases.{len(phases) - 1} begins after step {starts[-1]}, but the run ends after step "
                f"{self.steps}"
            )
        for count in range(len(phases)):
            shorter = self.training.model_copy(update={"phases": phases[: count + 1]})
            try:
                self.model_copy(update={"training": shorter}).phases  # noqa: B018, validates each
            except ValidationError as error:
                message = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise ValueError(f"training.phases.{count} (after step {starts[count + 1]}): {message}") from None
        return self

    @model_validator(mode="after")
    def _resets_fit(self) -> RunConfig:
        """Raise ValueError where documents that begin inside chunks do not go with the model or the layout."""
        if self.data.reset != "exact":
            return self
        if self.parallel.zero_stage == 3:
            raise ValueError(
                "parallel.zero_stage 3 does not go with data.reset exact: blocks end at different places on each rank, "
                "and DeepSpeed would gather parameters in another order on each; use zero_stage 2"
            )
        beside = self.model.rows_per_chunk - self.model.chunk_size
        layout = self.training.micro_batch_size, self.parallel.pp, self.parallel.sequence_parallel
        if beside and layout != (1, 1, False):
            raise ValueError(
                f"data.reset exact with the {beside} rows that this model reads beside the tokens of each chunk needs "
                "training.micro_batch_size 1, parallel.pp 1 and no sequence_parallel; or use data.documents pack, "
                "where documents begin at chunk borders"
            )
        return self

    @model_validator(mode="after")
    def _long_term_fits(self) -> RunConfig:
        """Refuse to take away a long-term memory that no layer declares."""
        specs = [spec for state in self.model.component_specs().values() for spec in state.values()]
        if self.evaluation.forget_long_term and not any(getattr(spec, "long_term", False) for spec in specs):
            raise ValueError(
                "evaluation.forget_long_term true: no layer is an infinity_former with a short_memory, whose long-term "
                "memory can be taken away alone; use evaluation.forget_every_chunk"
            )
        return self

    @model_validator(mode="after")
    def _lanes_fit(self) -> RunConfig:
        check_lanes(self.model, self.data)
        return self

    def accumulation_steps(self, dp_size: int) -> int:
        """Return the micro-batches of a rank per step. Raises ValueError if the batch cannot be split so."""
        per_pass = self.training.micro_batch_size * dp_size
        if self.global_rows % per_pass:
            raise ValueError(
                f"training.batch_tokens: {self.global_rows} sequences cannot be split into micro-batches of "
                f"{self.training.micro_batch_size} on {dp_size} data-parallel ranks; use a multiple of {per_pass}"
            )
        return self.global_rows // per_pass

    def micro_batches(self, dp_size: int) -> int:
        """Return how many micro-batches a rank goes through per step: each as often as the objective reads it."""
        return self.accumulation_steps(dp_size) * self.training.objective.readings
