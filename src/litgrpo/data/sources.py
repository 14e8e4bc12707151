"""Sources of rows: files, the Hub, Python functions, lists, generators, or several of them."""

from __future__ import annotations

import inspect
import json
import random
import re
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from glob import glob, has_magic
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol
from urllib.parse import parse_qsl

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import (
    above,
    at_least,
    did_you_mean,
    first_line,
    import_by_path,
    require,
)
from litgrpo.data.files import (
    ENDINGS,
    LINE_PARSERS,
    READERS,
    LineFile,
    PlacedRow,
    require_object,
    rows_from_list,
)
from litgrpo.data.in_memory import is_table, read_object, without_nulls_in_row
from litgrpo.data.loader import allocate_rows
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.types import TASK
from litgrpo.workers.sandbox.wire import dumps

PYTHON = "python:"
GIVEN = "the given list"
EPISODE_NUMBER = "episode_number"  # column that distinguishes rows with the same prompt
STREAMABLE = (
    f"{', '.join(LINE_PARSERS)}, .parquet, a folder of save_to_disk or a data set of the Hub"
)
# Files that `save_to_disk` of a Dataset and of a DatasetDict writes.
SAVED = ("state.json", "dataset_dict.json")
INSTALL = "needs `pip install reasoning-gym==0.1.25`"


@check_field_types
@dataclass(frozen=True)
class Source:
    """A source of rows. A plain string in YAML is its `path`.

    Args:
        path: a file ending in .jsonl, .json, .csv, .parquet or .txt (one prompt per line), or a
            pattern such as `data/*.jsonl`; or `python:package.module.function?size=500`, a function
            that returns rows; or a folder that `datasets` saved (`save_to_disk`), `folder:split`
            if it has several; or a data set of the Hugging Face Hub, `name`, `name:config` or
            `name:config:split` (split: train).
        limit: take only this number of rows, chosen at random, the same ones in every run.
        weight: share of this source among several: its part of the training rows is this number
            over the sum of all. Without weights every row is used once per epoch.
        kwargs: more arguments for the function.
        streaming: leave the rows on disk and read each with its batch, for training data that do
            not fit into memory: .jsonl, .txt, .parquet, a folder of `save_to_disk`, or the Hub.
        columns: names of columns in this source, in addition to `columns` of the data.
        extract: regular expressions for this source, in addition to `extract` of the data.

    Example:
        >>> Source("openai/gsm8k:main:train", limit=1000, columns={"prompt": "question"}).limit
        1000
    """

    path: str
    limit: int | None = None
    weight: float | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    streaming: bool = False
    columns: dict[str, str] = field(default_factory=dict)
    extract: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the options."""
        object.__setattr__(self, "path", str(self.path))  # a `pathlib.Path` in Python
        at_least(f"limit of {self.path!r}", self.limit, 1)
        used = not self.kwargs or self.path.startswith(PYTHON)
        require(used, f"kwargs are for a path that begins with {PYTHON!r}, not {self.path}")
        for name, pattern in self.extract.items():
            check_pattern(f"extract of {self.path!r}, {name}", pattern)


def check_pattern(option: str, pattern: str) -> None:
    """Check that a pattern is a regular expression with one group.

    Raises:
        ValueError: it is not; the message begins with `option`.
    """
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"{option}: {pattern!r} is not a regular expression: {error}") from error
    require(groups == 1, f"{option}: {pattern!r} has {groups} groups, expected one")


class GeneratedSource(ABC):
    """Base class of sources whose rows are computed; named by `class_path` in a recipe."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name for messages."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Generate the rows, the same ones in every call."""


@check_field_types
@dataclass(frozen=True)
class EpisodePrompts(GeneratedSource):
    """Rows for a game that needs no data: the same prompt `size` times, each with a number.

    The number seeds the environment, so episodes differ. Rows have `prompt`, `episode_number` and
    the `columns`. `val_fraction` splits by number; a separate validation source needs other
    numbers, set by `first_episode`.

    Args:
        size: number of rows.
        prompt: prompt of each row; the text that the environment's `reset` returns is appended.
        first_episode: number of the first row.
        columns: {name: value}, the same in each row, such as `{level: easy}`.

    Example:
        >>> EpisodePrompts(size=2, prompt="Guess.", first_episode=7).rows()[1]
        {'prompt': 'Guess.', 'episode_number': 8}
    """

    size: int = 1000
    prompt: str = "Play."
    first_episode: int = 0
    columns: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the options."""
        at_least("size of EpisodePrompts", self.size, 1)
        at_least("first_episode of EpisodePrompts", self.first_episode, 0)
        require(bool(self.prompt.strip()), "prompt of EpisodePrompts is empty; set a text")
        for name in ("prompt", EPISODE_NUMBER):
            if name in self.columns:
                raise ValueError(
                    f"columns of EpisodePrompts contain {name!r}, which is set for each row; "
                    "choose another name"
                )

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"EpisodePrompts({self.size})"

    def rows(self) -> list[dict[str, Any]]:
        """Generate the rows, in the order of their numbers."""
        numbers = range(self.first_episode, self.first_episode + self.size)
        return [{"prompt": self.prompt, EPISODE_NUMBER: n, **self.columns} for n in numbers]


