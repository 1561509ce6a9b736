# SPDX-License-Identifier: Apache-2.0
"""How far apart KV is that only rounding distinguishes, and KV that is not the same.

vLLM runs in this process, and its blocks are read where they are:

    .venv/bin/python -m tests.integrations.distances gpt-oss --dtype bfloat16

A model is a family of the matrix, or the directory of any other.

On an AMD EPYC, prompts of 520 to 1,300 tokens, the models of `tests/matrix` (random weights) and
SmolLM2-135M-Instruct. The largest distance of any page for the same prompts in other batches,
behind a cached prefix, or decoded (rounding), and with each weight moved by ±1e-5 (a step); the
least of the others:

    of              rounding  a step  10 % noise  next block  another prompt  other weights
    nine models     0.022     0.059   0.09        0.97        0.94            1.26
    three (states)  0         0.147   0.19        1.24        1.24            1.24

Noise is added to the weights. Those with states are Qwen3-Next, Falcon-H1 and Nemotron-H. Another
LoRA adapter: 1.04 and more. Another image (BLIP-2): 0.63 and more in its block, fading to 0.20
after 1,300 tokens. GPUs and MLA were not measured.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lmcache_redis.device.distance import page_distances
from tests.matrix.cells import CASES
from tests.matrix.models import VOCABULARY, write_adapter, write_image, write_model

# Their blocks are found by this size of a dimension.
NUM_BLOCKS = 331
_LENGTHS = (1100, 700, 1300, 520, 900)
_LORA = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
_MATRIX = {case.model: dict(case.options) for case in reversed(CASES)}
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}

Page = Any  # an array of float32
Blocks = dict[tuple[int, bytes], list[Page]]  # by group and hash: a page for each tensor


class Measured:
    """A vLLM in this process, and the KV that its prefix cache holds."""

    def __init__(self, model: Path, **options: Any) -> None:
        os.environ.update(_ENVIRONMENT)
        from vllm import LLM

        self._llm = LLM(
            str(model),
            **{
                "skip_tokenizer_init": True,
                "max_model_len": 2048,
                "max_num_batched_tokens": 1024,
                "block_size": 32,
                "enforce_eager": True,
                "enable_prefix_caching": True,
                "num_gpu_blocks_override": NUM_BLOCKS,
                **options,
            },
        )
        core = self._llm.llm_engine.engine_core.engine_core
        self._manager = core.scheduler.kv_cache_manager
        self.network = core.model_executor.driver_worker.worker.model_runner.model
        context = self._llm.llm_engine.vllm_config.compilation_config.static_forward_context
        self._groups = [
            [tensor for layer in group.layer_names for tensor in _flat(context[layer].kv_cache)]
            for group in self._manager.kv_cache_config.kv_cache_groups
        ]

    def compute(
        self,
        prompts: Sequence[Sequence[int]],
        image: Path | None = None,
        lora: Any = None,
        tokens: int = 1,
    ) -> list[list[int]]:
        """Computes prompts together, beside what is cached; returns their answers."""
        from vllm import SamplingParams

        asked: list[dict[str, Any]] = [{"prompt_token_ids": list(each)} for each in prompts]
        if image is not None:
            from PIL import Image

            asked = [each | {"multi_modal_data": {"image": Image.open(image)}} for each in asked]
        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        found = self._llm.generate(asked, sampling, use_tqdm=False, lora_request=lora)  # type: ignore
        return [list(each.outputs[0].token_ids) for each in found]

    def reset(self) -> None:
        assert self._llm.reset_prefix_cache()

    def blocks(self) -> Blocks:
        """Of the prefix cache, in the order in which they were computed."""
        found: Blocks = {}
        for key, block in self._manager.block_pool.cached_block_hash_to_block._cache.items():
            one = next(iter(block.values())) if isinstance(block, dict) else block
            number = int.from_bytes(bytes(key)[-4:], "big")
            found[number, bytes(key)] = [
                tensor.select(list(tensor.shape).index(NUM_BLOCKS), one.block_id).float().numpy()
                for tensor in self._groups[number]
            ]
        return {key: [page.reshape(1, -1).copy() for page in each] for key, each in found.items()}

    def alone(self, prompts: Sequence[Sequence[int]], **of: Any) -> list[Blocks]:
        """The blocks of each prompt, computed by itself."""
        found = []
        for prompt in prompts:
            self.reset()
            self.compute([prompt], **of)
            found.append(self.blocks())
        return found


def _flat(cache: Any) -> list[Any]:
    """The tensors of a layer: recurrent ones have several."""
    if isinstance(cache, (list, tuple)):
        return [tensor for each in cache for tensor in _flat(each)]
    return [cache]


def tell(what: str, pairs: Iterable[tuple[Sequence[Page], Sequence[Page]]]) -> None:
    """Prints the distances of blocks, each that of its farthest pages."""
    found = [max(page_distances(a, b)[0] for a, b in zip(*pair, strict=True)) for pair in pairs]
    print(f"{what:26s} {min(found):.4f} to {max(found):.4f}, {len(found)} blocks", flush=True)


def same(one: Blocks, other: Blocks) -> Iterable[tuple[list[Page], list[Page]]]:
    return ((pages, other[key]) for key, pages in one.items() if key in other)


def in_order(one: Iterable[Blocks], other: Iterable[Blocks], first: int = 0) -> Iterable[Any]:
    """Blocks with other names, or of other prompts, by their positions; ``first``: the other's."""
    for a, b in zip(one, other, strict=False):
        for number in {key[0] for key in a}:
            these, others = ([p for k, p in each.items() if k[0] == number] for each in (a, b))
            yield from zip(these, others[first:], strict=False)


