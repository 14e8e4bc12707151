"""Log of environment responses, for resuming runs whose tools are not deterministic."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from litgrpo.distributed.messages import warn_once_on_failure
from litgrpo.environments.base import EpisodePool, EpisodeStart, FailedEpisode, Message, StepResult

Response = str | list[dict[str, Any]] | StepResult | FailedEpisode
Key = tuple[int | str, ...]
KINDS = {"step": StepResult, "failed": FailedEpisode}


class ResponseLog:
    """Responses by (iteration, attempt, prompt, completion, turn) and a digest of all turns.

    A search or a web service may answer differently after a resume. The log returns the recorded
    response instead, so that the resumed run equals one that was never interrupted.

    Each iteration has a file, `iteration=000012.jsonl`, with one line per response, written
    immediately. Lines cut by a kill are skipped. Files older than the second newest checkpoint are
    removed, because no run can resume before it.

    Args:
        folder: folder of the files.
        checkpoints: folder of the run's checkpoints.

    Example::

        log = ResponseLog("runs/a/tool_responses", "runs/a/checkpoints")
        log.save(start, ("search(lake)",), StepResult("Lake Como"))
        log.find(start, ("search(lake)",)).observation  # "Lake Como"
    """

    def __init__(self, folder: str | Path, checkpoints: str | Path) -> None:
        self.folder, self.checkpoints = Path(folder), Path(checkpoints)
        self.iteration = -1
        self.responses: dict[Key, Response] = {}
        self.file = -1

    def find(self, start: EpisodeStart, actions: tuple[str, ...]) -> Response | None:
        """Return the recorded response to these turns, or None."""
        self._open(start.key[0])
        return self.responses.get(key_of(start, actions))

    def save(self, start: EpisodeStart, actions: tuple[str, ...], response: Response) -> Response:
        """Append a response to the file.

        Returns:
            The response as `find` returns it, with states and messages converted by JSON. The
            first run must use it as well; otherwise it would differ from a resumed one.
        """
        self._open(start.key[0])
        entry = {"key": key_of(start, actions), **encode(response)}
        line = json.dumps(entry, default=repr)
        with warn_once_on_failure(f"writing to {self.folder}"):
            self._append(line.encode() + b"\n")
        loaded = decode(json.loads(line))
        self.responses[key_of(start, actions)] = loaded
        return loaded

    def _open(self, iteration: int) -> None:
        """Open the file of an iteration and load its responses."""
        if iteration == self.iteration:
            return
        self.close()
        self.iteration = iteration
        path = self.folder / f"iteration={iteration:06d}.jsonl"
        text = path.read_bytes() if path.exists() else b""
        self.responses = dict(entry for line in text.splitlines() for entry in _read(line))
        with warn_once_on_failure(f"writing to {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_old_files()
            self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            if not text.endswith(b"\n") and text:  # a kill cut the last line
                self._append(b"\n")

    def _append(self, line: bytes) -> None:
        """Append a line in one unbuffered write.

        A kill after it loses nothing, and ranks append whole lines.

        Raises:
            OSError: the disk is full, for example.
        """
        if self.file >= 0 and os.write(self.file, line) < len(line):
            os.write(self.file, b"\n")  # raises, or ends the part of a line

    def _remove_old_files(self) -> None:
        """Remove files that no resumed run can need."""
        saved = sorted(map(_number, self.checkpoints.glob("iteration=*.ckpt")))
        needed = saved[-2] if len(saved) > 1 else 0
        for file in self.folder.glob("iteration=*.jsonl"):
            if _number(file) < needed:
                file.unlink(missing_ok=True)  # another rank may have removed it

    def close(self) -> None:
        """Close the file."""
        if self.file >= 0:
            os.close(self.file)
        self.file, self.iteration, self.responses = -1, -1, {}


def key_of(start: EpisodeStart, actions: tuple[str, ...]) -> Key:
    """Return the key of a response: episode, number of turns, digest of row, seed and turns."""
    given = json.dumps([start.row, start.seed, actions], default=repr, sort_keys=True)
    digest = hashlib.blake2b(given.encode(), digest_size=12).hexdigest()
    return (*start.key, len(actions), digest)


def encode(response: Response) -> dict[str, Any]:
    """Convert a response to {kind: JSON values}."""
    kind = next((name for name, of in KINDS.items() if isinstance(response, of)), "opening")
    return {kind: response if isinstance(response, str | list) else asdict(response)}


def decode(entry: dict[str, Any]) -> Response:
    """Rebuild the response of a line."""
    if "failed" in entry:
        return FailedEpisode(**entry["failed"])
    if "step" not in entry:
        return entry["opening"]
    fields = entry["step"]
    calls = {name: (made, failed) for name, (made, failed) in fields["calls"].items()}
    return StepResult(**(fields | {"calls": calls, "state": _hashable(fields["state"])}))


def _read(line: bytes) -> list[tuple[Key, Response]]:
    """Return the entry of a line; nothing if a kill cut it."""
    try:
        entry = json.loads(line)
        return [(tuple(entry["key"]), decode(entry))]
    except (ValueError, KeyError, TypeError):
        return []


def _hashable(value: Any) -> Any:
    """Convert lists to tuples: states must be hashable, and JSON has no tuples."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _number(path: Path) -> int:
    return int(path.stem.partition("=")[2].partition("-")[0])


# Responses of an episode, that of `reset` first.
Transcript = list[str | list[Message] | StepResult | FailedEpisode]


def find_deviations(
    pool: EpisodePool, starts: Sequence[EpisodeStart], actions: Sequence[str]
) -> list[str]:
    """Play an episode alone, again, and next to others; describe responses that differ.

    One process plays all of them. This reveals state that outlives an episode (class attributes,
    module variables) and non-deterministic inputs (clock, network, system random numbers). Global
    random generators are not reported, because pools isolate them.

    Args:
        pool: pool with one process, such as `EpisodeWorkers(environment, num_workers=1)`.
        starts: the first is compared; the others are played next to it.
        actions: turns of every episode.

    Returns:
        One line for each response that differs.
    """
    alone, again = (play_episodes(pool, starts[:1], actions)[0] for _ in range(2))
    together = play_episodes(pool, starts, actions)[0]
    found = _find_differences(alone, again, "played again")
    return found + _find_differences(alone, together, "played next to others")


def play_episodes(
    pool: EpisodePool, starts: Sequence[EpisodeStart], actions: Sequence[str]
) -> list[Transcript]:
    """Play episodes to their end; return the responses of each."""
    transcripts: list[Transcript] = [[opening] for opening in pool.reset(starts)]
    for action in actions:
        running = {n for n, episode in enumerate(transcripts) if not _is_over(episode[-1])}
        for n in sorted(running):
            pool.send(n, action)
        while running:
            received = pool.receive(wait=True)
            for n, response in received.items():
                transcripts[n].append(response)
            running -= received.keys()
    return transcripts


def _is_over(response: object) -> bool:
    if isinstance(response, StepResult):
        return response.done
    return isinstance(response, FailedEpisode)


def _find_differences(first: Transcript, second: Transcript, how: str) -> list[str]:
    """Describe differing responses; a missing one counts as different."""
    missing = FailedEpisode("nothing")
    longer = max(len(first), len(second))
    padded = [[*each, *[missing] * (longer - len(each))] for each in (first, second)]
    return [
        f"{f'turn {turn}' if turn else 'reset'}, {how}: got {two!r:.80}, expected {one!r:.80}"
        for turn, (one, two) in enumerate(zip(*padded, strict=True))
        if one != two
    ]
