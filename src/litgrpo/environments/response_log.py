"""Log of environment responses, for resuming runs whose tools are not deterministic."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from litgrpo.environments.base import EpisodePool, EpisodeStart, FailedEpisode, Message, StepResult

Answer = str | list[dict[str, Any]] | StepResult | FailedEpisode
Key = tuple[int | str, ...]
KINDS = {"heard": StepResult, "failed": FailedEpisode}


class ResponseLog:
    """Answers by (iteration, attempt, prompt, completion, turn) and a digest of all that was said.

    Each iteration has a file, `iteration=000012.jsonl`; every answer is a line, written at once. A
    line that a kill has cut is skipped. Before an iteration is begun, the files of those from which
    no checkpoint leads any more are removed: older than the second newest checkpoint.

    Args:
        folder: where the files are.
        checkpoints: folder of the run's checkpoints.
    """

    def __init__(self, folder: str | Path, checkpoints: str | Path) -> None:
        self.folder, self.checkpoints = Path(folder), Path(checkpoints)
        self.iteration = -1
        self.known: dict[Key, Answer] = {}
        self.file = -1

    def find(self, start: EpisodeStart, said: tuple[str, ...]) -> Answer | None:
        """What an episode heard when it said this before, or None."""
        self._open(start.key[0])
        return self.known.get(key(start, said))

    def keep(self, start: EpisodeStart, said: tuple[str, ...], answer: Answer) -> Answer:
        """Write an answer down.

        Returns:
            The answer as it will be heard again: states and messages as JSON can hold them.
        """
        self._open(start.key[0])
        entry = {"key": key(start, said), **encoded(answer)}
        line = json.dumps(entry, default=repr)
        os.write(self.file, line.encode() + b"\n")
        again = decoded(json.loads(line))
        self.known[key(start, said)] = again
        return again

    def _open(self, iteration: int) -> None:
        """Go over to the file of an iteration."""
        if iteration == self.iteration:
            return
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._forget()
        path = self.folder / f"iteration={iteration:06d}.jsonl"
        text = path.read_bytes() if path.exists() else b""
        self.known = dict(entry for line in text.splitlines() for entry in _read(line))
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if not text.endswith(b"\n") and text:  # a kill came in the middle of a line
            os.write(self.file, b"\n")
        self.iteration = iteration

    def _forget(self) -> None:
        """Remove what no run that goes on can ask for."""
        saved = sorted(map(_number, self.checkpoints.glob("iteration=*.ckpt")))
        needed = saved[-2] if len(saved) > 1 else 0
        for file in self.folder.glob("iteration=*.jsonl"):
            if _number(file) < needed:
                file.unlink(missing_ok=True)  # another process of the run may be quicker

    def close(self) -> None:
        """Close the file."""
        if self.file >= 0:
            os.close(self.file)
        self.file, self.iteration, self.known = -1, -1, {}


def key(start: EpisodeStart, said: tuple[str, ...]) -> Key:
    """Names an answer: which episode, how many turns, and a digest of row, seed and turns."""
    given = json.dumps([start.row, start.seed, said], default=repr, sort_keys=True)
    digest = hashlib.blake2b(given.encode(), digest_size=12).hexdigest()
    return (*start.key, len(said), digest)


def encoded(answer: Answer) -> dict[str, Any]:
    """An answer as a kind and plain values."""
    kind = next((name for name, of in KINDS.items() if isinstance(answer, of)), "opening")
    return {kind: answer if isinstance(answer, str | list) else asdict(answer)}


def decoded(entry: dict[str, Any]) -> Answer:
    """The answer of a line."""
    if "failed" in entry:
        return FailedEpisode(**entry["failed"])
    if "heard" not in entry:
        return entry["opening"]
    fields = entry["heard"]
    calls = {name: (made, failed) for name, (made, failed) in fields["calls"].items()}
    return StepResult(**(fields | {"calls": calls, "state": _hashable(fields["state"])}))


def _read(line: bytes) -> list[tuple[Key, Answer]]:
    """The entry of a line; nothing where a kill has cut it."""
    try:
        entry = json.loads(line)
        return [(tuple(entry["key"]), decoded(entry))]
    except (ValueError, KeyError, TypeError):
        return []


def _hashable(value: Any) -> Any:
    """JSON has lists where states have tuples."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _number(path: Path) -> int:
    return int(path.stem.partition("=")[2].partition("-")[0])


Played = list[
    str | list[Message] | StepResult | FailedEpisode
]  # what an episode heard, its opening first


def find_deviations(
    pool: EpisodePool, starts: Sequence[EpisodeStart], said: Sequence[str]
) -> list[str]:
    """Play one episode alone, once more, and beside others; what it heard differently.

    All are played by one pool, which should play them in one process: state that outlives an
    episode (an attribute of a class, a module's list) or is drawn from elsewhere (a clock, a
    network, the system's random numbers) then shows. The global random generators do not: pools
    keep them apart.

    Args:
        pool: of one process, such as `EpisodeWorkers(environment, num_workers=1)`.
        starts: the first is compared; the others are played beside it.
        said: the turns of every episode.

    Returns:
        A line for each answer that differs.
    """
    alone, again = (play_episodes(pool, starts[:1], said)[0] for _ in range(2))
    beside = play_episodes(pool, starts, said)[0]
    found = _differences(alone, again, "played once more")
    return found + _differences(alone, beside, "played beside others")


def play_episodes(
    pool: EpisodePool, starts: Sequence[EpisodeStart], said: Sequence[str]
) -> list[Played]:
    """What each of some episodes heard, from its opening to its end."""
    told: list[Played] = [[opening] for opening in pool.reset(starts)]
    for turn in said:
        going = {n for n, episode in enumerate(told) if not _is_over(episode[-1])}
        for n in sorted(going):
            pool.send(n, turn)
        while going:
            heard = pool.receive(wait=True)
            for n, answer in heard.items():
                told[n].append(answer)
            going -= heard.keys()
    return told


def _is_over(answer: object) -> bool:
    return isinstance(answer, FailedEpisode) or (isinstance(answer, StepResult) and answer.done)


def _differences(first: Played, second: Played, how: str) -> list[str]:
    """Numbers of calls and texts of differing answers; one that is missing differs, too."""
    missing = FailedEpisode("nothing")
    longer = max(len(first), len(second))
    padded = [[*each, *[missing] * (longer - len(each))] for each in (first, second)]
    return [
        f"{f'turn {turn}' if turn else 'reset'}, {how}: {two!r:.80} in place of {one!r:.80}"
        for turn, (one, two) in enumerate(zip(*padded, strict=True))
        if one != two
    ]
