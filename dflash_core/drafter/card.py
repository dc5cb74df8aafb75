"""The model card of an exported drafter: what it is, what was measured, and how each runtime is told to use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dflash_core.drafter.config import DFlashConfig
from dflash_core.drafter.serving import fits_speculators
from dflash_core.target.licence import licence_of

if TYPE_CHECKING:
    from dflash_core.target.info import TargetInfo

_CARD = """---
library_name: transformers
{licence_key}base_model: {target}
pipeline_tag: text-generation
tags: [speculative-decoding, dflash]
---
# DFlash drafter for {target}

A block-diffusion drafter ([DFlash](https://arxiv.org/abs/2602.06036)): from the hidden states of layers {taps} of **{target}**
it drafts {drafts} tokens in one pass, which the target then verifies. The output is the target's own; only the number of its passes shrinks.
This folder holds no embedding and no head: the target's are used.

| | |
|---|---|
| target | {origin}{revision} |
| sha256 of the target's weights and configuration | `{digest}` |
| sha256 of its tokenizer | `{tokenizer}` |
| draft layers, block size | {layers}, {block} |
| attention of the layers | {attention} |
| parameters | {parameters:,} |
| mask token | {mask} |

## Measured
{facts}

## Licence
The weights were made from those of {target}, from its hidden states and its answers: {terms}. The prompts that it answered may have terms of
their own; of a finished run they are named above. `dflash.py` is of dflash-pipeline, Apache-2.0.

## Use
vLLM:
```
vllm serve {place} --speculative-config '{{"method": "dflash", "model": "<this folder>", "num_speculative_tokens": {drafts}}}'
```
SGLang:
```
python -m sglang.launch_server --model-path {place} --speculative-algorithm DFLASH --speculative-draft-model-path <this folder>
```
Transformers (runs the `dflash.py` of this folder; read it first):
```python
drafter = AutoModel.from_pretrained("<this folder>", trust_remote_code=True, dtype="auto")
tokens = drafter.spec_generate(target, input_ids, max_new_tokens=256, stop_token_ids=[tokenizer.eos_token_id])
```
{exactness}"""

_WINDOWS = """
## Who computes what was trained
In a sliding layer a position sees the {window} positions that end with its own, and so of its own block nothing after itself. Exactly that is
computed by vLLM 0.33 with the command above, SGLang 0.5.23, the `dflash.py` of this folder, and z-lab's `dflash` 0.1.0. Older versions may leave
windows out, which costs acceptance beyond {window} tokens and in every block, never correctness.
{speculators}
"""
_ALIKE = """
`vllm serve <this folder>` computes it too. speculators 0.9 counts the window from the anchor instead of from each position, so that a position there
sees up to {block} positions more at the far end."""
_MIXED = """
Some layers slide and others do not. vLLM then needs its V2 model runner, which is its default, and refuses to start without.
`vllm serve <this folder>` and speculators do not know the folder as theirs: so read, vLLM would give both kinds of layers the same causality."""


def model_card(config: DFlashConfig, info: TargetInfo, facts: Mapping[str, object]) -> str:
    """Markdown with the front matter that model hubs read.

    Args:
        facts: what was measured and how, label to value, in the order they are to be shown
    """
    licence = licence_of(info)
    rows = "\n".join(["| | |", "|---|---|", *(f"| {_shown(label)} | {_shown(value)} |" for label, value in facts.items())])
    return _CARD.format(
        target=info.served_as,
        licence_key=f"license: {licence}\n" if licence else "",
        terms=f"its licence, {licence}, is theirs" if licence else "its licence, which is not stated in its folder, is theirs",
        place=info.repository or f"<folder of {info.name}>",
        origin=_origin(info),
        revision=f" at {info.revision}" if info.revision else "",
        digest=info.digest,
        tokenizer=info.tokenizer_digest,
        taps=", ".join(map(str, config.tap_layers)),
        drafts=config.block_size - 1,
        layers=config.num_layers,
        block=config.block_size,
        parameters=config.num_parameters(),
        mask=config.mask_token_id,
        attention=_attention(config),
        exactness=_exactness(config),
        facts=rows if facts else "Nothing has been measured yet.",
    )


def _origin(info: TargetInfo) -> str:
    if info.repository in (None, info.name):
        return info.name
    return f"{info.repository}; trained and measured with its conversion '{info.name}', whose weights are rounded further"


def _attention(config: DFlashConfig) -> str:
    if not config.sliding_layers:
        return "full"
    full = ", ".join(map(str, config.full_layers))
    return f"sliding windows of {config.sliding_window} positions" + (f", full in {full} (from 0)" if full else "")


def _exactness(config: DFlashConfig) -> str:
    if not config.sliding_layers:
        return ""
    speculators = _ALIKE.format(block=config.block_size) if fits_speculators(config) else _MIXED
    return _WINDOWS.format(window=config.sliding_window, speculators=speculators.strip())


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")
