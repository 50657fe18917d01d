"""What a person has written of a configuration: a YAML file, and `section.key=value` words.

In: a file, or words. Out: their content for OmegaConf. A key of text holds the text as it is written (007,
1e3, on; of a word also `x #2`, where a file has YAML's comments), `~` in front is the home folder, as in a
shell, and numbers are decimal: YAML reads 010 as 8, and 2:40 as 160.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from utils.config.schema import Config
from utils.errors import ConfigError

_NOT_DECIMAL = re.compile(
    r"[-+]?(0[0-9_]+|0[box][0-9a-f_]+|[0-9][0-9_]*(:[0-9_]+)+(\.[0-9_]*)?)", re.IGNORECASE
)
_TEXT, _NULL, _MAP = (f"tag:yaml.org,2002:{name}" for name in ("str", "null", "map"))
_NO_YAML = (OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError)


def read_file(path: str | Path) -> DictConfig:
    """The content of a YAML file, not checked against the schema; raises ConfigError."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: expected a YAML configuration, found no such file")
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            return OmegaConf.create({})
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}: top level: expected a section of keys, found {text[:50]!r}")
        OmegaConf.create(text)  # its errors name the lines of the file
        return OmegaConf.create(_content(node, Config, "", str(path)))
    except UnicodeDecodeError as error:
        byte = f"{error.object[error.start]:#04x} at byte {error.start}"
        raise ConfigError(f"{path}: expected UTF-8 text, found {byte}") from error
    except (OSError, *_NO_YAML) as error:
        raise ConfigError(f"{path}: {one_line(error)}") from error


def read_words(overrides: Sequence[str]) -> DictConfig:
    """The content of `section.key=value` words, not checked against the schema; raises ConfigError."""
    written = OmegaConf.create({})
    for word in overrides:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {word!r}: expected section.key=value")
        if value.strip() in ("", "None", "''", '""'):
            raise ConfigError(f"override {word!r}: expected a value or null, found {value}; write {key}=null")
        try:
            OmegaConf.update(written, key, _value_of(key, value, word))
        except _NO_YAML as error:
            raise ConfigError(f"override {word!r}: {one_line(error)}") from error
    return written


class AmbiguousYamlError(yaml.MarkedYAMLError):
    """YAML that two readers may read as two things; `key`: the one that is given twice, None for a number."""

    key: str | None = None


def plain_yaml(text: str) -> Any:
    """yaml.safe_load; raises AmbiguousYamlError for a number that is not decimal, a key given twice, and an
    alias (ten lines of aliases of aliases are more than any memory).
    """
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
        raise AmbiguousYamlError(problem="expected plain values, found an alias (*)")
    if (node := yaml.compose(text, Loader=yaml.SafeLoader)) is not None:
        _check_plain(node)
    return yaml.safe_load(text)


def _check_plain(node: yaml.Node) -> None:
    inner: list[yaml.Node] = list(node.value) if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
        if twice := [name for name in names if names.count(name) > 1]:
            error = AmbiguousYamlError(problem=f"{twice[0]} is given twice", problem_mark=node.start_mark)
            error.key = twice[0]
            raise error
        inner = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.ScalarNode) and node.style is None and _NOT_DECIMAL.fullmatch(node.value):
        text = f"expected a decimal number, found {node.value}"
        raise AmbiguousYamlError(problem=text, problem_mark=node.start_mark)
    for part in inner:
        _check_plain(part)


def _value_of(key: str, value: str, word: str) -> Any:
    """What a word says of its key."""
    hint: Any = Config
    for name in key.split("."):
        hint = get_type_hints(hint).get(name) if is_dataclass(hint) else None
    if _is_text(hint):
        return None if value == "null" else os.path.expanduser(value)
    node = yaml.compose(value, Loader=yaml.SafeLoader)
    rest = value[node.end_mark.index :].strip() if node else value
    if node is None or rest:
        raise ConfigError(f"override {word!r}: expected one value, found {rest!r} after it")
    return _content(node, hint, key, f"override {word!r}")


def _content(node: yaml.Node, hint: Any, key: str, where: str) -> Any:
    """Plain values of a node of YAML that is of this type."""
    _mark_text(node, hint, key, where)
    name = yaml.ScalarNode(_TEXT, "content")
    text = yaml.serialize(yaml.MappingNode(_MAP, [(name, node)]), Dumper=yaml.SafeDumper)
    content = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(content, dict)
    return content["content"]


def _mark_text(node: yaml.Node, hint: Any, key: str, where: str) -> None:
    """Make what the schema has as text a text; raises ConfigError for a number that is not decimal."""
    hint = _without_null(hint)
    if isinstance(node, yaml.MappingNode):
        hints = get_type_hints(hint) if is_dataclass(hint) else {}
        for name, value in node.value:
            is_merged = name.tag == "tag:yaml.org,2002:merge"
            inner = f"{key}.{name.value}" if key else str(name.value)
            _mark_text(
                value, hint if is_merged else hints.get(name.value), key if is_merged else inner, where
            )
    elif isinstance(node, yaml.SequenceNode):
        items = get_args(hint)[0] if get_origin(hint) in (list, tuple) else hint
        for number, value in enumerate(node.value):
            _mark_text(value, items, f"{key}[{number}]", where)
    elif _is_text(hint):
        if node.tag != _NULL:
            node.tag, node.style = _TEXT, node.style or "'"
            node.value = os.path.expanduser(node.value)
    elif _NOT_DECIMAL.fullmatch(node.value):
        raise ConfigError(f"{where}: {key}: expected a decimal number, found {node.value}")


def _without_null(hint: Any) -> Any:
    """The type of a key that may be null."""
    if get_origin(hint) in (Union, UnionType):
        return next(part for part in get_args(hint) if part is not NoneType)
    return hint


def _is_text(hint: Any) -> bool:
    hint = _without_null(hint)
    return hint is str or get_origin(hint) is Literal


def one_line(error: Exception) -> str:
    """The words of an error of YAML or of OmegaConf, without those about its own types."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"\s*(object_type|reference_type|full_key)[=:]\s*\S+", "", " ".join(lines)).strip()
