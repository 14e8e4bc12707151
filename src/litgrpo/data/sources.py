"""Where rows come from: files, the Hub, a Python function, a list in memory, or several of them."""

from __future__ import annotations

import inspect
import json
import random
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from glob import glob, has_magic
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from litgrpo.arguments import above, at_least, did_you_mean, import_by_path, require
from litgrpo.data.files import ENDINGS, READERS, Placed, from_list
from litgrpo.distributed.messages import rank_zero_info

PYTHON = "python:"
GIVEN = "the given list"


@dataclass(frozen=True)
class Source:
    """Where rows come from. A plain string in YAML is the `path` of one.

    Args:
        path: a file ending in .jsonl, .json, .csv, .parquet or .txt (one prompt per line), or a
            pattern such as `data/*.jsonl`; or `python:package.module.function?size=500`, a function
            that returns rows; or a folder that `datasets` saved (`save_to_disk`), `folder:split`
            where it has several; or a data set of the Hugging Face Hub, `name`, `name:config` or
            `name:config:split` (split: train).
        limit: take only so many rows, chosen at random, the same ones in every run.
        weight: of this source among several: its share of the training rows is this number over
            the sum of all. Without weights every row comes once in an epoch.
        kwargs: more arguments for the function.
        streaming: leave the rows on disk and read each when its batch comes, for training data that
            do not fit into memory: .jsonl, .txt, .parquet, a folder of `save_to_disk`, or the Hub.
    """

    path: str
    limit: int | None = None
    weight: float | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    streaming: bool = False

    def __post_init__(self) -> None:
        """Refuse what can give no rows."""
        at_least(f"limit of {self.path!r}", self.limit, 1)
        used = not self.kwargs or self.path.startswith(PYTHON)
        require(used, f"kwargs are for a path that begins with {PYTHON!r}, not {self.path}")


class GeneratedSource(ABC):
    """A source whose rows are made when they are read; named by `class_path` in a recipe."""

    @property
    @abstractmethod
    def name(self) -> str:
        """For messages."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """The rows, always the same ones."""


KEYS = {each.name: None for each in fields(Source)}.keys()
# In Python also a `datasets.Dataset`, or anything else that gives one mapping after the other.
SourceLike = (
    str
    | GeneratedSource
    | Source
    | list[str | Source | GeneratedSource]
    | list[str | Source]
    | list[dict[str, Any]]
)
# Sets with names: `{easy: a.jsonl, hard: {path: b.jsonl, limit: 100}}`.
SetsLike = SourceLike | dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One example, and where it was read.

    Args:
        values: the fields by name.
        place: file and line (or row) for messages.
        index: position among all rows that were read with it.
        source: number of its source, where there are several.
        set_name: the name of its set, where there are several.
    """

    values: dict[str, Any]
    place: str
    index: int
    source: int = 0
    set_name: str = ""


def read(source: SetsLike) -> list[Row]:
    """All rows of a source, of several, or of sets with names, up to their limits.

    Args:
        source: a source, its path, a list of these, or the rows themselves (texts become
            `{"prompt": text}`); or {name: any of these}.

    Returns:
        At least one row of each; an empty source is an error.
    """
    named = named_sets(source) if isinstance(source, dict) else {"": source}
    placed = [
        (values, place, number, name)
        for name, given in named.items()
        for number, one in enumerate(several(given))
        for values, place in _some(one)
    ]
    return [
        Row(values, place, index, number, name)
        for index, (values, place, number, name) in enumerate(placed)
    ]


def named_sets(given: Mapping[str, Any]) -> dict[str, SourceLike]:
    """{name: source} of sets with names, as YAML holds them.

    Raises:
        ValueError: it is a source with a misspelled key, or a name or source is missing.
    """
    require("path" not in given, _unknown_key(given))
    require(bool(given), "the sets are {}, but at least one `name: source` is needed")
    for name, source in given.items():
        good = isinstance(name, str) and name and "/" not in name
        require(bool(good), f"{name!r} cannot name a set: names are words, as in `easy: a.jsonl`")
        fits = isinstance(source, Iterable | Source | GeneratedSource) and bool(source)
        require(fits, f"the set {name!r} is {source!r}, not a source such as `a.jsonl`")
    return {name: _as_source(source) for name, source in given.items()}


