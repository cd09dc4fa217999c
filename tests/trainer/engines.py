"""Data-parallel engines on CPUs, as one training loop sees them: forward, backward, whole gradients, a plain step."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist

LEARNING_RATE = 0.1


class Engine(ABC):
    """A model whose parameters, gradients or optimizer states may be split over the ranks, trained with plain SGD.

    Whole parameters and gradients are gathered, so every rank has to ask for them at the same time.
    """

    dtype = torch.float64
    """Of parameters and gradients."""

    tolerance = 1e-12
    """Of gradients and of changes of parameters, relative to the largest one: rounding and the order of additions."""

    def __init__(self, model: torch.nn.Module, accumulation: int) -> None:
        self.model = model
        self.accumulation = accumulation
        self.forward: Any = model
        """Called with a batch, as the model."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, boundary: bool) -> None:
        """Add the gradients of `loss`; at the `boundary` of an update they become the mean over ranks."""

    @abstractmethod
    def step(self) -> None:
        """Take one step of SGD and forget the gradients; called once for each boundary."""

    @abstractmethod
    def gradients(self) -> dict[str, torch.Tensor]:
        """The whole gradient of an update, between its boundary and its step."""

    @abstractmethod
    def parameters(self) -> dict[str, torch.Tensor]:
        """The whole parameters."""

    @abstractmethod
    def held(self) -> int:
        """Elements of the parameters, or of what else the engine splits, that lie on this rank."""

    def window(self, boundary: bool) -> contextlib.AbstractContextManager[Any]:
        """Where a micro-batch's forward and backward run."""
        return contextlib.nullcontext()


class _TorchEngine(Engine):
    """The engines that leave the optimizer to the caller."""

    def __init__(self, model: torch.nn.Module, accumulation: int) -> None:
        super().__init__(model, accumulation)
        self.split()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)

    @abstractmethod
    def split(self) -> None:
        """Make the engine of the model."""

    def backward(self, loss: torch.Tensor, boundary: bool) -> None:
        loss.backward()

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: _whole(parameter.grad) for name, parameter in self.model.named_parameters()}

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: _whole(parameter.detach()) for name, parameter in self.model.named_parameters()}


class Ddp(_TorchEngine):
    """`DistributedDataParallel`, which waits for every parameter's gradient: each has to take part in each step."""

    def split(self) -> None:
        self.forward = torch.nn.parallel.DistributedDataParallel(self.model)

    def held(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def window(self, boundary: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if boundary else self.forward.no_sync()


class Fsdp2(_TorchEngine):
    """`fully_shard` on every block and on the rest: a rank that skips one leaves the others waiting in its gather."""

    def split(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        inner: Any = self.model.model
        for block in (*inner.visual.blocks, *inner.language_model.layers):
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def held(self) -> int:
        parameters: Any = self.model.parameters()
        return sum(parameter.to_local().numel() for parameter in parameters)

    def window(self, boundary: bool) -> contextlib.AbstractContextManager[Any]:
        model: Any = self.model
        model.set_requires_gradient_sync(boundary)
        return contextlib.nullcontext()


class _Zero(Engine):
    """DeepSpeed, which refuses a model in float64."""

    stage = 0
    dtype = torch.float32
    tolerance = 1e-5

    def __init__(self, model: torch.nn.Module, accumulation: int) -> None:
        super().__init__(model, accumulation)
        os.environ["LOCAL_RANK"] = str(dist.get_rank())  # as a launcher would
        self.forward, *_ = import_deepspeed().initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
            config=zero_config(self.stage, accumulation),
        )

    def backward(self, loss: torch.Tensor, boundary: bool) -> None:
        self.forward.set_gradient_accumulation_boundary(boundary)
        self.forward.backward(loss, scale_wrt_gas=False)  # as transformers' Trainer does: the loss is scaled already

    def step(self) -> None:
        self.forward.step()

    def gradients(self) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_grad

        return {name: safe_get_full_grad(p).clone().view(_shape(p)) for name, p in self.model.named_parameters()}

    def parameters(self) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(p).clone().view(_shape(p)) for name, p in self.model.named_parameters()}

    def held(self) -> int:
        """Of the optimizer's own parameters, which carry its states."""
        return sum(part.numel() for group in self.forward.optimizer.optimizer.param_groups for part in group["params"])


class Zero1(_Zero):
    """Optimizer states split."""

    stage = 1


class Zero2(_Zero):
    """Gradients split too."""

    stage = 2


class Zero3(_Zero):
    """Parameters split too, gathered module by module in the order of the forward pass."""

    stage = 3

    def held(self) -> int:
        parameters: Any = self.model.parameters()
        return sum(parameter.numel() + parameter.ds_tensor.numel() for parameter in parameters)


ENGINES: dict[str, type[Engine]] = {"DDP": Ddp, "FSDP2": Fsdp2, "ZeRO-1": Zero1, "ZeRO-2": Zero2, "ZeRO-3": Zero3}


def _whole(tensor: Any) -> torch.Tensor:
    assert tensor is not None, "a parameter has no gradient: it took no part in the update"
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def _shape(parameter: Any) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


def zero_config(stage: int, accumulation: int) -> dict[str, Any]:
    """DeepSpeed's configuration for float32 and plain SGD."""
    return {
        "train_micro_batch_size_per_gpu": 1,  # a number that DeepSpeed wants and does not use
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,  # by default DeepSpeed clips to norm 1
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            # by default a parameter below 100,000 elements stays whole on every rank, and these are all small
            "stage3_param_persistence_threshold": 0,
        },
    }


def import_deepspeed() -> Any:
    """DeepSpeed on the CPU, without the operator that it would compile for about a minute.

    That operator reduces through shared memory, for inference only. Where it is not compatible DeepSpeed does without
    it, and training reduces over Gloo either way. Call this before LLaMA-Factory imports DeepSpeed, which takes a GPU
    where there is one.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
