"""TLS of the gateway: the settings made into a context, and the way into a stream."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from lmcache_redis.errors import ConfigError
from lmcache_redis.gateway.config import GatewayConfig
from lmcache_redis.gateway.stream import Stream


class FeedingProtocol(asyncio.Protocol):
    """Hands a stream all that was decrypted, instead of letting it receive by itself."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._stream.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._stream.feed(data)

    def eof_received(self) -> bool:
        return self._stream.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stream.connection_lost(exc)

    def pause_writing(self) -> None:
        self._stream.pause_writing()

    def resume_writing(self) -> None:
        self._stream.resume_writing()


def tls_context(config: GatewayConfig) -> ssl.SSLContext | None:
    """What the TLS settings say; reads the files. None is no TLS."""
    if config.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A client that closes after a PUT has not read the tickets; that resets the connection, and
    # what the server had not read yet is lost.
    context.num_tickets = 0
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--tls-cert {config.tls_cert} and --tls-key {config.tls_key} cannot be used "
            f"({error}): name PEM files of a certificate and its key without a pass phrase"
        ) from error
    if config.tls_client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(Path(config.tls_client_ca))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--tls-client-ca {config.tls_client_ca} cannot be used ({error}): "
                "name a PEM file of certificates"
            ) from error
    return context


def _no_password() -> str:
    return ""  # rather than a question on the terminal
