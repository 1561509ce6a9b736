# SPDX-License-Identifier: Apache-2.0
"""TLS: contexts, made once and again when a file has changed, and what their errors mean."""

from __future__ import annotations

import functools
import os
import re
import ssl
from typing import Any

TLS_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
_OF_CERTIFICATES = re.compile("ALERT_(CERTIFICATE|UNKNOWN_CA|BAD_CERTIFICATE|NO_CERTIFICATE)")

# Parameters of a URL by their redis-py names.
TlsParameters = tuple[tuple[str, str | bool], ...]


def tls_context(parameters: TlsParameters) -> ssl.SSLContext:
    """The context for new connections. Raises OSError if a file cannot be read.

    A context takes 25 ms to make. It is made again when one of its files was replaced, as renewed
    certificates are. Without CAs of its own, the system's are among its files.
    """
    found = [os.stat(value) for name, value in parameters if name in TLS_FILES]
    if not any(name in ("ssl_ca_certs", "ssl_ca_path") for name, _ in parameters):
        system = ssl.get_default_verify_paths()
        found += [os.stat(path) for path in (system.cafile, system.capath) if path is not None]
    seen = tuple((each.st_dev, each.st_ino, each.st_mtime_ns, each.st_size) for each in found)
    return _context(parameters, seen)


@functools.lru_cache(maxsize=8)
def _context(parameters: TlsParameters, _seen: tuple[tuple[int, ...], ...]) -> ssl.SSLContext:
    given: dict[str, Any] = dict(parameters)
    # With CAs of its own it does not trust those of the system.
    context = ssl.create_default_context(
        cafile=given.get("ssl_ca_certs"), capath=given.get("ssl_ca_path")
    )
    mode = ssl.VerifyMode[f"CERT_{given.get('ssl_cert_reqs', 'required').upper()}"]
    context.check_hostname = mode != ssl.CERT_NONE and given.get("ssl_check_hostname", True)
    context.verify_mode = mode
    certificate = given.get("ssl_certfile") or given.get("ssl_keyfile")
    if certificate is not None:
        # Without a password OpenSSL would ask for one on the terminal.
        password = given.get("ssl_password", "")
        context.load_cert_chain(certificate, given.get("ssl_keyfile"), password)
    return context


def name_in_certificate(host: str) -> str:
    """A host as certificates name it: without the dot that ends an absolute name."""
    return host.removesuffix(".")


def tls_advice(error: ssl.SSLError) -> str:
    """What to change, after "cannot be reached over TLS:"."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{error.verify_message} (ssl_ca_certs names the CA, ssl_check_hostname the check)"
    if _OF_CERTIFICATES.search(error.reason or ""):
        return (
            f"it refuses our certificate ({error.reason}): ssl_certfile and ssl_keyfile name one "
            "that its CA has signed"
        )
    if "PEM lib" in str(error) or error.reason in ("BAD_DECRYPT", "BAD_PASSWORD_READ"):
        return "the key of ssl_keyfile cannot be read; if it is locked, ssl_password opens it"
    if error.reason == "WRONG_VERSION_NUMBER":
        return "the server does not speak TLS there: use redis:// or its TLS port"
    return f"{error.reason or error}"