def _as_source(node: Any) -> Any:
    """A source of what YAML holds; lists item by item, other things as they are."""
    if isinstance(node, list):  # of sources, or of rows, which may have a field `path`
        return [
            Source(**one) if isinstance(one, dict) and "path" in one and one.keys() <= KEYS else one
            for one in node
        ]
    if isinstance(node, dict) and "path" in node:
        require(node.keys() <= KEYS, _unknown_key(node))
        return Source(**node)
    return node


def _unknown_key(node: Mapping[str, Any]) -> str:
    """What is wrong with a source that has a key of another name."""
    word = next((str(name) for name in node if name not in KEYS), "")
    return f"a source has no key {word!r}{did_you_mean(word, KEYS)}; it has {', '.join(KEYS)}"


def several(source: SourceLike) -> list[Any]:
    """The sources that are meant: one, or those of a list, where it names sources and not rows."""
    if not isinstance(source, list):
        return [source]
    named = [isinstance(each, Source | GeneratedSource) or is_path(each) for each in source]
    with_keys = any(isinstance(each, Source | GeneratedSource) for each in source)
    if not any(named):
        return [source]
    text = next((each for each, is_named in zip(source, named, strict=True) if not is_named), "")
    texts = with_keys and isinstance(text, str)
    require(
        all(named) or texts,
        f"the list holds files and {text!r:.60}, which is none: give a list of sources or a list "
        "of rows; a source whose path is no file is `{path: ...}`",
    )
    return source


def is_path(text: Any) -> bool:
    """Whether a text in a list names a source: a function, a file by its ending, or a folder."""
    if not isinstance(text, str) or "\n" in text:
        return False
    named = Path(text).suffix.lower() in READERS and (" " not in text or Path(text).is_file())
    return text.startswith(PYTHON) or named or ("/" in text and Path(text).is_dir())


def weights_of(source: Any) -> list[float] | None:
    """The weight of each of several sources; None where they have none.

    Raises:
        ValueError: some have a weight and others have not.
    """
    each = several(source) if isinstance(source, list) else []
    weights = [one.weight if isinstance(one, Source) else None for one in each]
    given = [weight for weight in weights if weight is not None]
    require(
        len(given) in (0, len(weights)),
        f"{len(given)} of {len(weights)} sources have a weight; give one to each or to none",
    )
    for weight in given:
        above("weight of a source", weight, 0)
    return given or None


def _some(source: Any) -> list[Placed]:
    """The rows of one source, as many as its limit asks for."""
    if isinstance(source, GeneratedSource):
        return from_list(source.rows(), source.name)
    source = Source(source) if isinstance(source, str) else source
    if not isinstance(source, Source):
        rows = _given(source)
        require(bool(rows), f"{GIVEN} holds no rows")
        return rows
    require(
        not source.streaming,
        f"{source.path}: `streaming: true` is for `train` of PromptData alone; leave it out here",
    )
    rows = _placed(source)
    require(bool(rows), f"{source.path} holds no rows")
    return limited(rows, source)


def limited(rows: list[Placed], source: Source) -> list[Placed]:
    """So many rows as the source's limit says, in their order; a higher limit adds to them."""
    if source.limit is None or source.limit >= len(rows):
        return rows
    rank_zero_info(
        f"{source.path}: {source.limit} of {len(rows)} rows, chosen at random, the same ones in "
        "every run (limit)"
    )
    return [rows[number] for number in chosen(len(rows), source.limit)]


