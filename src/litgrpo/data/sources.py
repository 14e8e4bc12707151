"""Sources of rows: files, the Hub, Python functions, lists, generators, or several of them."""

from __future__ import annotations

import inspect
import json
import random
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from glob import glob, has_magic
from io import IOBase
from pathlib import Path
from types import ModuleType
from typing import Any, overload
from urllib.parse import parse_qsl

import numpy as np

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import (
    above,
    at_least,
    did_you_mean,
    first_line,
    import_by_path,
    require,
    type_with_article,
)
from litgrpo.data.files import ENDINGS, READERS, PlacedRow, TableRows, rows_from_list
from litgrpo.data.in_memory import are_columns, is_table, read_object, rows_of_columns
from litgrpo.data.loader import allocate_rows
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.instantiate import instantiate_class
from litgrpo.types import TASK
from litgrpo.workers.sandbox.wire import dumps

PYTHON = "python:"
CHUNK = 1000  # rows that are rendered and tokenized together
EPISODE_NUMBER = "episode_number"  # column that distinguishes rows with the same prompt
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
        kwargs: more arguments for the function.
        columns: names of columns in this source, in addition to `columns` of the data.
        extract: regular expressions for this source, in addition to `extract` of the data.

    Example:
        >>> Source("openai/gsm8k:main:train", limit=1000, columns={"prompt": "question"}).limit
        1000
    """

    path: str
    limit: int | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    extract: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", str(self.path))  # a `pathlib.Path` in Python
        at_least(f"limit of {self.path!r}", self.limit, 1)
        used = not self.kwargs or self.path.startswith(PYTHON)
        require(used, f"kwargs are for a path that begins with {PYTHON!r}, not {self.path}")
        for name, pattern in self.extract.items():
            check_pattern(f"extract of {self.path!r}, {name}", pattern)


def check_pattern(option: str, pattern: str) -> None:
    """Check that a pattern is a regular expression with one group."""
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
        return f"EpisodePrompts({self.size})"

    def rows(self) -> list[dict[str, Any]]:
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
        require(bool(self.tasks), "tasks of ReasoningGym are {}; give `{countdown: 1}` or others")
        at_least("size of ReasoningGym", self.size, len(self.tasks))
        for name, weight in self.tasks.items():
            above(f"weight of task {name!r}", weight, 0)
        for name in self.configs:
            hint = f"; the tasks are {', '.join(self.tasks)}"
            require(name in self.tasks, f"configs of ReasoningGym name {name!r}{hint}")

    @property
    def name(self) -> str:
        return f"ReasoningGym(seed {self.seed})"

    def rows(self) -> list[dict[str, Any]]:
        """Generate the rows: tasks spread evenly, each in its own order.

        Raises:
            ValueError: the package is not installed, or has no such task or setting.
        """
        library = import_reasoning_gym()
        tasks = sorted(library.factory.DATASETS)
        for name in self.tasks:
            hint = did_you_mean(name, tasks)
            require(name in tasks, f"reasoning-gym has no task {name!r}{hint}; it has {len(tasks)}")
        keyed = []  # (fraction of its task's rows before it, number of its task, row)
        counts = allocate_rows(self.size, list(self.tasks.values()))
        for number, (name, count) in enumerate(zip(self.tasks, counts, strict=True)):
            rows = self._generate(library, name, count)
            keyed += [((n + 0.5) / count, number, row) for n, row in enumerate(rows)]
        return [row for _, _, row in sorted(keyed, key=lambda item: item[:2])]

    def _generate(self, library: ModuleType, name: str, count: int) -> list[dict[str, Any]]:
        """Generate rows of one task and restore the global random state, which tasks use."""
        state = random.getstate()
        try:
            settings = {"seed": self.seed, "size": max(count, 1), **self.configs.get(name, {})}
            try:
                entries = library.create_dataset(name, **settings)
                return [row_of_entry(name, entries[n]) for n in range(count)]
            except (TypeError, ValueError, AssertionError) as error:
                raise ValueError(f"reasoning-gym, task {name!r}: {error}") from error
        finally:
            random.setstate(state)


def row_of_entry(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Convert an entry of a reasoning-gym task to a row."""
    answer = entry["answer"]
    return {
        "prompt": str(entry["question"]),
        "answer": None if answer is None else str(answer),
        TASK: name,
        "metadata": dumps(entry),
    }


