"""Receivers in this process."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from miles_core.weight_sync.sender import Delivery, PushReceiver, Receiver


def local_receiver(engine: PushReceiver, name: str = "the engine") -> Receiver:
    """An engine's calls in a thread of their own, in order."""
    calls = ThreadPoolExecutor(1, thread_name_prefix="weights")

    def start(method: str, *arguments: Any) -> Delivery:
        return calls.submit(getattr(engine, method), *arguments)

    return Receiver(start, name, engine.num_ranks, engine.may_lack)
