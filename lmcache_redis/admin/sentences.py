"""A sentence for each error of redis-py, which says what to change and contains no secret. Pure."""

from __future__ import annotations

import contextlib

from redis import exceptions

from lmcache_redis.errors import (
    RedisAuthError,
    RedisError,
    RedisFull,
    RedisProtocolError,
    RedisReplyError,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp.net.endpoint import (
    NO_PASSWORD,
    NO_SENTINEL,
    Endpoint,
    has_no_password,
    is_no_sentinel,
    translated,
)
from lmcache_redis.resp.options import PasswordFile, StaticPassword

# In this order: a class before those that it is one of.
_SENTENCES: tuple[tuple[type, type[RedisError], str], ...] = (
    (
        exceptions.AskError, RedisReplyError,
        "{at} is one node of a cluster: write redis+cluster:// instead of redis://",
    ),
    (exceptions.ClusterError, RedisUnavailable, "{at} cannot serve its cluster just now: {text}"),
    (
        exceptions.AuthenticationError, RedisAuthError,
        "{at} refuses the user or the password: {text}",
    ),
    (
        exceptions.NoPermissionError, RedisAuthError,
        "{at} does not allow it to this user ({text}): inspect and purge need +@read and "
        "+unlink on the agents' keys, and in a cluster +command and +cluster|slots",
    ),
    (exceptions.OutOfMemoryError, RedisFull, "{at} is full and evicts nothing: {text}"),
    (exceptions.BusyLoadingError, RedisUnavailable, "{at} is still loading its data: try again"),
    (
        exceptions.ConnectionError, RedisUnavailable,
        "the connection to {at} was lost: try again ({text})",
    ),
    (exceptions.ResponseError, RedisReplyError, "{at} says: {text}"),
)  # fmt: skip


def _without_secrets(text: str, endpoint: Endpoint) -> str:
    """A server may repeat what it was asked."""
    credentials = endpoint.credentials
    if isinstance(credentials, StaticPassword | PasswordFile):
        with contextlib.suppress(RedisAuthError):
            return text.replace(credentials.get_credentials()[-1], "***")
    # A provider is not asked for this: its next token may be another one.
    return "(not shown)" if credentials is not None and "AUTH" in text else text


def sentence_of(error: BaseException, endpoint: Endpoint, opening: bool = False) -> RedisError:
    """The error of redis-py as one sentence that says what to change."""
    at = f"Redis at {endpoint.where}"
    text = _without_secrets(" ".join(str(error).split()), endpoint)[:160]
    reason = error.__cause__ or error.__context__
    if isinstance(error, exceptions.RedisClusterException) and reason is not None:
        return sentence_of(reason, endpoint, opening)
    if isinstance(error, RedisError):
        return error
    if isinstance(error, exceptions.TimeoutError):
        if opening:
            return RedisTimeout(str(translated(TimeoutError(), endpoint)))
        return RedisTimeout(f"{at} did not answer within its time: is it overloaded?")
    if isinstance(error, exceptions.AuthenticationError) and endpoint.credentials is None:
        return RedisAuthError(
            f"{at} wants a password: put one into the Redis URL, or LMCACHE_REDIS_PASSWORD"
        )
    if has_no_password(text):
        return RedisAuthError(f"{at} {NO_PASSWORD}")
    if is_no_sentinel(text):
        return RedisUnavailable(f"{at} {NO_SENTINEL}")
    if "max number of clients" in text:
        return RedisUnavailable(f"{at} has no connection left: raise its maxclients")
    if "cluster support disabled" in text:
        return RedisUnavailable(f"{at} is no cluster: write redis:// instead of redis+cluster://")
    if opening and isinstance(reason, OSError):
        return RedisUnavailable(str(translated(reason, endpoint)))
    for kind, ours, sentence in _SENTENCES:
        if isinstance(error, kind):
            return ours(sentence.format(at=at, text=text))
    if opening:
        return RedisProtocolError(str(translated(RedisProtocolError(), endpoint)))
    return RedisProtocolError(f"{at} sent what is no reply of Redis: {text}")
