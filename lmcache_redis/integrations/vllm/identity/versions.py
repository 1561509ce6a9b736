# SPDX-License-Identifier: Apache-2.0
"""What computes K and V: what engines of several versions of vLLM need to share.

With ``share_across_versions`` the versions of vLLM and transformers leave the identity of an engine
whose model has known parts alone, and whose layers' packing is probed. In their place is a digest
(``computation``) of

- the class of each module, and its numbers: epsilons, scales, multipliers, windows, soft caps;
- tables of rotary embeddings, rounded as activations are, and how they are applied;
- code, without comments and types: all of the files of the model's own classes, and of norms,
  activations and rotary embeddings the definitions.

Settings that choose nothing leave too, because versions have different ones. Kernels are not named:
they round differently, so the last bits differ. That one of them is wrong, or that weights are read
in another way, is for canaries to find: an engine that sets this compares its first 16 hits, which
are mostly what others have stored, and loads none of them.

The version stays where versions may differ by more than rounding: with quantized weights or KV,
experts, latents, states, media, adapters, draft models, models of transformers, plugins of others,
and layers that cannot be probed. One line of vLLM's log says why.

Block hashes are equal in all versions from 0.29 on, and with one PYTHONHASHSEED from 0.27 on, for
the same ``--prefix-caching-hash-algo`` (``sha256``, ``sha256_cbor``). Prompts with a ``cache_salt``
have others before 0.31.
"""

from __future__ import annotations

import ast
import inspect
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from lmcache_redis.errors import Unsupported
from lmcache_redis.integrations.vllm import making, needs
from lmcache_redis.integrations.vllm.identity.engine_identity import (
    UNQUANTIZED,
    draft_model,
    foreign_plugins,
)
from lmcache_redis.integrations.vllm.identity.probe import digest_of
from lmcache_redis.integrations.vllm.identity.weights import load_format_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.lmcache_redis")

_MODELS, _LAYERS = "vllm.model_executor.models.", "vllm.model_executor.layers."
_ROTARY = f"{_LAYERS}rotary_embedding"
_KNOWN = tuple(
    _LAYERS + name
    for name in (
        "activation", "attention.attention", "layernorm", "linear", "logits_processor",
        "rotary_embedding", "vocab_parallel_embedding",
    )
)  # fmt: skip
# Beside models, for all of them: no KV is computed there.
_SERVES_MODELS = tuple(_MODELS + name for name in ("interfaces", "utils"))
_DEFINITIONS = ("forward_native", "forward_static")


def pairs_of_version(vllm_config: VllmConfig, unprobed: Sequence[str]) -> dict[str, str]:
    """The pairs in the place of the version; none if it stays, which is logged.

    unprobed: why layers could not be probed, if some could not.
    """
    try:
        for why in (*unprobed, *_doubts(vllm_config)):
            raise Unsupported(why)
        model = needs.GET_MODEL.of(needs.MODEL_RUNNER.of(_worker(vllm_config)))()
        found = computation(model, vllm_config.model_config.dtype)
        return {"engine": "any", "transformers": "any", "computation": found}
    except Unsupported as error:
        why = str(error)
    except Exception as error:  # a model may be anything
        logger.debug("the model cannot be read", exc_info=True)
        why = f"its model cannot be read ({type(error).__name__})"
    logger.warning("KV is not shared with other versions of vLLM: %s", why)
    return {}


def _worker(vllm_config: VllmConfig) -> Any:
    if (worker := making.worker_of(vllm_config)) is None:
        raise Unsupported(making.NOT_SEEN)
    return worker