@check_field_types
@dataclass(frozen=True)
class ReasoningGym(GeneratedSource):
    """Problems of reasoning-gym, generated on reading: the same ones for the same arguments.

    Rows have `prompt`, `answer` (None if a task has several correct answers), `task`, and
    `metadata`, the whole entry as text, which `litgrpo.rewards.reasoning_gym` scores.

    Args:
        tasks: {name: weight}: shares of the rows, such as `{countdown: 2, leg_counting: 1}`.
        size: number of rows, all tasks together.
        seed: random seed of the problems. In nearly all tasks problem n is generated from
            `seed + n`: for other problems use a seed further away than `size`.
        configs: {name: {setting: value}} of the tasks, such as `{countdown: {max_numbers: 4}}`.

    Example:
        >>> ReasoningGym({"countdown": 2, "leg_counting": 1}, size=300, seed=7).name
        'ReasoningGym(seed 7)'
    """

    tasks: dict[str, float]
    size: int = 500
    seed: int = 0
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the options."""
        require(bool(self.tasks), "tasks of ReasoningGym are {}; give `{countdown: 1}` or others")
        at_least("size of ReasoningGym", self.size, len(self.tasks))
        for name, weight in self.tasks.items():
            above(f"weight of task {name!r}", weight, 0)
        for name in self.configs:
            hint = f"; the tasks are {', '.join(self.tasks)}"
            require(name in self.tasks, f"configs of ReasoningGym name {name!r}{hint}")

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"ReasoningGym(seed {self.seed})"

    def rows(self) -> list[dict[str, Any]]:
        """Generate the rows: tasks spread evenly, each in its own order.

        Raises:
            ValueError: the package is not installed, or has no such task or setting.
        """
        library = import_reasoning_gym()
        known = sorted(library.factory.DATASETS)
        for name in self.tasks:
            hint = did_you_mean(name, known)
            require(name in known, f"reasoning-gym has no task {name!r}{hint}; it has {len(known)}")
        placed = []
        counts = allocate_rows(self.size, list(self.tasks.values()))
        for number, (name, count) in enumerate(zip(self.tasks, counts, strict=True)):
            rows = self._generate(library, name, count)
            placed += [((n + 0.5) / count, number, row) for n, row in enumerate(rows)]
        return [row for _, _, row in sorted(placed, key=lambda one: one[:2])]

    def _generate(self, library: ModuleType, name: str, count: int) -> list[dict[str, Any]]:
        """Generate rows of one task and restore the global random state, which tasks use."""
        state = random.getstate()
        try:
            given = {"seed": self.seed, "size": max(count, 1), **self.configs.get(name, {})}
            try:
                entries = library.create_dataset(name, **given)
                return [row_of_entry(name, entries[n]) for n in range(count)]
            except (TypeError, ValueError, AssertionError) as error:
                raise ValueError(f"reasoning-gym, task {name!r}: {error}") from error
        finally:
            random.setstate(state)


def row_of_entry(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Convert an entry of a reasoning-gym task to a row.

    Example:
        >>> row_of_entry("sums", {"question": "1 + 1 =", "answer": 2, "metadata": {}})["answer"]
        '2'
    """
    answer = entry["answer"]
    return {
        "prompt": str(entry["question"]),
        "answer": None if answer is None else str(answer),
        TASK: name,
        "metadata": dumps(entry),
    }


