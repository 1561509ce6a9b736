# SPDX-License-Identifier: Apache-2.0
"""Certificates for the tests of TLS, made with openssl in a directory of the test."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

# Elliptic curves: a key takes no time.
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_REQUEST = ("req", *_KEY, "-sha256")


class Authority:
    """A CA of its own: `ca.pem`. `issue` makes NAME.pem and NAME.key signed by it."""

    def __init__(self, directory: Path, name: str = "CA") -> None:
        openssl = shutil.which("openssl")
        if openssl is None:
            pytest.skip("needs openssl on the PATH to make certificates")
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self._openssl = openssl
        # What a strict verifier (Python 3.13 on) wants to see.
        usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
        made = ("-keyout", "ca.key", "-out", "ca.pem")
        self._run(*_REQUEST, *usage, "-x509", "-days", "2", "-subj", f"/CN={name}", *made)

    @property
    def ca(self) -> Path:
        return self.directory / "ca.pem"

    def issue(self, name: str, host: str) -> tuple[Path, Path]:
        """Certificate and key for a host name."""
        extensions = self.directory / f"{name}.ext"
        extensions.write_text(
            f"subjectAltName=DNS:{host}\nauthorityKeyIdentifier=keyid\nsubjectKeyIdentifier=hash\n"
        )
        made = ("-keyout", f"{name}.key", "-out", f"{name}.csr")
        self._run(*_REQUEST, "-subj", f"/CN={host}", *made)
        sign = ("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key")
        end = ("-days", "2", "-extfile", str(extensions), "-out", f"{name}.pem")
        self._run(*sign, "-CAcreateserial", *end)
        return self.directory / f"{name}.pem", self.directory / f"{name}.key"

    def self_signed(self, name: str, host: str) -> tuple[Path, Path]:
        """A certificate that nobody vouches for."""
        made = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
        subject = ("-subj", f"/CN={host}", "-addext", f"subjectAltName=DNS:{host}")
        self._run(*_REQUEST, "-x509", "-days", "2", *subject, *made)
        return self.directory / f"{name}.pem", self.directory / f"{name}.key"

    def encrypt(self, key: Path, password: str) -> Path:
        """The same key, to be opened with a password."""
        made = key.with_suffix(".locked")
        self._run(
            "pkey", "-aes256", "-in", str(key), "-out", str(made), "-passout", f"pass:{password}"
        )
        return made

    def _run(self, *words: str) -> None:
        subprocess.run([self._openssl, *words], cwd=self.directory, check=True, capture_output=True)