def measure(engine: Measured, prompts: Sequence[Sequence[int]], short: list[list[int]]) -> None:
    """Rounding, and KV of other blocks, prompts and weights."""
    import torch

    right = engine.alone(prompts)
    cached: Blocks = {key: pages for each in right for key, pages in each.items()}

    def told(what: str, *batches: Sequence[Sequence[int]]) -> None:
        engine.reset()
        for batch in batches:
            engine.compute(batch)
        tell(what, same(cached, engine.blocks()))

    told("in a batch", prompts)
    told("in a batch with others", [*short, *prompts[::-1]])
    told("behind a prefix", [each[: len(each) // 2] for each in prompts], prompts)
    engine.reset()
    answers = engine.compute(prompts, tokens=70)
    decoded = engine.blocks()
    engine.reset()
    engine.compute([[*each, *more] for each, more in zip(prompts, answers, strict=True)])
    tell("decoded", same(decoded, engine.blocks()))
    tell("the next block", in_order(right, right, first=1))
    tell("of another prompt", in_order(right, right[1:]))
    weights = [each for each in engine.network.parameters() if each.is_floating_point()]
    saved = [each.detach().clone() for each in weights]
    draw = torch.Generator().manual_seed(3)

    def noise(share: float) -> Callable[[Any], Any]:
        return lambda w: w + share * w.std(correction=0) * torch.randn(w.shape, generator=draw)

    def adam(rate: float) -> Callable[[Any], Any]:
        """Its first step moves each weight by the learning rate."""
        return lambda w: w + rate * torch.sign(torch.randn(w.shape, generator=draw))

    def shuffled(w: Any) -> Any:
        if w.dim() < 2:
            return w
        return w.flatten()[torch.randperm(w.numel(), generator=draw)].reshape(w.shape)

    for what, changed in (
        ("weights after a step, 1e-5", adam(1e-5)),
        ("weights with 10 % of noise", noise(0.1)),
        ("other weights", shuffled),
    ):
        for weight, each in zip(weights, saved, strict=True):
            weight.data.copy_(changed(each.float()))
        other = engine.alone(prompts)
        tell(what, same(cached, {key: pages for each in other for key, pages in each.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    draw = random.Random(7)
    prompts = [[draw.randrange(4, VOCABULARY) for _ in range(length)] for length in _LENGTHS]
    short = [[draw.randrange(4, VOCABULARY) for _ in range(40)] for _ in range(9)]
    options: dict[str, Any] = {"dtype": arguments.dtype}
    with tempfile.TemporaryDirectory() as name:
        model, directory = Path(arguments.model), Path(name)
        if arguments.model in _MATRIX:
            model = write_model(arguments.model, directory / "model")
            # Also where these are wrong in vLLM itself, and so not run in the matrix.
            wanted = {"skip_tokenizer_init", "block_size", "mamba_cache_mode"}
            wanted |= {"max_num_batched_tokens"}
            own = _MATRIX[arguments.model]
            options = {n: v for n, v in own.items() if n in wanted} | options
        if arguments.model == "llama":
            options |= _LORA
        engine = Measured(model, **options)
        if arguments.model == "blip2":
            images = [write_image(directory / f"{number}.png", number) for number in range(2)]
            one, other = (engine.alone(prompts, image=image) for image in images)
            tell("with another image", in_order(one, other))
            begin = ([dict([*each.items()][:2]) for each in some] for some in (one, other))
            tell("where the image is", in_order(*begin))
            return
        if arguments.model == "llama":
            from vllm.lora.request import LoRARequest

            adapter = LoRARequest("adapter", 1, str(write_adapter(directory / "adapter")))
            with_adapter = engine.alone(prompts, lora=adapter)
            tell("with an adapter", in_order(engine.alone(prompts), with_adapter))
        measure(engine, prompts, short)


if __name__ == "__main__":
    main()