def import_reasoning_gym() -> ModuleType:
    """Import the package, which takes a second.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError(f"litgrpo.data.ReasoningGym {INSTALL}: {error}") from error
    import reasoning_gym.factory

    return reasoning_gym


SOURCE_KEYS = {each.name: None for each in fields(Source)}.keys()
# In Python also a `datasets.Dataset`, or any other iterable of mappings.
SourceLike = (
    str
    | GeneratedSource
    | Source
    | list[str | Source | GeneratedSource]
    | list[str | Source]
    | list[dict[str, Any]]
    | list[Any]  # others get an error that names the row
)
# Named sets: `{easy: a.jsonl, hard: {path: b.jsonl, limit: 100}}`.
SetsLike = SourceLike | dict[str, Any]


@dataclass(frozen=True)
class SourceRow:
    """One example, and where it was read.

    Args:
        values: the fields by name.
        place: file and line (or row) for messages.
        index: position among all rows that were read together.
        source: number of its source, if there are several.
        set_name: name of its set, if there are several.
        origin: its source, whose `columns` and `extract` apply to this row; None: only those of the
            data do.

    Example:
        SourceRow({"question": "1+1?", "answer": "2"}, place="data/a.jsonl, line 7", index=6)
    """

    values: dict[str, Any]
    place: str
    index: int
    source: int = 0
    set_name: str = ""
    origin: Source | None = None


def read_rows(source: SetsLike) -> list[SourceRow]:
    """Read all rows of a source, of several, or of named sets, up to their limits.

    Rows of named sets get the name as column `task`, unless they have such a column.

    Args:
        source: a source, its path, a list of these, or the rows themselves (texts become
            `{"prompt": text}`); or {name: any of these}.

    Raises:
        ValueError: a source is empty or cannot be read.

    Example:
        >>> [row.values for row in read_rows(["What is 3+4?"])]
        [{'prompt': 'What is 3+4?'}]
        >>> [row.values for row in read_rows({"sums": ["What is 3+4?"]})]
        [{'task': 'sums', 'prompt': 'What is 3+4?'}]
    """
    named = parse_named_sets(source) if isinstance(source, dict) else {"": source}
    found: list[SourceRow] = []
    for name, given in named.items():
        task = {TASK: name} if name else {}
        for number, one in enumerate(split_sources(given)):
            origin = one if isinstance(one, Source) else None
            found += [
                SourceRow(task | values, place, 0, number, name, origin)
                for values, place in _read_one(one)
            ]
    return [replace(row, index=index) for index, row in enumerate(found)]


def parse_named_sets(given: Mapping[str, Any]) -> dict[str, SourceLike]:
    """Return {name: source} of named sets as YAML holds them.

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
    return {name: _parse_source(source) for name, source in given.items()}


def _parse_source(node: Any) -> Any:
    if isinstance(node, list):  # of sources, or of rows, which may have a field `path`
        return [
            Source(**one)
            if isinstance(one, dict) and "path" in one and one.keys() <= SOURCE_KEYS
            else one
            for one in node
        ]
    if isinstance(node, dict) and "path" in node:
        require(node.keys() <= SOURCE_KEYS, _unknown_key(node))
        return Source(**node)
    return node


def _unknown_key(node: Mapping[str, Any]) -> str:
    word = next((str(name) for name in node if name not in SOURCE_KEYS), "")
    hint = did_you_mean(word, SOURCE_KEYS)
    return f"a source has no key {word!r}{hint}; it has {', '.join(SOURCE_KEYS)}"


