# SPDX-License-Identifier: Apache-2.0
"""The demo's vLLM server, forked from a process that has imported vLLM: it starts in seconds."""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
from typing import IO, Any

from demo.server import MODULE, ApiServer
from tests.engines import PROGRAM_VARIABLE, fork_server

_WORDS = "LMCACHE_REDIS_TEST_WORDS"


class ForkedServer(ApiServer):
    """An `ApiServer` that is forked."""

    def _start(self, log: IO[bytes]) -> Any:
        ours = {PROGRAM_VARIABLE: __name__, _WORDS: json.dumps(self.words)}
        unused, theirs = socket.socketpair()
        with unused, theirs:
            return fork_server().fork(theirs.fileno(), log, os.environ | self._env | ours)


def main(fd: int) -> None:
    os.close(fd)
    sys.argv = ["vllm", *json.loads(os.environ[_WORDS])]
    runpy.run_module(MODULE, run_name="__main__")
