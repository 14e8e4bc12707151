"""Streams, events and CUDA graphs of the simulated device, under the names of torch.cuda.

Everything happens at once, so streams and events have nothing to order.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from tests.cuda_device.library import index_of, native


class Stream:
    """A name: work is done when it is submitted."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", index_of(device))
        self.priority = priority
        self.cuda_stream = self.stream_id = 0

    def wait_stream(self, stream: Stream) -> None:
        """Order later work after the work of a stream."""

    def wait_event(self, event: Event) -> None:
        """Order later work after an event."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event after the work so far."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Wait for the work so far."""
        native.wait("Stream.synchronize")

    def query(self) -> bool:
        """Return True if all work is done."""
        native.finish_copies()
        return True


class Event:
    """A moment, in seconds of the host."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.at_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Record the event after the work of a stream so far."""
        self.at_s = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Order later work of a stream after this event."""

    def synchronize(self) -> None:
        """Wait for the event."""
        native.wait("Event.synchronize")

    def query(self) -> bool:
        """Return True if the event has happened."""
        native.finish_copies()
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two events."""
        return (end.at_s - self.at_s) * 1e3


@contextlib.contextmanager
def use_stream(stream: Stream | None) -> Iterator[None]:
    """Submit the work of the block to a stream."""
    yield


class CUDAGraph:
    """A recording of operators; see graph.h."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._recording: Any = None

    def capture_begin(self, *_: Any, **__: Any) -> None:
        """Record the operators from now on."""
        native.begin_capture()

    def capture_end(self) -> None:
        """Stop recording."""
        self._recording = native.end_capture()

    def replay(self) -> None:
        """Run the recorded operators again, on the same memory."""
        self._recording.replay()

    def reset(self) -> None:
        """Free the recording and its memory."""
        self._recording = None


@contextlib.contextmanager
def capture_graph(graph: CUDAGraph, *_: Any, **__: Any) -> Iterator[None]:
    """Record the operators of the block, as torch.cuda.graph does: it waits first."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()
