"""Attention without padding: the kernels that may be there, and how the model comes to use one.

One attention function serves every method: padded batches go through PyTorch's causal attention, packed rows and the
patches of images through a kernel that takes sequences of any lengths. So methods differ in their batches only.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

TEXT, IMAGES = "padded_or_packed", "flash_images"
"""Under which transformers knows the attention of the two towers; for one with `flash` in its name the vision tower
hands over where each image begins, instead of calling once an image."""

Varlen = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, bool], torch.Tensor]
"""(query (T, heads, d), key (T, kv heads, d), value, bounds (n + 1,) int32, longest, causal) -> (T, heads, d)"""


@dataclass(frozen=True, slots=True)
class Kernel:
    """An attention kernel for sequences that lie behind each other."""

    name: str
    run: Varlen
    fast: bool
    """One launch for all sequences; otherwise packing is not worth measuring."""


@dataclass(slots=True)
class _Row:
    """The sequences of the packed row that is being trained on; None: the batch is padded.

    Not handed over as arguments of the model: some versions of transformers pass those on to the vision tower too.
    """

    bounds: torch.Tensor | None = None
    longest: int = 0


_row = _Row()


@contextlib.contextmanager
def packed_row(bounds: torch.Tensor | None, longest: int) -> Iterator[None]:
    """Within: the model's text attention keeps the sequences between `bounds` apart. Forward and backward."""
    _row.bounds, _row.longest = bounds, longest
    try:
        yield
    finally:
        _row.bounds = None


def find_kernel(device: torch.device) -> tuple[Kernel, list[str]]:
    """The first kernel that works here, tried out on small input, and why others do not; at worst one by one."""
    reasons = []
    for find in (_flash_attn, _torch_varlen) if device.type == "cuda" else ():
        try:
            kernel = find()
            error = disagreement(kernel.run, device)
        except Exception as problem:  # whatever a kernel has against this device or these versions
            reasons.append(f"{find.__name__.strip('_')}: {type(problem).__name__}: {str(problem).splitlines()[0]}")
            continue
        if error < 0.04:  # bf16 keeps 8 bits; a kernel that mixes sequences up is several times further off
            return kernel, reasons
        reasons.append(f"{kernel.name}: differs from PyTorch's attention by {error:.3g}")
    return Kernel("one by one", one_by_one, fast=False), reasons


def _flash_attn() -> Kernel:
    from flash_attn import flash_attn_varlen_func

    def run(query: Any, key: Any, value: Any, bounds: Any, longest: int, causal: bool) -> Any:
        return flash_attn_varlen_func(query, key, value, bounds, bounds, longest, longest, causal=causal)

    return Kernel("flash-attn", run, fast=True)


def _torch_varlen() -> Kernel:
    from torch.nn.attention.varlen import varlen_attn

    takes = inspect.signature(varlen_attn).parameters

    def run(query: Any, key: Any, value: Any, bounds: Any, longest: int, causal: bool) -> Any:
        options: dict[str, Any] = {}
        if "window_size" in takes:
            # a window as wide as the sequence is full attention; asked for plainly, some versions take cuDNN's, which
            # builds a plan for each new shape
            options["window_size"] = (-1, 0) if causal else (longest, longest)
        else:  # before PyTorch 2.11
            options["is_causal"] = causal
        if key.shape[1] != query.shape[1]:
            if "enable_gqa" in takes:
                options["enable_gqa"] = True
            else:
                times = query.shape[1] // key.shape[1]
                key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
        return varlen_attn(query, key, value, bounds, bounds, longest, longest, **options)

    return Kernel("torch varlen_attn", run, fast=True)


def one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int, causal: bool
) -> torch.Tensor:
    """A `Varlen` that calls PyTorch's attention once a sequence: anywhere, and slow with many sequences."""
    cuts = bounds.diff().tolist()
    parts = zip(*((part.transpose(0, 1)[None] for part in x.split(cuts)) for x in (query, key, value)), strict=True)
    results = [scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True) for q, k, v in parts]
    return torch.cat([result[0].transpose(0, 1) for result in results])


def disagreement(run: Varlen, device: torch.device) -> float:
    """Largest relative difference to `one_by_one` in float32, over outputs and gradients, causal and not."""
    generator = torch.Generator(device).manual_seed(0)
    lengths = torch.tensor([0, 7, 200, 1, 64], device=device)
    bounds, longest = lengths.cumsum(0).int(), 200
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    worst = 0.0
    for causal in (True, False):
        made = [
            torch.randn(int(bounds[-1]), heads, 64, device=device, generator=generator).to(dtype)
            for heads in (4, 2, 2, 4)
        ]
        got = _with_gradients(run, made, bounds, longest, causal)
        wanted = _with_gradients(one_by_one, [x.float() for x in made], bounds, longest, causal)
        for mine, right in zip(got, wanted, strict=True):
            difference = float((mine.float() - right).norm() / right.norm())
            worst = max(worst, difference) if difference == difference else float("inf")
    return worst


def _with_gradients(
    run: Varlen, made: list[torch.Tensor], bounds: torch.Tensor, longest: int, causal: bool
) -> list[torch.Tensor]:
    inputs = [x.clone().requires_grad_() for x in made[:3]]
    query, key, value = inputs
    result = run(query, key, value, bounds, longest, causal)
    return [result.detach(), *torch.autograd.grad(result, inputs, made[3])]


def register(kernel: Kernel) -> None:
    """Makes `kernel` known to transformers, as `TEXT` and `IMAGES`."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def attend_text(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """query (B, heads, S, d) -> (B, S, heads, d)"""
        if _row.bounds is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return _flat(query, key, value, _row.bounds, _row.longest, True), None

    def attend_images(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """query (1, heads, patches, d) -> (1, patches, heads, d)"""
        bounds, longest = options["cu_seq_lens_q"], options["max_length_q"]
        if not isinstance(longest, int):  # a tensor on the device, in transformers 5.6
            longest = _longest(bounds)
        return _flat(query, key, value, bounds, longest, False), None

    def _flat(query: Any, key: Any, value: Any, bounds: torch.Tensor, longest: int, causal: bool) -> torch.Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        return kernel.run(query, key, value, bounds, longest, causal)[None]

    AttentionInterface.register(TEXT, attend_text)
    AttentionInterface.register(IMAGES, attend_images)
    AttentionMaskInterface.register(TEXT, sdpa_mask)


def _longest(bounds: torch.Tensor) -> int:
    """Kept with `bounds`, which all layers share: asked for in each, every layer would wait for the device."""
    if not hasattr(bounds, "longest_kept"):
        bounds.longest_kept = int(bounds.diff().max())  # type: ignore[attr-defined]
    return bounds.longest_kept  # type: ignore[attr-defined, no-any-return]
