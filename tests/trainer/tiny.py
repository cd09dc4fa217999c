"""What the trainer tests share: samples, a collate function, and arithmetic that stays in float64."""

from __future__ import annotations

import os
import random
import socket
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class KeepDouble(TorchFunctionMode):
    """Models of transformers compute norms, rotations and the loss in float32; here float64 stays float64."""

    _CASTS = frozenset({torch.Tensor.float, torch.Tensor.to, torch.Tensor.sum, torch.nn.functional.softmax})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._CASTS and args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


class MaskedSamples:
    """Random token sequences of uneven length with a masked prompt; sample 3 has no target at all."""

    def __init__(self, size: int, vocabulary: int, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.items = []
        for index in range(size):
            length = rng.choice([3, 5, 9, 14, 30, 55])
            ids = [rng.randrange(vocabulary) for _ in range(length)]
            prompt = length if index == 3 else rng.randrange(1, length)
            self.items.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.items[index]


def pad_collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Right-pad; `input_ids`, `labels`, `attention_mask` of shape (samples, longest)."""
    longest = max(len(s["input_ids"]) for s in samples)

    def rows(key: str, fill: int) -> torch.Tensor:
        return torch.tensor([s[key] + [fill] * (longest - len(s[key])) for s in samples])

    mask = [[1] * len(s["input_ids"]) + [0] * (longest - len(s["input_ids"])) for s in samples]
    return {"input_ids": rows("input_ids", 0), "labels": rows("labels", -100), "attention_mask": torch.tensor(mask)}


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def launch_like_torchrun(rank: int, world_size: int, port: int) -> None:
    """Set the variables by which accelerate finds the other ranks."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        ACCELERATE_USE_CPU="true",
        CUDA_VISIBLE_DEVICES="",
    )


def relative_error(gradients: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Largest difference of any parameter's gradient, relative to the largest gradient of the model."""
    assert gradients.keys() == reference.keys()
    scale = max(float(g.abs().max()) for g in reference.values())
    return max(float((gradients[name] - reference[name]).abs().max()) for name in reference) / scale
