"""What the target does for the data: answers, and requests of its own. It is loaded when it is first needed, which may be never."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dflash_core.config import GenerationConfig, PipelineConfig
from dflash_core.data.drawn import Draw, Drawn, draw_requests, draws
from dflash_core.data.types import Response
from dflash_core.stages import Progress, no_progress
from dflash_core.target.info import TargetInfo
from dflash_core.target.model import TargetModel


def generation_by(info: TargetInfo, load: Callable[[], TargetModel]) -> Draw:
    """Generation by a target that is loaded when it is first needed."""

    def generate(
        prompts: list[list[int]], generation: GenerationConfig, /, *, seeds: list[int], stop: Sequence[int] = ()
    ) -> Iterable[tuple[int, Response]]:
        return load().answers(prompts, generation, seeds=seeds, stop=(*info.eos_token_ids, *stop))

    return generate


def drawn_requests(config: PipelineConfig, info: TargetInfo, tokenizer: Any, generate: Draw, progress: Progress = no_progress) -> Drawn | None:
    """The requests of the source 'target', drawn now or before; they stay in the workspace. None if the configuration has no such source.

    Raises:
        DataError: as ``draw_requests`` does.
    """
    if not draws(config):
        return None
    target = (info.digest, info.tokenizer_digest, info.template_digest)
    return draw_requests(config, tokenizer, generate, config.run.workspace / "drawn", target=target, progress=progress)