def split_sources(source: SourceLike) -> list[Any]:
    """Return the items of a list of sources; a list of rows, or any other source, is one item.

    Example:
        >>> split_sources(["a.jsonl", "b.jsonl"])
        ['a.jsonl', 'b.jsonl']
        >>> split_sources(["What is 3+4?", "What is 5+6?"])
        [['What is 3+4?', 'What is 5+6?']]
    """
    if not isinstance(source, list):
        return [source]
    objects = [isinstance(each, Source | GeneratedSource) or is_table(each) for each in source]
    named = [
        is_object or names_source(each) for is_object, each in zip(objects, source, strict=True)
    ]
    with_objects = any(objects)
    if not any(named):
        return [source]
    text = next((each for each, is_named in zip(source, named, strict=True) if not is_named), "")
    texts = with_objects and isinstance(text, str)
    require(
        all(named) or texts,
        f"the list contains files and {text!r:.60}, which is not a file: give a list of sources or "
        "a list of rows; write a source whose path is not a file as `{path: ...}`",
    )
    return source


def names_source(text: Any) -> bool:
    """True if a text in a list names a source: a function, a file by its ending, or a folder."""
    if not isinstance(text, str) or "\n" in text:
        return False
    is_file = Path(text).suffix.lower() in READERS and (" " not in text or Path(text).is_file())
    return text.startswith(PYTHON) or is_file or ("/" in text and Path(text).is_dir())


def source_weights(source: Any) -> list[float] | None:
    """Return the weight of each of several sources; None if they have none.

    Raises:
        ValueError: only some have a weight.
    """
    each = split_sources(source) if isinstance(source, list) else []
    weights = [one.weight if isinstance(one, Source) else None for one in each]
    given = [weight for weight in weights if weight is not None]
    require(
        len(given) in (0, len(weights)),
        f"{len(given)} of {len(weights)} sources have a weight; give one to each or to none",
    )
    for weight in given:
        above("weight of a source", weight, 0)
    return given or None


def _read_one(source: Any) -> list[PlacedRow]:
    """Read one source, up to its limit."""
    if isinstance(source, GeneratedSource):
        return rows_from_list(source.rows(), source.name)
    if isinstance(source, str | Path):
        source = Source(str(source))
    if not isinstance(source, Source):
        return _rows_in_memory(source)
    require(
        not source.streaming,
        f"{source.path}: `streaming: true` is only for `train` of PromptData; leave it out here",
    )
    rows = _read_path(source)
    require(bool(rows), f"{source.path} holds no rows")
    if source.limit is None or source.limit >= len(rows):
        return rows
    rank_zero_info(
        f"{source.path}: {source.limit} of {len(rows)} rows, chosen at random, the same ones in "
        "every run (limit)"
    )
    return [rows[number] for number in choose_rows(len(rows), source.limit)]


def choose_rows(count: int, limit: int) -> Sequence[int]:
    """Choose `limit` of the numbers below `count` at random; return them sorted.

    The choice is the same in every run, and a higher limit only adds to it.
    """
    order = array("q", range(count))
    random.Random(0).shuffle(order)
    return sorted(order[:limit])


def _rows_in_memory(rows: Any) -> list[PlacedRow]:
    """Return rows that exist in Python."""
    name = GIVEN if isinstance(rows, list) else f"the given {type(rows).__name__}"
    found = rows_from_list(read_object(rows), name)
    require(bool(found), f"{name} holds no rows")
    return found


def _read_path(source: Source) -> list[PlacedRow]:
    path, suffix = source.path, Path(source.path).suffix.lower()
    if path.startswith(PYTHON):
        return _call_function(path, source.kwargs)
    if suffix in READERS:
        return [row for file in find_files(path) for row in READERS[suffix](file)]
    return rows_from_list(read_object(load_hf_dataset(path)), path)