def _doubts(vllm_config: VllmConfig) -> Iterator[str]:
    """The settings under which versions may compute otherwise."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if method := needs.QUANTIZATION.of(model):
        yield f"its weights are quantized ({method})"
    if str(cache.cache_dtype) not in UNQUANTIZED:
        yield f"its KV is quantized ({cache.cache_dtype})"
    if load_format_of(vllm_config.load_config) == "dummy":
        yield "--load-format dummy draws the weights"
    media = needs.MULTIMODAL.of(model)
    if media is not None and not needs.LANGUAGE_ONLY.of(media):
        yield "its code prepares images and other media (not with --language-model-only)"
    if needs.LORA_CONFIG.of(vllm_config) is not None:
        yield "its code applies adapters"
    if draft_model(vllm_config) is not None:
        yield "its draft model shares the blocks"
    if found := foreign_plugins():
        yield f"plugins of others are loaded: {' '.join(found)}"


def computation(model: torch.nn.Module, dtype: torch.dtype) -> str:
    """The digest. dtype: of the model's activations. Raises Unsupported for a model not known."""
    modules = [*model.named_modules(remove_duplicate=False)]  # layers share rotary embeddings
    tables: dict[int, str] = {}
    code: dict[str, str] = {}
    found = []
    kinds = dict.fromkeys(type(module) for _, module in modules)
    for kind in kinds:  # in this order: replicas give one reason
        _require_known(kind)
    for each in dict.fromkeys(each for kind in kinds for each in kind.__mro__):
        if each.__module__ not in code:
            code.update(_code(each))
    for name, module in modules:
        table = ""
        if needs.ROTARY_DIM.is_in(module) and type(module).__module__.startswith(_ROTARY):
            if id(module) not in tables:
                tables[id(module)] = _table(module, dtype)
            table = tables[id(module)]
        found.append((name, type(module).__qualname__, [*_numbers(module)], table))
    return digest_of([found, sorted(code.items())])


def _require_known(kind: type) -> None:
    module = kind.__module__
    is_known = module.startswith((_MODELS, "torch.nn.modules.")) or any(
        module == each or module.startswith(f"{each}.") for each in _KNOWN
    )
    if not is_known or module.startswith(f"{_MODELS}transformers") or "<" in kind.__qualname__:
        raise Unsupported(f"{kind.__qualname__} ({module}) may compute otherwise")


def _numbers(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """What decides a module's results beside weights, and is the same at every TP size."""
    for name, value in sorted(vars(module).items()):
        if isinstance(value, float) and not name.startswith("_"):
            yield name, value
    for name, buffer in sorted(module.named_buffers(recurse=False)):
        if buffer.numel() == 1 and not name.startswith("_"):
            yield name, float(buffer)
    if (impl := needs.LAYER_IMPL.of(module)) is not None:
        yield needs.WINDOW.name, needs.WINDOW.of(module)
        yield needs.ATTN_TYPE.name, str(needs.ATTN_TYPE.of(module))
        yield needs.HAS_SINK.name, bool(needs.HAS_SINK.of(module))
        for need in (needs.SCALE, needs.SOFT_CAP):
            yield need.name, float(need.of(impl) or 0.0)
        yield needs.ALIBI.name, needs.ALIBI.of(impl) is not None


def _table(module: torch.nn.Module, dtype: torch.dtype) -> str:
    """How positions turn K. The first step may have rounded the table already."""
    tables = [
        table
        for name, table in sorted(module.named_buffers(recurse=False))
        if needs.ROPE_TABLE.name in name
    ]
    if not tables:
        raise Unsupported(f"{type(module).__qualname__} has no table of its angles")
    form = [each.of(module) for each in (needs.ROTARY_DIM, needs.HEAD_SIZE, needs.IS_NEOX)]
    rounded = (table.to(dtype).contiguous().cpu() for table in tables)
    found = [xxhash.xxh3_128_hexdigest(each.view(torch.uint8).numpy()) for each in rounded]
    return repr((form, found))


def _code(kind: type) -> Iterator[tuple[str, str]]:
    """Code that computes, by its name. Raises OSError if there are no sources."""
    module = kind.__module__
    if module.startswith(_SERVES_MODELS) or not module.startswith((_MODELS, *_KNOWN)):
        return
    source = ast.parse(inspect.getsource(sys.modules[module]))
    if module.startswith(_MODELS):
        yield module, ast.unparse(_Bare().visit(source))
        return
    for each in source.body:
        if isinstance(each, ast.ClassDef) and each.name == kind.__qualname__:
            for function in each.body:
                if isinstance(function, ast.FunctionDef) and function.name in _DEFINITIONS:
                    name = f"{module}.{each.name}.{function.name}"
                    yield name, ast.unparse(_Bare().visit(function))


class _Bare(ast.NodeTransformer):
    """Leaves out what computes nothing: docstrings, types and imports."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Import(self, node: ast.AST) -> None:
        return None

    visit_ImportFrom = visit_Import

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return None
        return self.generic_visit(ast.Assign([node.target], node.value, lineno=node.lineno))
