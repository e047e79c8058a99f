"""The check of a checkpoint before it is used: its files are as they were written, and together are a checkpoint."""

from __future__ import annotations

from checkpoints.folder import MANIFEST, MARKER, RUN, Checkpoint, folder_name
from checkpoints.location import ObjectPath, entries, sha256_of
from checkpoints.records import check_pieces
from checkpoints.storage import INDEX, TensorFiles, read_index
from megamem.errors import CheckpointError


def verify(checkpoint: Checkpoint, skip_extents: bool = False) -> None:
    """Check every file against the manifest, and that the files hold a checkpoint of that step, with all its tensors.

    skip_extents: leave the content of objects whose extents have hashes to those who read them, extent by extent.

    Raises: CheckpointError naming the first file that is not as it should be, and its value.
    """
    skip_extents &= isinstance(checkpoint.path, ObjectPath)
    try:
        _check_files(checkpoint, skip_extents)
        _check_contents(checkpoint, skip_extents)
    except OSError as error:
        raise CheckpointError(f"{error.filename or checkpoint.path}: cannot be read ({error.strerror})") from None


def _check_files(checkpoint: Checkpoint, skip_extents: bool) -> None:
    """See `verify`; a file that cannot be read raises OSError."""
    path = checkpoint.path
    if not checkpoint.complete:
        raise CheckpointError(f"{path}: was not written to its end ({MARKER} is missing)")
    manifest = checkpoint.manifest()
    if (path / MARKER).read_text(encoding="utf-8").strip() != sha256_of(path / MANIFEST):
        raise CheckpointError(f"{path / MANIFEST}: is not the manifest this checkpoint was completed with")
    files, sizes = manifest["files"], entries(path)
    if foreign := sorted(sizes.keys() - {MANIFEST, MARKER, *files}):
        raise CheckpointError(f"{path / foreign[0]}: does not belong to this checkpoint")
    for name, entry in sorted(files.items()):
        file, size = path / name, sizes.get(name)
        if size is None:
            raise CheckpointError(f"{file}: is missing")
        if size != entry["bytes"]:
            raise CheckpointError(f"{file}: has {size:,} bytes, {entry['bytes']:,} were written")
        if not (skip_extents and "extents" in entry) and sha256_of(file) != entry["sha256"]:
            raise CheckpointError(f"{file}: is damaged (its SHA-256 is not that of the manifest)")


def _check_contents(checkpoint: Checkpoint, skip_headers: bool) -> None:
    """Raise CheckpointError unless files that are as they were written hold what a checkpoint does.

    skip_headers: leave out the look into each file of tensors.
    """
    path, saved, index = checkpoint.path, checkpoint.run(), read_index(checkpoint.path)
    if saved["step"] != checkpoint.step:
        raise CheckpointError(f"{path / RUN}: step is {saved['step']}, that of {folder_name(saved['step'])}")
    files = checkpoint.manifest()["files"]
    for name, entry in index.items():
        check_pieces(path / INDEX, name, entry)
        for _, _, file in entry["pieces"]:
            if file not in files:
                raise CheckpointError(f"{path / INDEX}: a piece of {name} is in {file}, which {MANIFEST} does not name")
    if not skip_headers:
        TensorFiles(path).check(index)