def chosen(count: int, limit: int) -> list[int]:
    """`limit` of the numbers below `count`, in their order; a higher limit adds to them."""
    order = array("q", range(count))
    random.Random(0).shuffle(order)
    return sorted(order[:limit])


def _given(rows: Any) -> list[Placed]:
    """Rows that exist in Python: a list, or a `datasets.Dataset`."""
    kind = type(rows).__name__
    iterable = isinstance(rows, Iterable)
    require(
        iterable, f"{rows!r:.60} (a {kind}) is no source: give a path, a list of rows or a Dataset"
    )
    return from_list(rows, GIVEN if isinstance(rows, list) else f"the given {kind}")


def _placed(source: Source) -> list[Placed]:
    path, suffix = source.path, Path(source.path).suffix.lower()
    if path.startswith(PYTHON):
        return _from_function(path, source.kwargs)
    if suffix in READERS:
        return [row for file in files_of(path) for row in READERS[suffix](file)]
    return from_list(saved_or_hub(path), path)


def saved_or_hub(path: str) -> Any:
    """The `datasets.Dataset` of a folder that `save_to_disk` wrote, or of the Hub."""
    suffix = Path(path).suffix
    known = f"{path}: cannot read {suffix or 'a file without ending'}; {ENDINGS}"
    require(not Path(path).is_file(), known)
    folder, *words = path.split(":")
    if any((Path(folder) / name).is_file() for name in SAVED):
        return _from_disk(path, folder, [word for word in words if word])
    require(not has_magic(path), f"{path}: a pattern must end in the ending of files; {ENDINGS}")
    return _from_hub(path)


def files_of(path: str) -> list[Path]:
    """The files that a path or a pattern means, by name.

    Raises:
        ValueError: there is none.
    """
    found = [Path(path)] if Path(path).is_file() else []
    if has_magic(path) and not found:
        found = sorted(Path(name) for name in glob(path, recursive=True) if Path(name).is_file())
        require(bool(found), f"{path}: no file fits this pattern (looked in {Path.cwd()})")
    require(bool(found), f"{path}: no such file (looked in {Path.cwd()})")
    return found


def _from_function(path: str, kwargs: dict[str, Any]) -> list[Placed]:
    name, _, query = path.removeprefix(PYTHON).partition("?")
    arguments = {key: _literal(text) for key, text in parse_qsl(query)} | kwargs
    function = _import(name, path)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"{path}: {error}; signature: {inspect.signature(function)}") from error
    return from_list(function(**arguments), path)


def _import(name: str, path: str) -> Callable[..., Iterable[Any]]:
    try:
        return import_by_path(name)
    except ValueError as error:
        hint = f"write {PYTHON}package.module.function, importable from here"
        raise ValueError(f"{path}: {error}; {hint}") from error


def _literal(text: str) -> Any:
    """The number, truth value or text that was written."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


# What `save_to_disk` of a Dataset and of a DatasetDict leaves in its folder.
SAVED = ("state.json", "dataset_dict.json")


def _from_disk(path: str, folder: str, words: list[str]) -> Any:
    """Rows of a folder that `save_to_disk` of the library `datasets` wrote."""
    from datasets import DatasetDict, load_from_disk  # slow to import

    try:
        saved = load_from_disk(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be loaded from disk ({error})") from error
    sets = saved if isinstance(saved, DatasetDict) else {"train": saved}
    split = (words or ["train"])[-1]
    require(split in sets, f"{path}: has no split {split!r}; it has: {', '.join(sets)}")
    return sets[split]


def _from_hub(path: str) -> Any:
    from datasets import load_dataset  # slow to import, and most runs do not need it

    name, config, split = (*path.split(":"), "", "")[:3]
    try:
        return load_dataset(name, config or None, split=split or "train")
    except (OSError, ValueError) as error:
        hint = f"a data set of the Hub is name:config:split, a local file must exist; {ENDINGS}"
        raise ValueError(f"{path}: cannot be loaded from the Hub ({error}); {hint}") from error
