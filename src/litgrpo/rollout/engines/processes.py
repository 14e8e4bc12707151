"""Rollouts by processes of their own on this machine, with one copy of the weights for all."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from litgrpo.arguments import above, at_least
from litgrpo.distributed.messages import log
from litgrpo.distributed.precision import matmul_precision
from litgrpo.models.policy import Policy
from litgrpo.rollout.engines.base import Requests, RolloutEngine
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.engines.rollout_worker import POLICY, Arrays, Failed, Share
from litgrpo.rollout.engines.shared_policy import SharedPolicy
from litgrpo.types import Rollout
from litgrpo.workers.failures import WorkerError
from litgrpo.workers.pool import Worker, WorkerPool

HANDLER = "litgrpo.rollout.engines.rollout_worker:sample"


class RolloutProcessLost(RuntimeError):
    """Processes died while they sampled, again and again; names what of."""


@dataclass(frozen=True)
class ProcessEngine(RolloutEngine):
    """Samples in processes of one thread each, which read one copy of the weights.

    Each takes whole groups. A share of the prompts gets the digits that `each` gives it alone; the
    tokens are those of `each` for all prompts, as no row depends on those beside it. A process that
    dies is named, and another one samples its share. For CPUs under Linux.

    Args:
        processes: how many sample at once; as many as there are cores for them.
        each: how each of them samples.
        timeout_s: seconds that a rollout may take; a process that takes longer counts as dead.
        retries: how many may die during one rollout.
    """

    processes: int = 2
    each: LocalEngine = LocalEngine()  # noqa: RUF009 (frozen)
    timeout_s: float = 3600.0
    retries: int = 2

    def __post_init__(self) -> None:
        """Check the ranges."""
        at_least("engine.processes", self.processes, 1)
        above("engine.timeout_s", self.timeout_s, 0)
        at_least("engine.retries", self.retries, 0)

    @property
    def elsewhere(self) -> bool:
        """Its weights are those of the last `sync_weights`."""
        return True

    @property
    def exact(self) -> bool:
        """As each process."""
        return self.each.exact

    @property
    def row_limit(self) -> int | None:
        """Of all processes together."""
        limit = self.each.row_limit
        return None if limit is None else limit * self.processes

    @cached_property
    def crew(self) -> Crew:
        """The processes."""
        return Crew(self.processes, self.timeout_s, self.retries)

    def sync_weights(self, policy: Policy, version: int) -> None:
        """Write the weights where the processes read them; see `RolloutEngine.sync_weights`.

        Raises:
            ValueError: they cannot be shared so.
        """
        self.crew.publish(policy)

    @torch.no_grad()
    def generate(self, requests: Requests) -> Rollout:
        """Sample completions; see `RolloutEngine.generate`.

        Raises:
            RolloutProcessLost: more processes died than `retries`.
            MemoryError: memory was short in one of them.
        """
        prompts = torch.arange(len(requests.prompts))
        number = min(self.processes, len(prompts))
        shares = [prompts[first::number] for first in range(number)]
        answers = self.crew.answers([self.share(requests, each, number) for each in shares])
        return together(requests, shares, answers)

    def share(self, requests: Requests, prompts: Tensor, number: int) -> Share:
        """What one of so many processes is asked.

        Args:
            requests: of the rollout.
            prompts: [b] numbers of this process's prompts.
            number: processes that share the rollout.
        """
        batch, group = requests.prompts, requests.group_size
        tensors = {
            "prompt_ids": batch.prompt_ids[prompts],
            "prompt_mask": batch.prompt_mask[prompts],
            "uniforms": requests.uniforms[rows_of(prompts, group)],
        }
        limit, stops = requests.max_rows, requests.stops
        low = torch.is_autocast_enabled("cpu")
        return Share(
            engine=self.each,
            arrays={name: each.numpy() for name, each in tensors.items()},
            group_size=group,
            sampling=requests.sampling,
            eos_ids=requests.policy.eos_ids,
            max_rows=None if limit is None else max(group, limit // number),
            stops=() if stops is None else tuple(stops.stops),
            autocast=torch.get_autocast_dtype("cpu") if low else None,
            matmul=matmul_precision(),
        )


def rows_of(prompts: Tensor, group_size: int) -> Tensor:
    """[b * G] numbers of the rows of prompts [b]."""
    return (prompts[:, None] * group_size + torch.arange(group_size)).flatten()


def together(requests: Requests, shares: list[Tensor], answers: list[Arrays]) -> Rollout:
    """The rollout of all shares, without columns that no row uses."""
    prompts, group = requests.prompts, requests.group_size
    empty = {"completion_ids": requests.policy.pad_id, "candidate_ids": -1}
    found: dict[str, Any] = {"candidate_ids": None}
    for name, first in answers[0].items():
        parts = [torch.from_numpy(each[name]) for each in answers]
        widest = [max(sizes) for sizes in zip(*[each.shape[1:] for each in parts], strict=True)]
        shape = (requests.num_rows, *widest)
        whole = torch.full(shape, empty.get(name, 0), dtype=torch.from_numpy(first).dtype)
        for share, part in zip(shares, parts, strict=True):
            rows: Any = (rows_of(share, group), *[slice(size) for size in part.shape[1:]])
            whole[rows] = part
        found[name] = whole
    return Rollout(prompts=prompts, group_size=group, **found)


class Crew:
    """Processes that sample.

    Args:
        size: how many.
        timeout_s: of a rollout.
        retries: that may die during one.
    """

    def __init__(self, size: int, timeout_s: float, retries: int) -> None:
        self.timeout_s, self.retries = timeout_s, retries
        self.pool = WorkerPool(size, HANDLER)
        self.shared: SharedPolicy | None = None
        self.has = WeakKeyDictionary[Worker, SharedPolicy | None]()

    def publish(self, policy: Policy) -> None:
        """Let the processes have the policy's weights, and be there.

        Called by the training's own thread: a process that another thread starts ends with it.

        Raises:
            ValueError: they cannot be shared so.
        """
        if self.shared is not None and self.shared.is_of(policy):
            self.shared.update()
        else:
            self.shared = SharedPolicy(policy)
        self.pool.register({POLICY: ()})  # what a process imports, it has by its handler
        self._forget_dead()
        while len(self.pool.workers) < self.pool.size:
            self._started(self.pool.launch())

    def answers(self, shares: list[Share]) -> list[Arrays]:
        """What was sampled for each share.

        Raises:
            RolloutProcessLost: more processes died than may.
            MemoryError: memory was short in one of them.
        """
        assert self.shared is not None, "sync_weights comes before generate"
        self._forget_dead()
        self.pool.end_busy()  # of a rollout that was broken off
        waiting, asked = list(range(len(shares))), dict[Worker, int]()
        found: dict[int, Arrays] = {}
        lost: list[str] = []
        while waiting or asked:
            while waiting:
                worker = self._started(self.pool.take())
                asked[worker] = waiting.pop()
                self._ask(worker, shares[asked[worker]])
            for worker, answer, _ in self.pool.answers(wait=True):
                number = asked.pop(worker)
                if isinstance(answer, WorkerError):
                    lost.append(answer.cause)
                    self._note_lost(worker, shares[number], lost)
                    waiting.append(number)
                else:
                    found[number] = self._checked(answer)
        return [found[number] for number in range(len(shares))]

    def _forget_dead(self) -> None:
        """Name the processes that died while they waited; others take their places."""
        waiting = {worker for worker in self.pool.workers if not worker.busy}
        self.pool.answers(wait=False)
        for worker in waiting.difference(self.pool.workers):
            said = "Rollout process %d died while it waited; another one takes its place"
            log.log(logging.WARNING, said, worker.pid)

    def _ask(self, worker: Worker, share: Share) -> None:
        """Let a process sample, with the policy if it has another one."""
        if self.has.get(worker) is not self.shared:
            self.has[worker] = self.shared
            share = replace(share, policy=self.shared)
        self.pool.ask(worker, share, self.timeout_s)

    def _started(self, worker: Worker | None) -> Worker:
        if worker is None:
            raise RolloutProcessLost(
                f"No rollout process can be started: {self.pool.failed.get(POLICY)}. Give engine: "
                "{class_path: LocalEngine}."
            )
        return worker

    def _note_lost(self, worker: Worker, share: Share, lost: list[str]) -> None:
        rows = len(share.arrays["uniforms"])
        said = f"Rollout process {worker.pid}, which sampled {rows} completions: {lost[-1]}"
        if len(lost) > self.retries:
            raise RolloutProcessLost(
                f"{said}; {len(lost)} died during this rollout (engine.retries {self.retries}). "
                "Nothing was learned from it; go on with --auto_resume true, or with engine: "
                "{class_path: LocalEngine}."
            )
        log.log(logging.WARNING, "%s; another one samples them", said)

    def _checked(self, answer: Arrays | Failed) -> Arrays:
        """The answer.

        Raises:
            MemoryError: it is that memory was short.
            RuntimeError: it is any other error of the process.
        """
        if not isinstance(answer, Failed):
            return answer
        self.pool.end_busy()
        kind = MemoryError if answer.out_of_memory else RuntimeError
        raise kind(f"in a rollout process: {answer.error}") from answer.error
