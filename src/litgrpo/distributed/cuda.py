"""A GPU: recorded steps (CUDA graphs) and peak memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from litgrpo.distributed.device import Backend

Run = Callable[[], None]


class CudaBackend(Backend):
    """Capabilities of a GPU; recorded steps are CUDA graphs, which one launch replays."""

    records_steps = True
    _stream: torch.cuda.Stream | None = None

    def synchronize(self) -> None:
        """See `Backend.synchronize`."""
        torch.cuda.synchronize(self.device)

    def record(self, run: Run) -> Run:
        """See `Backend.record`; nothing is computed yet.

        The context manager `torch.cuda.graph` is not used: it waits for the device and gives all
        cached memory back to the driver. The graph's memory is freed with the returned function.
        """
        if self._stream is None:  # cuBLAS keeps a workspace for each stream
            self._stream = torch.cuda.Stream(self.device)
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Other threads, such as loaders that pin memory, may call CUDA meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # the capture is invalid; the first error says why
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay

    def available_memory(self) -> int | None:
        """See `Backend.available_memory`."""
        free, _ = torch.cuda.mem_get_info(self.device)
        # Torch keeps blocks of freed tensors for itself, which the driver counts as used.
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(free + kept)

    def peak_memory_gib(self) -> float:
        """See `Backend.peak_memory_gib`."""
        return torch.cuda.max_memory_allocated(self.device) / 2**30
