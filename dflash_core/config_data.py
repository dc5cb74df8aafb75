"""Settings of prompts, of the responses to them and of the samples made of both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from dflash_core.config_section import COLDEST, Count, Fraction, LoosePath, PositiveInt, Section, Temperature


class PromptSource(Section):
    """One place that prompts come from."""

    source: str = Field(
        min_length=1,
        description="A .jsonl, .jsonl.gz or .parquet file, a .log of vLLM, 'hf://owner/dataset' (pinned by '@revision'), 'builtin:…', or 'target'.",
    )
    split: str = Field("train", description="Split of a Hugging Face dataset; ignored for files.")
    subset: str | None = Field(None, description="Configuration name of a Hugging Face dataset.")
    limit: PositiveInt | None = Field(None, description="Take at most this many rows, from the start.")

    @property
    def path(self) -> Path | None:
        """The file, or None for a dataset of a hub, a built-in source and what the target writes."""
        return None if self.drawn or "://" in self.source or self.source.startswith("builtin:") else Path(self.source)

    @property
    def drawn(self) -> bool:
        """Whether these are requests that the target writes: ``limit`` of them, as ``data.drawn`` says."""
        return self.source == "target"


class DrawnConfig(Section):
    """Requests that the target writes itself, where ``data.sources`` names 'target'."""

    temperature: float = Field(0.8, ge=COLDEST, description="Sampling temperature of requests; the lower, the more alike and the saner.")
    top_p: float = Field(0.95, gt=0.0, le=1.0, description="Nucleus sampling: share of probability that is kept.")
    max_new_tokens: PositiveInt = Field(192, description="Longest request, in tokens; what is longer is left out.")
    openings: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        ("",), min_length=1, description="What requests begin with, one drawn for each; '' leaves the first word to the target."
    )
    followed: Fraction = Field(0.0, description="Share of the conversations that go on with a second request, drawn after the answer.")
    follow_ups: Annotated[tuple[str, ...], Field(strict=False)] = Field(("",), min_length=1, description="What second requests begin with.")
    min_new_share: Fraction = Field(
        0.5, description="Least share of the runs of four tokens in a request that none before it had; near-repetitions have less."
    )


class EndpointConfig(Section):
    """A server with OpenAI's interface that answers for the target."""

    url: str = Field(pattern=r"^https?://[^\s/@?#]+(/[^\s@?#]*)?$", description="Where its interface begins, such as http://host:8000/v1.")
    model: str | None = Field(None, min_length=1, description="Name under which it serves the target. Default: target.model.")
    api_key_env: str | None = Field(
        None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="Name of the environment variable that holds its key; never the key itself."
    )
    concurrency: PositiveInt = Field(32, description="Requests that it works on at a time.")
    return_token_ids: bool = Field(False, description="Ask for the very tokens, which vLLM can tell. Otherwise the text is tokenised again.")


class GenerationConfig(Section):
    """How the target answers the prompts."""

    max_new_tokens: PositiveInt = Field(512, description="Longest response, in tokens.")
    temperature: Temperature = Field(0.0, description="0 is greedy; otherwise the sampling temperature.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Nucleus sampling: share of probability that is kept.")
    top_k: Count = Field(0, description="Keep only the k most likely tokens; 0 keeps all.")
    batch_size: PositiveInt = Field(32, description="Conversations generated together.")
    truncated: Literal["keep", "drop"] = Field("keep", description="Responses that max_new_tokens ended: keep them, or end the conversation before.")
    endpoints: Annotated[tuple[EndpointConfig, ...], Field(strict=False)] = Field(
        (), description="Servers that answer in place of a target loaded here; they share the prompts."
    )
    request_timeout_s: float = Field(600.0, gt=0.0, description="Seconds after which a request to an endpoint is given up and made again.")
    retries: Count = Field(8, description="Times in a row that an endpoint may fail, or a request on any, with growing pauses between.")


class Redaction(Section):
    """Something to blank out."""

    pattern: str = Field(min_length=1, description="Regular expression of Python, such as '[\\w.+-]+@[\\w-]+\\.\\w+'.")
    replacement: str = Field("***", description="What is written in its place; \\1 is the first group of the pattern.")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"is not a regular expression: {error}") from error
        return pattern

    @field_validator("replacement")
    @classmethod
    def _fits(cls, replacement: str, info: ValidationInfo) -> str:
        try:
            if "pattern" in info.data:  # else that is wrong
                re.sub(info.data["pattern"], replacement, "")
        except (re.error, IndexError) as error:
            raise ValueError(f"cannot be put in the place of what the pattern matches: {error}") from error
        return replacement


class FilterConfig(Section):
    """What of the data is used. Judged by what the users say, whatever the language."""

    min_characters: Count = Field(0, description="Fewest characters that its users may say in a conversation.")
    max_characters: PositiveInt | None = Field(None, description="Most characters that its users may say in a conversation.")
    min_word_share: Fraction = Field(0.0, description="Least share of letters and digits of any script in that; prose has 0.9, code 0.7.")
    min_compressed_share: Fraction = Field(0.0, description="Least share of its size that zlib brings it to; repetition has less than 0.1.")
    drop_continued: bool = Field(False, description="Leave out conversations that another one goes on from; logs hold one for every turn.")
    redact: Annotated[tuple[Redaction, ...], Field(strict=False)] = Field(
        (), description="What is blanked out in every message before anything is written."
    )


class DataConfig(Section):
    """Prompts, responses and the samples made of them."""

    sources: Annotated[tuple[PromptSource, ...], Field(strict=False)] = Field(
        min_length=1, description="Where prompts come from; rows are taken in this order."
    )
    drawn: DrawnConfig = Field(default_factory=DrawnConfig, description="Requests that the target writes, where a source is 'target'.")
    filters: FilterConfig = Field(default_factory=FilterConfig, description="What of the data is used, and what is blanked out.")
    system_prompt: str | None = Field(None, description="System message for conversations that have none.")
    template_arguments: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="Extra arguments of the chat template, such as enable_thinking; use the same when serving."
    )
    regenerate: Literal["auto", "always", "never"] = Field(
        "auto",
        description="auto: the target's own, from response_cache where it has them; always: generate afresh; never: keep the data's.",
    )
    response_cache: LoosePath | None = Field(None, description="Responses of this very target (JSONL, .gz), keyed by its digest; for 'auto'.")
    generation: GenerationConfig = Field(default_factory=GenerationConfig, description="How responses are generated.")
    max_length: PositiveInt = Field(3072, description="Longest sample in tokens; the tail of a longer one is cut off.")
    min_response_tokens: PositiveInt = Field(2, description="Samples with fewer supervised tokens are rejected.")
    heldout_fraction: float = Field(0.05, gt=0.0, lt=1.0, description="Share of conversations held out for evaluation, chosen by a stable hash.")
    evaluation_overlap: Literal["drop", "refuse"] = Field(
        "drop", description="What happens to conversations that say a prompt of evaluation.sets: not trained on, and counted; or the stage fails."
    )
    max_rejected_fraction: Fraction = Field(0.05, description="The stage fails when a larger share of rows is rejected.")
