# SPDX-License-Identifier: Apache-2.0
"""Contexts of TLS: whom they trust, and when they are made again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmcache_redis.resp.net.tls import TlsParameters, tls_context
from tests.resp.certificates import Authority

pytestmark = pytest.mark.servers  # openssl


def test_a_context_is_made_once_until_a_file_changes(tmp_path: Path) -> None:
    ours, next_one = Authority(tmp_path / "ours"), Authority(tmp_path / "next", "Next")
    certificate, key = ours.issue("client", "client")
    renewed_pair = ours.issue("renewed", "client")
    parameters: TlsParameters = (
        ("ssl_ca_certs", str(ours.ca)),
        ("ssl_certfile", str(certificate)),
        ("ssl_keyfile", str(key)),
    )
    context = tls_context(parameters)
    assert tls_context(parameters) is context
    os.replace(next_one.ca, ours.ca)
    renewed = tls_context(parameters)
    assert renewed is not context
    (trusted,) = renewed.get_ca_certs()
    assert trusted["subject"] == ((("commonName", "Next"),),)
    for each, new in zip((certificate, key), renewed_pair, strict=True):
        os.replace(new, each)
    assert tls_context(parameters) is not renewed


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    parameters: TlsParameters = (("ssl_ca_certs", str(ours.ca)),)
    tls_context(parameters)
    ours.ca.unlink()
    with pytest.raises(FileNotFoundError):
        tls_context(parameters)


def test_with_a_ca_of_ones_own_the_systems_are_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, public = Authority(tmp_path / "a", "Ours"), Authority(tmp_path / "b", "Public")

    def trusted(*parameters: tuple[str, str | bool]) -> list[object]:
        context = tls_context((*parameters, ("ssl_check_hostname", True)))
        return [each["subject"] for each in context.get_ca_certs()]

    trusted()  # The context of before is kept; its files are others now.
    monkeypatch.setenv("SSL_CERT_FILE", str(public.ca))
    assert trusted() == [((("commonName", "Public"),),)]
    assert trusted(("ssl_ca_certs", str(ours.ca))) == [((("commonName", "Ours"),),)]
