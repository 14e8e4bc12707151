"""Simulate the time of iterations when some devices generate and others train (discrete events).

    python -m tests.benchmarks.asynchrony

Devices that sample decode all of their rows together: a step takes `fixed_s + row_s * rows`. Rows
have log-normal lengths, cut at a limit; a row that ends is replaced where another one may begin.
Learning takes seconds that do not depend on the rows. Three schedules:

- colocated: all devices sample, then all learn;
- one-step off-policy: the next rollout begins when the update on this one begins;
- stream: rows begin as long as no more than (1 + stale) batches are ahead of the updates that are
  done; a batch is learned from as soon as enough rows have ended, whichever these are.

Fed with step times that verl published (docs/advance/one_step_off.md of 2025-07-17 and
fully_async.md of 2026-02-05), of synchronous runs alone; what it predicts is compared with their
asynchronous ones. Writes two tables of docs/dev/scaling.md; nothing is trained.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.benchmarks.plan import write

PAGE = Path(__file__).parents[2] / "docs" / "dev" / "scaling.md"
UPDATES, SKIPPED = 7, 3  # of each simulation; the first ones fill the pipeline
HOST_S = 1.0  # publishing weights


@dataclass(frozen=True)
class Lengths:
    """Tokens of rows: log-normal, at most `limit`."""

    mean: float
    spread: float
    limit: int

    def draw(self, number: int, seed: int) -> list[float]:
        """Draw lengths; the same seed gives the same ones."""
        dice = random.Random(seed)
        middle = math.log(self.mean) - self.spread**2 / 2
        drawn = (dice.lognormvariate(middle, self.spread) for _ in range(number))
        return [min(self.limit, max(1.0, each)) for each in drawn]


@dataclass(frozen=True)
class Case:
    """Work of one update.

    Args:
        rows: of a batch.
        lengths: of its rows.
        fixed_s: seconds of a decoding step without rows.
        row_s: seconds that each row adds.
        wait_s: seconds that an episode waits for its environment.
    """

    rows: int
    lengths: Lengths
    fixed_s: float
    row_s: float
    wait_s: float = 0.0


@dataclass
class Sampler:
    """One device; all of its rows advance by a token in each step."""

    case: Case
    time: float = 0.0
    done: float = 0.0  # tokens that a row has said that was there from the start
    ends: list[float] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        """Seconds of a token."""
        return self.case.fixed_s + self.case.row_s * len(self.ends)

    @property
    def next_end(self) -> float:
        """Time at which the next row ends, if no other begins before."""
        return self.time + (self.ends[0] - self.done) * self.step_s if self.ends else math.inf

    def go_on(self, time: float) -> None:
        """Decode up to this moment."""
        if self.ends:
            self.done += (time - self.time) / self.step_s
        self.time = time

    def begin(self, tokens: float, time: float) -> None:
        """A row begins."""
        self.go_on(time)
        heapq.heappush(self.ends, self.done + tokens)

    def end(self) -> float:
        """The next row ends; the moment."""
        self.go_on(self.next_end)
        self.done = heapq.heappop(self.ends)
        return self.time


class Fleet:
    """Many devices: which row ends next, and who has the fewest."""

    def __init__(self, case: Case, number: int) -> None:
        self.devices = [Sampler(case) for _ in range(number)]
        self.empty = number
        # Entries that no longer hold are passed over when they come up.
        self._ends: list[tuple[float, int]] = []
        self._loads = [(0, place) for place in range(number)]

    def begin(self, tokens: float, time: float) -> None:
        """A row begins on the device with the fewest."""
        load, place = heapq.heappop(self._loads)
        while load != len(self.devices[place].ends):
            load, place = heapq.heappop(self._loads)
        self.empty -= load == 0
        self.devices[place].begin(tokens, time)
        self._update_speed(place)

    def _update_speed(self, place: int) -> None:
        device = self.devices[place]
        heapq.heappush(self._loads, (len(device.ends), place))
        heapq.heappush(self._ends, (device.next_end, place))

    @property
    def next_end(self) -> float:
        """The moment."""
        while self._ends and self._ends[0][0] != self.devices[self._ends[0][1]].next_end:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else math.inf

    def end(self) -> float:
        """The next row ends; the moment."""
        _, place = self._ends[0]
        time = self.devices[place].end()
        self.empty += not self.devices[place].ends
        self._update_speed(place)
        return time


@dataclass(frozen=True)
class Result:
    """Seconds of an update, and shares of time in which devices had nothing to do."""

    step_s: float
    learners_idle: float
    samplers_idle: float


def drain_time(case: Case, number: int, seed: int = 0) -> float:
    """Return the seconds until `number` devices have generated a batch."""
    devices = [Sampler(case) for _ in range(number)]
    for place, tokens in enumerate(case.lengths.draw(case.rows, seed)):
        devices[place % number].begin(tokens, 0.0)
    last = 0.0
    for device in devices:
        while device.ends:
            last = max(last, device.end())
    return last + case.wait_s


def simulate(case: Case, samplers: int, learn_s: float, stale: float, *, ahead: bool) -> Result:
    """Separate devices for sampling and learning.

    Args:
        case: the work.
        samplers: devices that sample.
        learn_s: seconds of an update on the others.
        stale: batches that may be ahead of the updates that are done, beyond one.
        ahead: rows of the next batch may begin when an update begins, not when it ends.
    """
    fleet, rows = Fleet(case, samplers), endless(case)
    begun = ended = taken = finished = 0
    time, busy_until, idle = 0.0, math.inf, 0.0
    waiting: list[float] = []  # when rows that wait for their environment are back
    starts: list[float] = []
    while finished < UPDATES:
        allowed = ((taken if ahead else finished) + 1 + stale) * case.rows
        while begun < allowed:
            fleet.begin(next(rows), time)
            begun += 1
        if busy_until == math.inf and ended >= (taken + 1) * case.rows:
            busy_until = time + learn_s + HOST_S
            taken += 1
            starts.append(time)
            continue
        back = waiting[0] if waiting else math.inf
        coming = min(fleet.next_end, busy_until, back)
        idle += fleet.empty * (coming - time) * (len(starts) > SKIPPED)
        time = coming
        if coming == busy_until:
            busy_until, finished = math.inf, finished + 1
        elif coming == back:
            heapq.heappop(waiting)
            ended += 1
        else:
            heapq.heappush(waiting, fleet.end() + case.wait_s)
    span = starts[-1] - starts[SKIPPED]
    step = span / (len(starts) - 1 - SKIPPED)
    spent = (time - starts[SKIPPED]) * samplers
    return Result(step, 1 - (learn_s + HOST_S) / step, idle / spent)


def endless(case: Case) -> Iterator[float]:
    """Lengths of rows, batch after batch."""
    seed = 0
    while True:
        yield from case.lengths.draw(case.rows, seed)
        seed += 1


def fit_case(case: Case, number: int, published_s: float) -> Case:
    """The case whose synchronous rollout takes as long as published; its mean length is changed."""
    low, high = 10.0, float(case.lengths.limit)
    for _ in range(12):
        mean = (low * high) ** 0.5
        tried = replace(case, lengths=replace(case.lengths, mean=mean))
        low, high = (mean, high) if drain_time(tried, number) < published_s else (low, mean)
    return tried


# --- what was published ---

# A 7B model on H20: 15.2 GB read at 0.6 x 4 TB/s, and the calls of a step; 15.2 GFLOP of a token at
# 0.4 x 148 TFLOPS. 512 prompts x 16 rows.
H20_7B = Case(8192, Lengths(1500, 1.0, 20_480), fixed_s=0.0095, row_s=15.2e9 / (0.4 * 148e12))


@dataclass(frozen=True)
class Published:
    """A synchronous run, and the asynchronous one beside it.

    Args:
        name: of the pair.
        devices: of both.
        gen_s: rollout of the synchronous one.
        step_s: its whole step.
        learn_s: log-probabilities and update on the learners of the other: from the synchronous
            run with as many devices where one is published, else in proportion to devices.
        samplers: of the asynchronous one.
        stale: of the stream; None: one-step off-policy.
        async_s: its published step.
        limit: maximum tokens of a row.
    """

    name: str
    devices: int
    gen_s: float
    step_s: float
    learn_s: float
    samplers: int
    stale: float | None
    async_s: float
    limit: int


STEP_16 = 16 / 12  # what 16 devices did is done by 12
PUBLISHED = [
    Published(
        *("one-step off-policy, FSDP2, 12 + 4", 16, 247, 749, (88 + 286) * STEP_16),
        *(4, None, 520, 20_480),
    ),
    Published(
        *("one-step off-policy, Megatron, 12 + 4", 16, 162, 699, (119 + 344) * STEP_16),
        *(4, None, 566, 8_192),
    ),
    Published("stream, 16 + 16", 32, 357.4, 790.1, 269.8 * 2, 16, 0.5, 294.8, 28_672),
    Published("stream, 32 + 32", 64, 150.7, 365.3, 269.8, 32, 0.5, 189.3, 28_672),
    Published("stream, 64 + 64", 128, 177.9, 356.3, 133.4, 64, 0.5, 150.6, 28_672),
]


def predict_time(pair: Published) -> float:
    """Seconds of an asynchronous step, from the synchronous run."""
    lengths = replace(H20_7B.lengths, limit=pair.limit)
    case = fit_case(replace(H20_7B, lengths=lengths), pair.devices, pair.gen_s)
    ahead = pair.stale is None
    stale = pair.stale or 0.0
    return simulate(case, pair.samplers, pair.learn_s, stale, ahead=ahead).step_s


def tabulate_published() -> list[str]:
    """Predicted gains beside published ones."""
    head = ("verl, 7B on H20", "step: synchronous, asynchronous", "gain", "simulated step")
    lines = [f"| {' | '.join(head)} | gain | off by |", "|---|---|---|---|---|---|"]
    for pair in PUBLISHED:
        gain, found = pair.step_s / pair.async_s, predict_time(pair)
        litgrpo = pair.step_s / found
        steps = f"{pair.step_s:.0f} s, {pair.async_s:.0f} s"
        off = f"{100 * (litgrpo / gain - 1):+.0f} %"
        lines.append(
            f"| {pair.name} | {steps} | {gain:.2f} | {found:.0f} s | {litgrpo:.2f} | {off} |"
        )
    return lines


# --- what grows ---


def sweep() -> Iterator[tuple[str, Case, int, float]]:
    """(name, work, devices of each kind, seconds of learning): one thing grows at a time."""
    base = replace(H20_7B, lengths=Lengths(1500, 1.0, 20_480))
    learn_s = 12.0 * 1024  # device-seconds of an update, as of the 64 GPUs above, roughly
    for number in (8, 32, 128, 512):
        yield f"{number} + {number} devices, one batch", base, number, learn_s / number
    for number in (32, 128):
        grown = replace(base, rows=base.rows * number // 32)
        yield f"{number} + {number}, batch grows along", grown, number, learn_s / 32
    for limit in (4_096, 65_536):
        longer = replace(base, lengths=replace(base.lengths, limit=limit))
        yield f"32 + 32, rows of at most {limit:,}", longer, 32, learn_s / 32
    for spread in (0.5, 1.5):
        wider = replace(base, lengths=replace(base.lengths, spread=spread))
        yield f"32 + 32, spread {spread} (1.0 above)", wider, 32, learn_s / 32
    for wait in (60.0, 600.0):
        waits = replace(base, wait_s=wait)
        yield f"32 + 32, episodes that wait {wait:.0f} s", waits, 32, learn_s / 32


def growth_table() -> list[str]:
    """Steps of the three schedules as something grows, and who waits."""
    idle = "idle one-step off-policy: learners, samplers"
    lines = [
        f"| what grows | colocated | one-step off-policy | stream, 0.5 | {idle} |",
        "|---|---|---|---|---|",
    ]
    for name, case, number, learn_s in sweep():
        together = drain_time(case, 2 * number) + learn_s / 2
        off = simulate(case, number, learn_s, 0.0, ahead=True)
        stream = simulate(case, number, learn_s, 0.5, ahead=False)
        lines.append(
            f"| {name} | {together:.0f} s | {off.step_s:.0f} s | {stream.step_s:.0f} s | "
            f"{100 * max(0.0, off.learners_idle):.0f} %, {100 * off.samplers_idle:.0f} % |"
        )
    return lines


if __name__ == "__main__":
    write(PAGE, "published gains", tabulate_published())
    write(PAGE, "growth", growth_table())
