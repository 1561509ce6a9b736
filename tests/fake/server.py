# SPDX-License-Identifier: Apache-2.0
"""A Redis in this process: fakeredis behind a TCP port, where no server binary is needed.

What it does otherwise than Redis 7, in what the data plane, the library and an agent use (found by
sending both the same commands; `tests/resp` has the tests that need the real behaviour):

- Bulk strings without CR and LF, such as a GET of zeros or GETRANGE's empty one, are answered as
  simple strings (``+``), which the data plane refuses. Corrected here.
- Some errors have another code: ``ERR WRONGTYPE``, and NOAUTH for an AUTH without a password set.
- ROLE, INFO, CONFIG, TOUCH, OBJECT, MEMORY and CLUSTER do not exist.
- CLIENT SETNAME takes any name, CLIENT GETNAME is empty rather than nil without one.
- There is no memory limit and no eviction: nothing is full, and no stripe of a chunk goes missing.
- A value is parsed line by line: some 15 MB/s, with a thread for each connection.

Large values, binary keys, EXISTS of many keys, pipelines, UNLINK, GETEX, SCAN and expiry are as
Redis's.
"""

from __future__ import annotations

import threading
from typing import Any

import fakeredis

_SIMPLE_STRINGS = (b"OK", b"PONG")


class FakeRedisServer:
    """Serves from entry to exit, on a free port of 127.0.0.1."""

    def __init__(self) -> None:
        self._server = fakeredis.TcpFakeServer(("127.0.0.1", 0))
        self._server.RequestHandlerClass = _with_bulk_strings(self._server.RequestHandlerClass)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), name="fake-redis", daemon=True
        )
        self.url = f"redis://127.0.0.1:{self._server.server_address[1]}"

    def command(self, *words: Any) -> Any:
        """The reply to one command, without a connection."""
        with fakeredis.FakeRedis(server=self._server.fake_server) as client:
            return client.execute_command(*words)

    def __enter__(self) -> FakeRedisServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Closes its connections and its port. May be called again."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _with_bulk_strings(handler: Any) -> Any:
    class Handler(handler):  # type: ignore[misc]
        def setup(self) -> None:
            super().setup()
            dump, file = self.writer.dump, self.wfile

            def dump_bulk(value: Any) -> None:
                if isinstance(value, bytes) and value not in _SIMPLE_STRINGS:
                    file.write(b"$%d\r\n%s\r\n" % (len(value), value))
                else:
                    dump(value)

            self.writer.dump = dump_bulk

    return Handler
