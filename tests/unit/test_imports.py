"""The architecture as rules over the source: who may import whom, and how long files and functions may be.

docs/architecture.md explains the rules; the table here is what holds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("megamem", "tokenization", "checkpoints", "launchers")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
EVERYTHING = SOURCES + sorted(
    path for folder in ("tests", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")
)

# part: the other parts it may import
ALLOWED = {
    "megamem.errors": set(),
    "megamem.hardware": set(),
    "megamem.files": {"megamem.errors"},
    "megamem.threads": set(),
    "megamem.patience": {"megamem.errors", "megamem.threads"},
    "megamem.tensor_files": {"megamem.errors", "megamem.files"},
    "megamem.config": {"megamem.errors"},
    "megamem.ops": {"megamem.errors"},
    "megamem.parallel": {"megamem.errors"},
    "megamem.memory": {
        "megamem.config", "megamem.errors", "megamem.ops", "megamem.parallel", "megamem.tensor_files",
    },
    "megamem.model": {"megamem.config", "megamem.errors", "megamem.memory", "megamem.ops", "megamem.parallel"},
    "megamem.costs": {"megamem.config", "megamem.errors", "megamem.memory"},
    "tokenization": {"megamem.errors", "megamem.files", "megamem.patience"},
    "megamem.data": {"megamem.config", "megamem.errors", "megamem.files", "megamem.patience", "tokenization"},
    "megamem.pipeline": {
        "megamem.config", "megamem.costs", "megamem.data", "megamem.errors", "megamem.files", "megamem.memory",
        "megamem.model", "megamem.ops", "megamem.parallel",
    },
    # what ranks hold is counted from what they build
    "megamem.planning": {
        "megamem.config", "megamem.costs", "megamem.errors", "megamem.memory", "megamem.model", "megamem.ops",
        "megamem.parallel", "megamem.pipeline",
    },
    "megamem.evaluation": {
        "megamem.config", "megamem.data", "megamem.errors", "megamem.files", "megamem.memory", "megamem.model",
        "megamem.parallel", "megamem.pipeline", "tokenization",
    },
    "checkpoints": {
        "megamem.config", "megamem.errors", "megamem.files", "megamem.memory", "megamem.model", "megamem.parallel",
        "megamem.patience", "megamem.pipeline", "megamem.tensor_files",
    },
    "megamem.runs": {"checkpoints", "megamem.config", "megamem.errors", "megamem.files"},
    "megamem.training": {
        "megamem.memory",  # what layers declare of their states
        "checkpoints", "megamem.config", "megamem.costs", "megamem.data", "megamem.errors", "megamem.evaluation",
        "megamem.files", "megamem.hardware", "megamem.model", "megamem.ops", "megamem.parallel", "megamem.pipeline",
        "megamem.patience", "megamem.planning", "megamem.runs", "tokenization",
    },
    "megamem.hf": {
        "checkpoints", "megamem.config", "megamem.costs", "megamem.data", "megamem.errors", "megamem.evaluation",
        "megamem.files", "megamem.memory", "megamem.model", "megamem.parallel", "tokenization", "megamem.pipeline",
        "megamem.tensor_files",
    },
    "launchers": {
        "megamem.config", "megamem.errors", "megamem.hardware", "megamem.parallel", "megamem.planning",
        "megamem.threads", "megamem.training",
    },
    "megamem.doctor": {
        "megamem.costs", "megamem.errors", "megamem.hardware", "megamem.model", "megamem.ops", "megamem.parallel",
    },
    "megamem.preflight": {
        "megamem.costs", "megamem.errors", "megamem.planning", "megamem.runs", "megamem.threads", "megamem.training",
    },
    "megamem.study": {
        "launchers", "megamem.config", "megamem.costs", "megamem.errors", "megamem.evaluation", "megamem.files",
        "megamem.hardware", "megamem.runs", "megamem.training",
    },
    # what `import megamem` offers; nobody but megamem/__init__.py imports it
    "megamem.api": {
        "checkpoints", "megamem.config", "megamem.evaluation", "megamem.hf", "megamem.memory", "megamem.model",
        "megamem.parallel", "megamem.planning", "megamem.training",
    },
}  # fmt: skip
# the command line may import everything, and nobody imports it
COMMANDS = {"megamem.cli", "megamem.__main__", "megamem.__init__"}
# a family of mechanisms imports these besides its own folder; only composites import other families
SHARED_BY_FAMILIES = {"megamem.memory.base", "megamem.memory.shared"}
COMPOSITES = {"megamem.memory.composite"}
OPTIONAL = {"flash_attn", "apex", "transformer_engine", "fla", "triton", "mamba_ssm", "causal_conv1d"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


MODULES = {module_name(path).removesuffix(".__init__") for path in SOURCES}


def part_of(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "megamem" else parts[0]


@cache
def imports(path: Path, module_level: bool = False, types: bool = False) -> tuple[str, ...]:
    """Names of imported modules.

    module_level: skip function bodies. types: with those that only type checkers see. A module that is imported by
    name from its package is named whole.
    """

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test) and not types:
                continue
            if module_level and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                names = [f"{child.module}.{alias.name}" for alias in child.names]
                modules = [name for name in names if name in MODULES]
                yield from modules
                if len(modules) < len(names) and child.module != "megamem":
                    yield child.module or ""
            yield from walk(child)

    return tuple(walk(ast.parse(path.read_text(encoding="utf-8"))))


def ours(name: str) -> bool:
    return name.split(".")[0] in PACKAGES


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(module_name(path))
    if part in COMMANDS:
        return
    assert part in ALLOWED, f"{part} is new: give it a row here and a line in docs/architecture.md"
    forbidden = {name for name in imports(path) if ours(name) and part_of(name) not in ALLOWED[part] | {part}}
    assert not forbidden


def test_nothing_but_tests_imports_the_command_line() -> None:
    users = [path for path in EVERYTHING if "tests" not in path.relative_to(ROOT).parts]
    for path in users:
        if not module_name(path).startswith(("megamem.cli.", "megamem.__main__")):
            assert not [name for name in imports(path, types=True) if name.startswith("megamem.cli")], path


def test_families_of_mechanisms_stand_by_themselves() -> None:
    for path in SOURCES:
        name = module_name(path)
        family = ".".join(name.split(".")[:3])
        if not name.startswith("megamem.memory.") or family in SHARED_BY_FAMILIES | COMPOSITES | {
            "megamem.memory.__init__"
        }:
            continue
        found = {".".join(other.split(".")[:3]) for other in imports(path) if other.startswith("megamem.memory.")}
        assert not found - SHARED_BY_FAMILIES - {family}, name


def test_no_module_imports_itself_through_others() -> None:
    """Circles among modules, imports inside functions and those for type checkers included."""
    edges = {module_name(path).removesuffix(".__init__"): set(imports(path, types=True)) for path in SOURCES}
    remaining = {name: {other for other in found if other in edges and other != name} for name, found in edges.items()}
    while remaining:
        free = {name for name, found in remaining.items() if not found & remaining.keys()}
        assert free, f"circle among {sorted(remaining)}"
        remaining = {name: found for name, found in remaining.items() if name not in free}


def test_no_cycles() -> None:
    """The table itself is layered: parts can be put in an order in which each imports earlier ones only."""
    remaining = {part: set(allowed) for part, allowed in ALLOWED.items()}
    while remaining:
        free = {part for part, allowed in remaining.items() if not allowed & remaining.keys()}
        assert free, f"cycle among {sorted(remaining)}"
        remaining = {part: allowed for part, allowed in remaining.items() if part not in free}


@pytest.mark.parametrize("part", ["megamem.memory", "megamem.model"])
def test_model_code_knows_layers_but_no_processes(part: str) -> None:
    """Of megamem.parallel only the interface of linear layers; nothing of DeepSpeed, Megatron or process groups."""
    for path in SOURCES:
        if part_of(module_name(path)) == part:
            found = set(imports(path))
            assert not {n for n in found if n.startswith("megamem.parallel")} - {"megamem.parallel.linears"}, path
            assert not {n for n in found if n.startswith(("deepspeed", "megatron", "torch.distributed"))}, path


def test_configuration_and_schedule_import_no_torch() -> None:
    quiet = [path for path in SOURCES if part_of(module_name(path)) == "megamem.config"]
    pure = [ROOT / f"megamem/pipeline/{name}.py" for name in ("schedule", "simulate", "placement", "gantt")]
    for path in [*quiet, *pure, ROOT / "megamem/errors.py", ROOT / "megamem/cli/main.py"]:
        assert not [name for name in imports(path, module_level=True) if name.split(".")[0] == "torch"], path


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_optional_packages_are_not_needed_to_import(path: Path) -> None:
    """But for the files of a folder named after the package, which are imported inside of functions alone."""
    found = imports(path, module_level=True)
    folders = {part for name in found if ours(name) for part in name.split(".")[:-1]}
    assert not OPTIONAL & (folders | {name.split(".")[0] for name in found}) - {path.parent.name}


def test_only_files_so_named_import_kernels() -> None:
    """Triton's and flash-linear-attention's, so that what runs without them is seen from names of files and folders."""
    for path in SOURCES:
        kernels = {"triton", "fla"} & {name.split(".")[0] for name in imports(path)}
        assert kernels <= {path.stem, path.parent.name}, path


@pytest.mark.parametrize("path", EVERYTHING, ids=module_name)
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, node.name


def test_rules_see_what_they_forbid(tmp_path: Path) -> None:
    """The parser behind the rules finds imports in functions and conditions, and leaves those for types out."""
    file = tmp_path / "sample.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import hidden\n"
        "try:\n    import guarded.inner\nexcept ImportError:\n    pass\n"
        "def f():\n    from megamem import errors\n    import flash_attn\n"
    )
    assert set(imports(file)) == {"typing", "guarded.inner", "megamem.errors", "flash_attn"}
    assert set(imports(file, module_level=True)) == {"typing", "guarded.inner"}
