"""Threads for calls to tiers, which may hang: a disk that is gone gives none of them back.

Those of `concurrent.futures` are waited for when the process ends. These are not: a call that
never returns ends with the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

_Result = TypeVar("_Result")
_Params = ParamSpec("_Params")
_Work = tuple["Future[Any]", Callable[[], Any]]


class CallThreads(Executor):
    """`count` threads, started at once. Thread-safe, as every executor."""

    def __init__(self, count: int, name: str) -> None:
        self._waiting: SimpleQueue[_Work | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._ended = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, fn: Callable[_Params, _Result], /, *args: _Params.args, **kwargs: _Params.kwargs
    ) -> Future[_Result]:
        """As every executor. Raises RuntimeError after the shutdown."""
        future: Future[_Result] = Future()
        with self._lock:
            if self._ended:
                raise RuntimeError("a call after the threads were ended")
            self._waiting.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As every executor; without `wait` calls under way are left to themselves."""
        with self._lock:
            is_first, self._ended = not self._ended, True
        if cancel_futures:
            self._cancel_waiting()
        if is_first:
            for _ in self._threads:
                self._waiting.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _cancel_waiting(self) -> None:
        try:
            while (work := self._waiting.get_nowait()) is not None:
                work[0].cancel()
        except Empty:
            return
        self._waiting.put(None)  # of a shutdown before this one

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            future, call = work
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)  # whoever waits for the call has it
            del work, future, call  # they hold views of slots
