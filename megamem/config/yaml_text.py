"""Reads and writes YAML as configurations use it: each key once, numbers as they look, no more than is written."""

from __future__ import annotations

import re
from typing import NoReturn

import yaml

from megamem.errors import ConfigError

DEEPEST = 64
"""Levels of sections and lists that a text may have; the shipped configurations have six."""
MOST_VALUES = 100_000
"""Values that a text may stand for, those behind aliases counted wherever they are used."""


class _Loader(yaml.SafeLoader):
    """A loader that refuses what is most likely a slip.

    As YAML 1.2 has it, 2e-3 is a number, and 24:00:00 and 2024-01-31 are text; YAML 1.1 has it the other way round.
    """

    def __init__(self, stream: str) -> None:
        """Read a text."""
        super().__init__(stream)
        self._depth = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Read one value. Raises YAMLError where it is too deep or stands for too many values."""
        event = self.peek_event()
        mark = event.start_mark
        self._depth += 1
        if self._depth > DEEPEST:
            _refuse(f"nested more than {DEEPEST} levels deep", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and node not in self._sizes:
            if isinstance(event, yaml.AliasEvent):
                _refuse(f"*{event.anchor} stands within what it stands for", mark)
            self._sizes[node] = self._checked_size(node, mark)
        return node

    def _checked_size(self, node: yaml.Node, mark: yaml.Mark) -> int:
        """Return how many values a node stands for. Raises YAMLError for keys and aliases that are refused."""
        children: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            children = node.value
        elif isinstance(node, yaml.MappingNode):
            _refuse_second_keys(node)
            children = [child for pair in node.value for child in pair]
        size = 1 + sum(self._sizes[child] for child in children)
        if size > MOST_VALUES:
            _refuse(f"its aliases stand for more than {MOST_VALUES:,} values", mark)
        return size

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        """Return the value of a node. Raises YAMLError, also where Python's own types refuse it."""
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            _refuse(str(error), node.start_mark)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        """Return the text of a node. Raises YAMLError for half a character, as "\\ud800" makes one."""
        text: str = super().construct_scalar(node)
        if half := re.search("[\ud800-\udfff]", text):
            _refuse(f"text with half a character (\\u{ord(half[0]):x})", node.start_mark)
        return text


def _refuse(problem: str, mark: yaml.Mark) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _refuse_second_keys(node: yaml.MappingNode) -> None:
    """Raise YAMLError for a key that a mapping has twice: the first value would be lost without a word."""
    seen: dict[str, int] = {}
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                _refuse(f"{key.value!r} is given on line {seen[key.value]} already; keep one", key.start_mark)
            seen[key.value] = key.start_mark.line + 1


def _no_number(loader: _Loader, node: yaml.ScalarNode) -> NoReturn:
    """Refuse 010, which is 8 in YAML 1.1 and 10 for most readers."""
    plain = re.sub(r"^([-+]?)[0_]+(?=\d)", r"\1", node.value)
    _refuse(f"{node.value} begins with 0; write {plain}, or '{node.value}' for text", node.start_mark)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if not tag.endswith(":timestamp")]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)
for first in "-+0123456789":  # the first form that fits counts
    _Loader.yaml_implicit_resolvers[first].insert(0, ("tag:yaml.org,2002:str", re.compile(r"^\d+(:\d+)+$")))
    _Loader.yaml_implicit_resolvers[first].insert(0, ("!begins-with-0", re.compile(r"^[-+]?0[\d_]+$")))
_Loader.add_constructor("!begins-with-0", _no_number)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes the text that the loader would read as something else."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def parse_yaml(text: str, where: str) -> object:
    """Return the value of a YAML text. Raises ConfigError naming `where` and the line."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  (a SafeLoader that refuses more)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", error)).split())
        raise ConfigError(f"{where}{line}: not valid YAML: {problem}") from None


def to_yaml(value: object) -> str:
    """Return YAML that `parse_yaml` reads back as an equal value; keys stay in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
