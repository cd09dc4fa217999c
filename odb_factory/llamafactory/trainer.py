"""LLaMA-Factory's SFT trainer with Online Dynamic Batching."""

from __future__ import annotations

from typing import Any

from llamafactory.train.callbacks import LogCallback
from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer

from odb_factory.llamafactory.log_callback import OdbLogCallback
from odb_factory.trainer.hf_adapter import become
from odb_factory.trainer.mixin import OdbTrainerMixin


class OdbSeq2SeqTrainer(OdbTrainerMixin, CustomSeq2SeqTrainer):
    """See `OdbTrainerMixin`. Evaluation and prediction use LLaMA-Factory's own collator and loaders."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.odb_run.updates.check_targets = True  # `observe_online` counts them alike
        for callback in self.callback_handler.callbacks:
            if type(callback) is LogCallback:
                become(callback, OdbLogCallback, ledger=lambda: self.odb_progress)
        self.odb_callback.on_total.append(self._tell_log_callback)
        # LLaMA-Factory would process the whole data set once more to count its tokens; they are counted already
        self._odb_tokens_per_second = bool(self.finetuning_args.include_effective_tokens_per_second)
        self.finetuning_args.include_effective_tokens_per_second = False

    def _tell_log_callback(self, total: int) -> None:
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, LogCallback):
                callback.max_steps = total

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        output = super()._finalize_training(*args, **kwargs)
        if self._odb_tokens_per_second:
            seconds = output.metrics["train_runtime"] * self.args.world_size
            tokens = self.odb_summary["tokens"] - self.odb_run.record.before["tokens"]
            output.metrics["effective_tokens_per_sec"] = tokens / seconds
        return output