def import_reasoning_gym() -> ModuleType:
    """Import the package, which takes a second; ValueError if it is not installed."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError(f"litgrpo.data.ReasoningGym {INSTALL}: {error}") from error
    import reasoning_gym.factory

    return reasoning_gym


SOURCE_KEYS = {option.name: None for option in fields(Source)}.keys()
# In Python also a `datasets.Dataset`, or any other iterable of mappings.
SourceLike = (
    str | GeneratedSource | Source | list[str] | list[dict[str, Any]] | list[Any]
    # `list[Any]`: other items get an error that names the row
)
# Named sets: `{easy: a.jsonl, hard: {path: b.jsonl, limit: 100}}`.
SetsLike = SourceLike | dict[str, Any]


@dataclass(frozen=True)
class SourceRow:
    """One example, and where it was read."""

    values: dict[str, Any]  # the fields by name
    place: str  # file and line (or row), such as `data/a.jsonl, line 7`
    index: int  # of the row in its sources, see `Rows`
    set_name: str = ""  # name of its set, if there are several
    # its source, whose `columns` and `extract` apply to this row; None: only those of the data do
    origin: Source | None = None


@dataclass(frozen=True)
class Part:
    """Rows of one file or object."""

    rows: Sequence[PlacedRow]  # with their places; files of many rows read them on access
    set_name: str  # name of their set, or ""
    origin: Source | None  # their source, if it has options


def _unchanged(row: SourceRow) -> SourceRow:
    return row


@dataclass(frozen=True)
class Rows(Sequence[SourceRow]):
    """Rows of one source or of several sets, each read from its part on access."""

    # A row has a position among all rows of the parts, an index among those within the limits of
    # their sources (`SourceRow.index`), and a number among those of this set: `rows[number]`.
    parts: Sequence[Part]  # one after the other
    positions: np.ndarray  # [indices] position of the row of each index, ascending
    indices: np.ndarray  # [rows] index of the row of each number, ascending
    convert: Callable[[SourceRow], SourceRow] = _unchanged  # applied to each row that is read

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, number: int) -> SourceRow: ...
    @overload
    def __getitem__(self, number: slice) -> list[SourceRow]: ...
    def __getitem__(self, number: int | slice) -> SourceRow | list[SourceRow]:
        if isinstance(number, slice):
            return [self._read_row(int(index)) for index in self.indices[number]]
        return self._read_row(int(self.indices[number]))

    def __iter__(self) -> Iterator[SourceRow]:
        return (self._read_row(int(index)) for index in self.indices)

    def chunks(self) -> Iterator[list[SourceRow]]:
        """Read the rows in their order, several at a time, for what is faster together."""
        return (self[start : start + CHUNK] for start in range(0, len(self), CHUNK))

    def _read_row(self, index: int) -> SourceRow:
        position = int(self.positions[index])
        part_number = int(np.searchsorted(self._ends, position, side="right"))
        part = self.parts[part_number]
        values, place = part.rows[position - int(self._ends[part_number]) + len(part.rows)]
        task = {TASK: part.set_name} if part.set_name else {}
        return self.convert(SourceRow(task | values, place, index, part.set_name, part.origin))

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(part.rows) for part in self.parts])

    @property
    def set_names(self) -> list[str]:
        """Name of each row's set; "" for sets without names."""
        part_numbers = np.searchsorted(self._ends, self.positions[self.indices], side="right")
        return [self.parts[number].set_name for number in part_numbers]

    def select(self, selection: Any) -> Rows:
        """Return the rows that a mask or ascending numbers choose."""
        return replace(self, indices=self.indices[selection])


def resolve_source(source: Any, columns: Iterable[str], role: str) -> Any:
    """Return a source, or {name: source} of named sets, that each stage of a run can read again.

    Paths become texts, generators and tuples lists, a dictionary of columns a list of rows, and
    mappings as YAML holds them objects. `role` names the source in messages.
    """
    # `columns` are names by which a dictionary of columns differs from named sets.
    if isinstance(source, Path):
        return str(source)
    if isinstance(source, Mapping):
        return _resolve_mapping(source, {*columns}, role)
    if isinstance(source, Iterator) and not isinstance(source, IOBase):
        return list(source)  # it can be read once only
    return list(source) if isinstance(source, tuple) else source


def _resolve_mapping(source: Mapping[str, Any], columns: set[str], role: str) -> Any:
    if are_columns(source) and columns & source.keys():
        return rows_of_columns(source)
    if "class_path" in source:
        return instantiate_class(source, role)
    if "path" in source and not are_columns(source):
        unknown = next((str(name) for name in source if name not in SOURCE_KEYS), None)
        hint = f"{did_you_mean(str(unknown), SOURCE_KEYS)}; it has {', '.join(SOURCE_KEYS)}"
        require(unknown is None, f"a source has no key {unknown!r}{hint}")
        return Source(**source)
    if role == "train":
        _reject_wrong_mapping(source, columns)
    require(bool(source), "the sets are {}, but at least one `name: source` is needed")
    for name in source:
        is_word = isinstance(name, str) and bool(name) and "/" not in name
        require(is_word, f"{name!r} cannot name a set: names are words, as in `easy: a.jsonl`")
    return {
        name: resolve_source(inner, columns, f"set {name!r}:") for name, inner in source.items()
    }


def _reject_wrong_mapping(source: Mapping[str, Any], columns: set[str]) -> None:
    """Check that a mapping to train on is not one row, and not all splits of a data set."""
    kind, fields = type_with_article(source), ", ".join(map(str, source))
    if kind.endswith("DatasetDict"):
        first = next(iter(source), "train")
        raise ValueError(f"train is {kind} with splits {fields}; give one: dataset[{first!r}]")
    is_row = columns & source.keys() and all(isinstance(value, str) for value in source.values())
    require(
        not is_row,
        f"train is one row with fields {fields}; give a list of rows: [{{...}}, {{...}}]",
    )


