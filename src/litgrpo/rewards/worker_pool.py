"""Workers that have loaded several objects, of which some may break the process that loads them."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any

from litgrpo.workers.failures import WorkerError, cause_of
from litgrpo.workers.process import Launcher, Send, Worker, WorkerReply, dump, receive

# Answers a message, given the loaded objects. It may send partial replies; its return value is the
# last reply.
Handler = Callable[[dict[str, Any], Any, Send], Any]


class LoadedObjects:
    """Objects that are loaded where this one is unpickled, and the handler that they answer with.

    Args:
        pickled: {name: pickled object}.
        handler: `module:function` of a `Handler`.
    """

    def __init__(self, pickled: Mapping[str, bytes], handler: str) -> None:
        self.pickled, self.handler = dict(pickled), handler

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load each object; an error is that of one object only."""
        self.handle: Handler = resolve_name(state["handler"])
        self.objects: dict[str, Any] = {}
        self.troubles: dict[str, str] = {}
        for name, text in state["pickled"].items():
            try:
                self.objects[name] = pickle.loads(text)
            except Exception as error:
                self.troubles[name] = f"{type(error).__name__}: {error}"

    def __call__(self, message: Any, send: Send) -> Any:
        """Answer a message; None asks for the errors of loading."""
        return self.troubles if message is None else self.handle(self.objects, message, send)


class FunctionPool:
    """Worker processes that have loaded the objects of several names.

    Args:
        size: maximal number of workers that `take` returns.
        handler: `module:function` that answers messages in workers (`Handler`).

    Example::

        pool = FunctionPool(2, "litgrpo.rewards.calls:handle_message")
        pool.register({"length": (my_function, {})})
        pool.take().send(message, limit_s=10.0)
        replies = pool.receive(wait=True)
    """

    def __init__(self, size: int, handler: str) -> None:
        self.size, self.handler = size, handler
        self._reset()

    def _reset(self) -> None:
        """Set the state of a pool without processes."""
        self.owner = os.getpid()
        self.registered: dict[str, tuple[Any, ...]] = {}
        self.troubles: dict[str, str] = {}
        self.failed: dict[str, WorkerError] = {}
        self.launcher: Launcher | None = None
        self.workers: list[Worker] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings only: a copy starts its own workers."""
        return {"size": self.size, "handler": self.handler}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the settings, without processes."""
        self.size, self.handler = state["size"], state["handler"]
        self._reset()

    def register(self, wanted: Mapping[str, tuple[Any, ...]]) -> dict[str, str]:
        """Load objects into workers; objects that broke a process are in `failed` afterwards.

        Args:
            wanted: {name: objects}; running workers are kept if the objects are identical.

        Returns:
            {name: reason} of objects that cannot be sent to a worker.
        """
        known = self.registered
        if all(name in known and _same(known[name], wanted[name]) for name in wanted):
            return {name: self.troubles[name] for name in wanted if name in self.troubles}
        if sys.platform == "win32":
            return dict.fromkeys(wanted, "Windows has no workers")
        self.close()
        # Rewards of another task are called again later.
        wanted = known | dict(wanted)
        self.registered, self.troubles, self.failed = dict(wanted), {}, {}
        pickled: dict[str, bytes] = {}
        for name, part in wanted.items():
            try:
                pickled[name] = dump(part)
            except Exception as error:  # pickling runs the object's own code
                self.troubles[name] = f"{type(error).__name__}: {error}"
        if self._load(pickled) is not None:  # which one breaks a process?
            good = {}
            for name, text in pickled.items():
                broken = self._load({name: text})
                if broken is None:
                    good[name] = text
                else:
                    self.failed[name] = broken
            self._load(good)
        return self.troubles

    def _load(self, pickled: Mapping[str, bytes]) -> WorkerError | None:
        """Replace the workers by one that has loaded these objects; return why it could not."""
        self.kill_all()
        if not pickled:
            return None
        try:
            self.launcher = Launcher(LoadedObjects(pickled, self.handler))
            first = self.launch()
            assert first is not None
            first.load()
            first.send(None, float("inf"))
            ((_, troubles, _),) = receive([first], wait=True)
        except ValueError as error:  # too large
            self.troubles |= dict.fromkeys(pickled, cause_of(error))
            return None
        except WorkerError as error:
            return error
        if isinstance(troubles, WorkerError):  # it has died meanwhile
            return troubles
        self.troubles |= troubles
        return None

    def take(self) -> Worker | None:
        """Return an idle or new worker; None if all are busy or no object could be loaded."""
        self.workers = [worker for worker in self.workers if worker.busy or worker.is_idle]
        idle = [worker for worker in self.workers if not worker.busy]
        if idle:
            return idle[-1]
        return self.launch() if len(self.workers) < self.size else None

    def launch(self) -> Worker | None:
        """Start a worker; None if no object could be loaded."""
        if self.launcher is None:
            return None
        self.workers.append(self.launcher.start())
        return self.workers[-1]

    def receive(self, *, wait: bool) -> list[WorkerReply]:
        """Return the replies since the last call; see `process.receive`."""
        replies = receive(self.workers, wait=wait)
        self.workers = [worker for worker in self.workers if not worker.is_lost]
        return replies

    def kill(self, worker: Worker) -> None:
        """Kill a worker."""
        self.workers.remove(worker)
        worker.kill()

    def kill_busy(self) -> None:
        """Kill busy workers, whose replies are no longer needed."""
        if self.owner != os.getpid():  # a forked copy: the workers belong to the original process
            self._reset()
        for worker in [worker for worker in self.workers if worker.busy]:
            self.kill(worker)

    def kill_all(self) -> None:
        """Kill all workers and the server that forks them."""
        self.kill_busy()
        for worker in list(self.workers):
            self.kill(worker)
        if self.launcher is not None:
            self.launcher.close()
        self.launcher = None

    def close(self) -> None:
        """Kill all workers; they are started again when needed."""
        self.kill_all()
        self.registered = {}


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
