"""Small tokenizers with chat templates of the usual styles, and stand-ins for a target."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from dflash_core.config import GenerationConfig, PipelineConfig, parse_config
from dflash_core.data import Response, Sample

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "<|start|>", "<|end_header|>", "<|eot|>"]
CORPUS = ["ASSISTANT: Hello there, this is the user's text.\n\n", "system user assistant def solve(numbers): return sum(numbers) hello world \n"] * 20

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}" + CHATML
TAGGED = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}\
{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TAGGED_WITHOUT_END = TAGGED.replace("{{ m['content'] + '<|im_end|>' }}{% endgeneration %}", "{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>' }}")
TAGGED_IN_MACRO = (
    "{% macro say(m) %}{{ '<|im_start|>' + m['role'] + '\n' }}{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}{% endmacro %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ say(m) }}{% else %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRIPPING = CHATML.replace("m['content']", "m['content'] | trim")
SHOUTING = CHATML.replace("m['content']", "(m['content'] | upper)")
LLAMA2 = """{% for m in messages %}{% if m['role'] == 'user' %}{{ '<s>[INST] ' + m['content'] + ' [/INST]' }}\
{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' </s>' }}{% else %}\
{{ raise_exception('System role not supported') }}{% endif %}{% endfor %}"""
LLAMA3 = """{{ '<s>' }}{% for m in messages %}{{ '<|start|>' + m['role'] + '<|end_header|>\n\n' + m['content'] | trim + '<|eot|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start|>assistant<|end_header|>\n\n' }}{% endif %}"""
PLAIN = """{% for m in messages %}{{ m['role'] | upper + ': ' + m['content'] + '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
# Like Qwen3: thinking is dropped from the history; the last answer always has a thinking part, empty if need be.
THINKING = """{% set last = namespace(user=0) %}{% for m in messages %}\
{% if m['role'] == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}\
{% for m in messages %}{% set answer = m['content'].split('</think>')[-1].lstrip('\n') %}{{ '<|im_start|>' + m['role'] + '\n' }}\
{% if m['role'] != 'assistant' %}{{ m['content'] }}{% elif loop.index0 > last.user and '</think>' in m['content'] %}\
{{ '<think>\n' + m['content'].split('</think>')[0].split('<think>')[-1].strip('\n') + '\n</think>\n\n' + answer }}\
{% elif loop.index0 > last.user %}{{ '<think>\n\n</think>\n\n' + answer }}{% else %}{{ answer }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}\
{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""


@functools.cache
def _backend() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def make_tokenizer(template: str | None, eos_token: str = "<|im_end|>") -> Any:
    """A byte-level BPE tokenizer of 420 tokens with the given chat template."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_backend(), eos_token=eos_token, pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


def supervised(tokenizer: Any, sample: Sample) -> list[str]:
    """The text of each run of supervised tokens."""
    runs: list[list[int]] = []
    previous = False
    for token, inside in zip(sample.tokens, sample.loss_mask, strict=True):
        if inside and not previous:
            runs.append([])
        if inside:
            runs[-1].append(token)
        previous = inside
    return [tokenizer.decode(run, skip_special_tokens=False, clean_up_tokenization_spaces=False) for run in runs]


def make_config(source: str, **data: Any) -> PipelineConfig:
    """The smallest configuration that reads ``source``."""
    tree = {"target": {"model": "tiny"}, "drafter": {"mask_token_id": 3}, "data": {"sources": [{"source": source}], **data}, "run": {"seed": 7}}
    return parse_config(tree)


class Echo:
    """A stand-in for a target: the answer depends on the prompt and, when sampling, on its seed. ``asked``: the prompts it has answered, in order."""

    def __init__(self, tokenizer: Any, die_after: int | None = None):
        self.stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "abcdefgh"]
        self.asked: list[list[int]] = []
        self.die_after = die_after

    def __call__(self, prompts: list[list[int]], generation: GenerationConfig, /, *, seeds: Sequence[int]) -> Iterator[tuple[int, Response]]:
        for index in sorted(range(len(prompts)), key=lambda index: sum(prompts[index]) % 7):  # not in their order
            if self.die_after is not None and len(self.asked) >= self.die_after:
                raise KeyboardInterrupt
            self.asked.append(prompts[index])
            yield index, self._answer(prompts[index], seeds[index], generation)

    def _answer(self, prompt: list[int], seed: int, generation: GenerationConfig) -> Response:
        state = sum(prompt) + len(prompt) + (seed if generation.temperature else 0)
        length = 2 + state % 5
        tokens = tuple(self.letters[(state + step * step) % 8] for step in range(length))
        return Response(tokens, "length") if state % 7 == 0 else Response((*tokens, self.stop), "stop")