def load_hf_dataset(path: str) -> Any:
    """Load a `datasets.Dataset` from a folder that `save_to_disk` wrote, or from the Hub."""
    suffix = Path(path).suffix
    require(
        not Path(path).is_file(),
        f"{path}: cannot read {suffix or 'a file without an ending'}; {ENDINGS}",
    )
    folder, *words = path.split(":")
    if any((Path(folder) / name).is_file() for name in SAVED):
        return _load_from_disk(path, folder, [word for word in words if word])
    require(not has_magic(path), f"{path}: a pattern must end in the ending of files; {ENDINGS}")
    return _load_from_hub(path)


def find_files(path: str) -> list[Path]:
    """Return the files that a path or a pattern matches, sorted by name.

    Raises:
        ValueError: there is none.
    """
    if Path(path).is_file():
        return [Path(path)]
    require(has_magic(path), f"{path}: no such file (looked in {Path.cwd()})")
    found = sorted(Path(name) for name in glob(path, recursive=True) if Path(name).is_file())
    require(bool(found), f"{path}: no file fits this pattern (looked in {Path.cwd()})")
    return found


def _call_function(path: str, kwargs: dict[str, Any]) -> list[PlacedRow]:
    name, _, query = path.removeprefix(PYTHON).partition("?")
    arguments = {key: _parse_literal(text) for key, text in parse_qsl(query)} | kwargs
    try:
        function: Callable[..., Iterable[Any]] = import_by_path(name)
    except ValueError as error:
        hint = f"write {PYTHON}package.module.function, importable from here"
        raise ValueError(f"{path}: {error}; {hint}") from error
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"{path}: {error}; signature: {inspect.signature(function)}") from error
    return rows_from_list(read_object(function(**arguments)), path)


