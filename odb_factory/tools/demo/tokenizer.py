"""The demo's tokenizer: a byte-level BPE of about a thousand tokens with Qwen's special tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from odb_factory.tools.demo.data import build_samples

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 1024
PAD_TOKEN = "<|endoftext|>"
EOS_TOKEN = "<|im_end|>"
# Qwen's own order: the control tokens first, then those that a decoded answer keeps.
CONTROL_TOKENS = (
    PAD_TOKEN,
    "<|im_start|>",
    EOS_TOKEN,
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VISIBLE_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)

# One token per digit, as in Qwen: numbers then have the same tokens in questions and in answers.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS_SAMPLES = 320

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type in ('image', 'image_url') %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' %}
{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif 'text' in part %}
{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer on the demo's own conversations.

    Returns a fast tokenizer of at most ``VOCAB_SIZE`` tokens, identical on every call. Any Unicode text decodes
    to itself; pad is ``<|endoftext|>``, end of turn is ``<|im_end|>``, and the chat template is ChatML.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    # No normalizer: Qwen's NFC step would change decomposed text irreversibly.
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL_TOKENS) - len(VISIBLE_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_corpus(), trainer)
    return as_pretrained(core)


def as_pretrained(core: Tokenizer) -> PreTrainedTokenizerFast:
    """`core` with Qwen's control tokens, as a tokenizer of transformers; modifies `core`."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in VISIBLE_TOKENS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        extra_special_tokens=[token for token in CONTROL_TOKENS if token not in (PAD_TOKEN, EOS_TOKEN)],
        chat_template=CHAT_TEMPLATE,
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
    )


def _corpus() -> list[str]:
    samples = build_samples(_CORPUS_SAMPLES, seed=0, split="tokenizer")
    turns = [text.replace("<image>", "") for sample in samples for text in sample.turns]
    # ChatML's role names must be whole tokens, whatever the conversations contain.
    return [*turns, *["user\n", "assistant\n", "system\n"] * 50]
