"""Coroutines awaited from code that is none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def gathered(coroutines: Sequence[Awaitable[Any]]) -> list[Any]:
    """The results of coroutines that wait together.

    They run in a thread of their own, because a notebook has an event loop in this one.
    """

    async def together() -> list[Any]:
        return list(await asyncio.gather(*coroutines))

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, together()).result()
