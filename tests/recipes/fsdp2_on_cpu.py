"""`llamafactory.launcher` on CPUs under FSDP2, which accelerate otherwise starts on accelerators only.

accelerate decides by the kind of device whether FSDP is possible; here a device with FSDP is what it is told. All the
rest is real: its launcher, its configuration file, `fully_shard` on the model, the state dict that is saved.
"""

from __future__ import annotations

from typing import Any

import accelerate.accelerator
import accelerate.state
from accelerate.utils import DistributedType

make_state = accelerate.state.AcceleratorState.__init__
prepare = accelerate.accelerator.fsdp2_prepare_model


def make_state_with_fsdp(self: Any, *args: Any, **kwargs: Any) -> None:
    """The state of an accelerator, on which plain data parallelism on CPUs counts as a kind that can have FSDP."""
    shared = accelerate.state.PartialState._shared_state
    if shared.get("distributed_type") == DistributedType.MULTI_CPU:
        shared["distributed_type"] = DistributedType.MULTI_NPU
    make_state(self, *args, **kwargs)


def prepare_and_tell(*args: Any) -> Any:
    """The sharded model; how many of its parameters are sharded is printed."""
    model = prepare(*args)
    kinds = [type(parameter).__name__ for parameter in model.parameters()]
    print(f"sharded: {kinds.count('DTensor')} of {len(kinds)}", flush=True)
    return model


if __name__ == "__main__":
    accelerate.state.AcceleratorState.__init__ = make_state_with_fsdp  # type: ignore[method-assign]
    accelerate.accelerator.fsdp2_prepare_model = prepare_and_tell

    from llamafactory.train.tuner import run_exp

    run_exp()