def _parse_literal(text: str) -> Any:
    """Return the number, truth value or text that was written."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _load_from_disk(path: str, folder: str, words: list[str]) -> Any:
    from datasets import DatasetDict, load_from_disk  # slow to import

    try:
        saved = load_from_disk(folder)
    except Exception as error:  # of the library, of many types
        raise ValueError(f"{path}: could not be loaded from disk ({first_line(error)})") from error
    sets = saved if isinstance(saved, DatasetDict) else {"train": saved}
    split = (words or ["train"])[-1]
    require(split in sets, f"{path}: has no split {split!r}; it has: {', '.join(sets)}")
    return sets[split]


def _load_from_hub(path: str) -> Any:
    from datasets import load_dataset  # slow to import, and most runs do not need it

    name, config, split = (*path.split(":"), "", "")[:3]
    try:
        return load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # of the library, also for a script, which it does not run
        hint = f"a data set of the Hub is name:config:split, a local file must exist; {ENDINGS}"
        raise ValueError(
            f"{path}: could not be loaded from the Hub ({first_line(error)}); {hint}"
        ) from error


# Rows that stay on disk (`streaming: true`)


class RowsOnDisk(Protocol):
    """Rows with their places, read on access."""

    def __len__(self) -> int:
        """Number of rows."""

    def __getitem__(self, row: int) -> PlacedRow:
        """Read a row."""


class HFDatasetRows:
    """Rows of a `datasets.Dataset`, which maps its files into memory.

    Args:
        rows: the data set.
        name: name for places.
    """

    def __init__(self, rows: Any, name: str) -> None:
        self.rows, self.name = rows, name

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def __getitem__(self, row: int) -> PlacedRow:
        """Read a row."""
        place = f"{self.name}, row {row + 1}"
        return require_object(without_nulls_in_row(self.rows[int(row)]), place), place


class ConcatenatedRows:
    """The rows of several sources, one after the other.

    Args:
        parts: the sources.
    """

    def __init__(self, parts: Sequence[RowsOnDisk]) -> None:
        self.parts, self.ends = parts, [*accumulate(map(len, parts))]

    def __len__(self) -> int:
        """Number of rows."""
        return self.ends[-1]

    def __getitem__(self, row: int) -> PlacedRow:
        """Read a row."""
        part = bisect_right(self.ends, row)
        return self.parts[part][row - self.ends[part] + len(self.parts[part])]


class ChosenRows:
    """A random choice of rows, the same ones in every run.

    Args:
        rows: all rows.
        limit: number of rows to choose.
    """

    def __init__(self, rows: RowsOnDisk, limit: int) -> None:
        self.rows, self.numbers = rows, array("q", choose_rows(len(rows), limit))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.numbers)

    def __getitem__(self, row: int) -> PlacedRow:
        """Read a row."""
        return self.rows[self.numbers[row]]


def is_streaming(source: Any) -> bool:
    """True if a source, or any of a list, leaves its rows on disk."""
    each = source if isinstance(source, list) else [source]
    return any(isinstance(one, Source) and one.streaming for one in each)


def task_weights_of(sets: Any, weights: Mapping[str, float] | None) -> list[float] | None:
    """Return the weight of each named set, in their order; None without weights.

    Args:
        sets: source of the training rows.
        weights: {name: weight} of all of them, or None.

    Raises:
        ValueError: the names do not fit, or a source within a named set has a weight.

    Example:
        >>> task_weights_of({"math": "a.jsonl", "chat": "b.jsonl"}, {"chat": 1, "math": 2})
        [2, 1]
    """
    if not isinstance(sets, Mapping):
        require(
            weights is None,
            "task_weights are for several tasks: name them, as in `train: {math: a.jsonl, chat: "
            "b.jsonl}`",
        )
        return source_weights(sets)
    for name, source in sets.items():
        inside = _parse_source(source)
        given = [getattr(one, "weight", None) for one in split_sources(inside)]
        require(
            not any(given), f"the set {name!r} has a source with a weight; set task_weights instead"
        )
    if weights is None:
        return None
    for name in weights:
        hint = f"{did_you_mean(name, sets)}; train has {', '.join(sets)}"
        require(name in sets, f"task_weights has {name!r}, which is not a set of train{hint}")
    for name in sets:
        require(name in weights, f"task_weights has no weight for {name!r}; give one to each set")
        above(f"weight of task {name!r}", weights[name], 0)
    return [weights[name] for name in sets]


def open_rows(source: Any) -> RowsOnDisk:
    """Open a source or several without reading their rows into memory.

    Raises:
        ValueError: a source has a weight, no rows, or cannot be read row by row.
    """
    each = [Source(one) if isinstance(one, str) else one for one in split_sources(source)]
    require(
        all(isinstance(one, Source) for one in each),
        "train has a source with `streaming: true`: its other sources must be paths as well",
    )
    for name in ("weight", "columns", "extract"):
        require(
            not any(getattr(one, name) for one in each),
            f"{name} and streaming cannot be combined: leave one of them out",
        )
    return ConcatenatedRows([_open_source(one) for one in each])


def _open_source(source: Source) -> RowsOnDisk:
    path, suffix = source.path, Path(source.path).suffix.lower()
    require(
        not path.startswith(PYTHON) and suffix not in (".csv", ".json"),
        f"{path} cannot be read row by row: streaming is for {STREAMABLE}",
    )
    parts: Sequence[RowsOnDisk]
    if suffix in LINE_PARSERS:
        parts = [LineFile(file, LINE_PARSERS[suffix]) for file in find_files(path)]
    elif suffix == ".parquet":
        from datasets import load_dataset  # slow to import

        files = [str(file) for file in find_files(path)]
        try:
            loaded = load_dataset("parquet", data_files=files, split="train")
        except Exception as error:  # of the library, of many types
            cause = error.__cause__ or error
            raise ValueError(f"{path}: not Parquet: {first_line(cause)}") from error
        parts = [HFDatasetRows(loaded, path)]
    else:
        parts = [HFDatasetRows(load_hf_dataset(path), path)]
    rows = ConcatenatedRows(parts)
    require(len(rows) > 0, f"{path} holds no rows")
    return rows if source.limit is None else ChosenRows(rows, source.limit)
