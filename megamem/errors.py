"""The errors that are meant for people: one clear line each, and the exit code that a process ends with.

The command line prints the message of a `MegamemError` and exits with its `exit_code`; anything else is a
defect and keeps its traceback. docs/exit_codes.md lists the codes and what torchrun makes of them.
"""

STOPPED = 75
"""Exit code of a run that SIGTERM or SIGINT ended at a step border (EX_TEMPFAIL: try again)."""


class MegamemError(Exception):
    """A condition the user can mend. Its message names the field or file, the value and what would be valid."""

    exit_code = 1


class ConfigError(MegamemError):
    """A configuration that cannot run: an unknown key, a wrong type, values that do not fit together."""

    exit_code = 2


class DataError(MegamemError):
    """A corpus, tokenizer or shard that is missing, damaged, foreign or empty."""

    exit_code = 3


class LayoutError(ConfigError):
    """A parallel layout that does not fit the model or the number of processes."""


class RunFolderError(MegamemError):
    """A run folder that cannot be written or that already holds another run."""

    exit_code = 4


class NonFiniteError(MegamemError):
    """Loss or gradients were not finite for too many steps in a row."""

    exit_code = 5


class StuckRankError(MegamemError):
    """A rank made no progress for longer than the configured timeout."""

    exit_code = 6


class ContractError(MegamemError):
    """A mechanism does not keep to what it declares: a defect of the mechanism, found before any update."""

    exit_code = 7


class CheckpointError(MegamemError):
    """A checkpoint that is missing, damaged, of another run, or that could not be written."""

    exit_code = 8


class DamagedError(CheckpointError):
    """A checkpoint that is not as it was written, found while it is read."""


class DependencyError(MegamemError):
    """An optional package that is missing or of a release that is not supported."""

    exit_code = 9


class ConversionError(MegamemError):
    """A model that has no form on the other side, or files that are not one."""

    exit_code = 10


class NodesMissingError(MegamemError):
    """Fewer nodes came together than the job needs, another number than it fits, or the head node was lost."""

    exit_code = 11


class StoreError(MegamemError):
    """An object store that has not answered for as long as it was to be tried again."""

    exit_code = 12


class StoppedError(MegamemError):
    """A signal asked to stop while something waited that cannot be finished first."""

    exit_code = STOPPED


FINAL = frozenset(
    error.exit_code
    for error in (
        ConfigError, DataError, RunFolderError, NonFiniteError, ContractError, CheckpointError, DependencyError,
        ConversionError,
    )
)  # fmt: skip
"""Exit codes after which the same command ends the same way."""