def read_rows(sets: Any) -> Rows:
    """Open a source or named sets, up to the limits of their sources.

    Rows of named sets get the name as column `task`, unless they have such a column.
    """
    parts: list[Part] = []
    positions = [np.zeros(0, np.int64)]
    start = 0
    for name, source in sets.items() if isinstance(sets, dict) else [("", sets)]:
        origin = source if isinstance(source, Source) else None
        opened = _open(source)
        parts += [Part(rows, name, origin) for rows in opened]
        count = sum(map(len, opened))
        positions.append(start + _sample_rows(count, origin))
        start += count
    positions_of_all = np.concatenate(positions)
    return Rows(parts, positions_of_all, indices=np.arange(len(positions_of_all)))


def _open(source: Any) -> list[Sequence[PlacedRow]]:
    """Return the rows of a source, in one part or one for each of its files."""
    parts: list[Sequence[PlacedRow]]
    if isinstance(source, GeneratedSource):
        name, parts = source.name, [rows_from_list(source.rows(), source.name)]
    elif isinstance(source, str | Path | Source):
        source = source if isinstance(source, Source) else Source(str(source))
        name, parts = source.path, _open_path(source)
    else:
        kind = "list" if isinstance(source, list) else type(source).__name__
        name = f"the given {kind}"
        reject_sources(source)
        is_mapped = is_table(source) and hasattr(source, "to_iterable_dataset")
        parts = [
            TableRows(source, name) if is_mapped else rows_from_list(read_object(source), name)
        ]
    require(any(map(len, parts)), f"{name} holds no rows")
    return parts


def reject_sources(rows: Any) -> None:
    """Check that a list holds rows and not sources."""
    for row in rows if isinstance(rows, list) else ():
        is_node = isinstance(row, dict) and bool({"path", "class_path"} & row.keys())
        if (
            (is_node and row.keys() <= {*SOURCE_KEYS, "class_path", "init_args"})
            or isinstance(row, Source | GeneratedSource | Path)
            or is_table(row)
            or names_file(row)
        ):
            raise ValueError(
                f"a list is a list of rows, and {row!r:.60} is a source: give several sources "
                "names, as in `{sums: a.jsonl, letters: b.jsonl}`; a prompt that looks like a file "
                "is `{prompt: ...}`"
            )


def names_file(text: Any) -> bool:
    """True if a text names a source: a function, a file by its ending, or a folder.

    Example:
        >>> names_file("data/a.jsonl"), names_file("What is in a.jsonl?")
        (True, False)
    """
    if not isinstance(text, str) or "\n" in text:
        return False
    is_file = Path(text).suffix.lower() in READERS and (" " not in text or Path(text).is_file())
    return text.startswith(PYTHON) or is_file or ("/" in text and Path(text).is_dir())


def _sample_rows(count: int, source: Source | None) -> np.ndarray:
    """Return the numbers of the rows that a source's limit leaves, and say so.

    The choice is the same in every run, and a higher limit only adds to it.
    """
    if source is None or source.limit is None or source.limit >= count:
        return np.arange(count)
    rank_zero_info(
        f"{source.path}: {source.limit} of {count} rows, chosen at random, the same ones in every "
        "run (limit)"
    )
    order = array("q", range(count))
    random.Random(0).shuffle(order)
    return np.sort(np.array(order[: source.limit]))


def _open_path(source: Source) -> list[Sequence[PlacedRow]]:
    path, suffix = source.path, Path(source.path).suffix.lower()
    if path.startswith(PYTHON):
        return [_call_function(path, source.kwargs)]
    if suffix in READERS:
        return [READERS[suffix](file) for file in find_files(path)]
    return [TableRows(load_hf_dataset(path), path)]


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
    """Return the files that a path or a pattern matches, sorted by name."""
    if Path(path).is_file():
        return [Path(path)]
    require(has_magic(path), f"{path}: no such file (looked in {Path.cwd()})")
    files = sorted(Path(name) for name in glob(path, recursive=True) if Path(name).is_file())
    require(bool(files), f"{path}: no file fits this pattern (looked in {Path.cwd()})")
    return files


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


def task_weights_of(sets: Any, weights: Mapping[str, float] | None) -> list[float] | None:
    """Return the weight of each named set, in their order; None without weights."""
    if weights is None:
        return None
    require(
        isinstance(sets, Mapping),
        "task_weights are for several tasks: name them, as in `train: {math: a.jsonl, chat: "
        "b.jsonl}`",
    )
    for name in weights:
        hint = f"{did_you_mean(name, sets)}; train has {', '.join(sets)}"
        require(name in sets, f"task_weights has {name!r}, which is not a set of train{hint}")
    for name in sets:
        require(name in weights, f"task_weights has no weight for {name!r}; give one to each set")
        above(f"weight of task {name!r}", weights[name], 0)
    return [weights[name] for name in sets]
