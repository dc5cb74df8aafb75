"""The frozen target in memory: hidden states of tapped layers, decoding with a cache, generation.

    target = TargetModel.from_pretrained(info, dtype=torch.bfloat16, device="cpu")
    features = target.hidden_states(ids_BT, mask_BT, (1, 14, 27))

Shapes: B rows of a batch, T tokens, K taps, H hidden, V vocabulary. Methods may be called from several threads at once:
nothing of the model is changed by a call.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_core.config import GenerationConfig, devices_of
from dflash_core.data.types import Response
from dflash_core.errors import TargetError
from dflash_core.stages import Progress, no_progress
from dflash_core.target.attention import Documents
from dflash_core.target.device import on_device
from dflash_core.target.fused import join_projections
from dflash_core.target.info import TargetInfo, load_tokenizer
from dflash_core.target.loading import find, load
from dflash_core.target.packed import PackedDecoder, can_pack
from dflash_core.target.spread import Stages
from dflash_core.target.structure import LayerTaps, find_structure, truncated_decoder
from dflash_core.target.vocabulary import TargetVocabulary

_LOGITS_AT_A_TIME = 2048


@dataclass(frozen=True)
class TargetOutput:
    """One pass with a cache.

    logits:   [B, T, V] (or of the last ``logits_to_keep`` tokens), soft-capped and scaled as the target does
    features: [B, T, K*H] outputs of the tapped layers side by side, or None
    """

    logits: torch.Tensor
    features: torch.Tensor | None


class TargetModel:
    """A causal language model, never trained here. Made by ``from_pretrained``."""

    def __init__(self, model: Any, tokenizer: Any, info: TargetInfo, devices: Sequence[str] = (), first_layers: Sequence[int] = (0,)) -> None:
        """Take a loaded Transformers model.

        Args:
            devices: where its layers are, if on several.
            first_layers: the first layer on each of them.

        Raises:
            TargetError: its parts cannot be found, or its embeddings are not those of ``info``.
        """
        self.info = info
        self.tokenizer = tokenizer
        self._model = model.eval().requires_grad_(False)
        self._structure = find_structure(model)
        config: Any = self._structure.decoder.config
        if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
            model.set_attn_implementation("eager")  # SDPA has no soft-cap, and some versions of Transformers leave it out without a word (5.17)
        if self._structure.embedding.weight.is_cuda:
            join_projections(self._structure.layers)
            torch.cuda.empty_cache()  # what the single ones leave is in pieces too small for the joint ones
        self._taps = LayerTaps(self._structure.layers)
        self._truncated: dict[int, torch.nn.Module] = {}
        self._packed: dict[int, PackedDecoder] = {}
        self.packs = can_pack(self._structure)
        self._lock = threading.Lock()
        self.cache_keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # renamed in Transformers 5.2x
        embedding, head = self._structure.embedding.weight, self._structure.head.weight
        self._stages = Stages(self._structure, self._taps, [torch.device(name) for name in devices], first_layers) if len(devices) > 1 else None
        self.vocabulary = TargetVocabulary(embedding, head if self._stages is None else head.to(self._stages.devices[-1]), info)
        self._check_embedding()

    @classmethod
    def from_pretrained(
        cls,
        source: TargetInfo | str | Path,
        *,
        dtype: torch.dtype | str = torch.bfloat16,
        device: str | torch.device = "cpu",
        trust_remote_code: bool = False,
        revision: str | None = None,
    ) -> TargetModel:
        """Load a target.

        Args:
            source: what ``resolve_target`` returned, a folder, or a name as in ``target.model``.
            dtype: precision of weights and computation, also by name ('bfloat16').
            device: where it runs; joined by +, as in 'cuda:0+cuda:1', the devices that its layers are spread over.
            trust_remote_code: run code that comes with the model.
            revision: commit, when ``source`` is the name of a repository.

        Raises:
            TargetError: files are missing or damaged, weights do not fit the configuration, or the kind of model is not supported.
        """
        info = source if isinstance(source, TargetInfo) else find(source, trust_remote_code, revision)
        devices = devices_of(str(device))
        model, first_layers = load(info, getattr(torch, dtype) if isinstance(dtype, str) else dtype, devices, trust_remote_code)
        return cls(model, load_tokenizer(info.path, trust_remote_code), info, devices, first_layers)

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return self.vocabulary.device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where its layers are, in order. As many threads keep all of them busy. Features come out of the last one, inputs go to the first."""
        return (self.device,) if self._stages is None else self._stages.devices

    @property
    def dtype(self) -> torch.dtype:
        """Precision of weights, features and logits."""
        return self.vocabulary.dtype

    @property
    def decoder(self) -> torch.nn.Module:
        """The layers with their embedding and final norm, without the head."""
        return self._structure.decoder

    @contextlib.contextmanager
    def pass_through(self, tap_layers: Sequence[int] = ()) -> Iterator[dict[int, torch.Tensor]]:
        """Within the block this thread may run one pass, also of copies of ``decoder``; fills the yielded mapping: layer id → output [B, T, H].

        All outputs end on the device of the deepest layer that was run.
        """
        if tap_layers:
            self._check_taps(tap_layers)
        with on_device(self.device) if self._stages is None else self._stages.batch(), self._taps.record(tap_layers) as taps:
            yield taps

    @torch.no_grad()
    def hidden_states(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor | None, tap_layers: Sequence[int]) -> torch.Tensor:
        """Features [B, T, K*H]: outputs of the tapped layers (0-based, before the final norm) side by side, in the order given.

        Only the layers up to the deepest tap run, and neither the final norm nor the head. Bit for bit ``output_hidden_states`` of the full
        model for the same batch and mask.

        Args:
            ids_BT: token ids; shorter rows padded on the right.
            mask_BT: 1 for tokens, 0 for padding. None where there is none; right padding may also go unmasked, as no token sees it.
        """
        self._check_taps(tap_layers)
        decoder = self._decoder_of_depth(max(tap_layers) + 1)
        mask_BT = None if mask_BT is None else mask_BT.to(self.device)
        with self.pass_through(tap_layers) as taps:
            decoder(input_ids=ids_BT.to(self.device), attention_mask=mask_BT, use_cache=False)
        return torch.cat([taps[layer] for layer in tap_layers], dim=-1)

    @torch.no_grad()
    def packed_hidden_states(self, documents: Sequence[torch.Tensor], tap_layers: Sequence[int], *, last_hidden: bool = False) -> torch.Tensor:
        """Features [T, K*H] of whole documents side by side, T tokens in all: those of ``hidden_states`` of each alone, but for the last bits.

        Without padding where the target ``packs``. Others, with layers that would carry a state from one document into the next, get
        a padded batch: give documents of like length.

        Args:
            documents: token ids of each, integers [t] on the CPU; none is empty.
            last_hidden: append what the head gets: the last layer's output after the final norm, [T, (K+1)*H] in all. Every layer runs then.
        """
        layers = (*tap_layers, len(self._structure.layers) - 1) if last_hidden else tuple(tap_layers)
        outputs = self._packed_outputs(documents, layers)
        if last_hidden:
            outputs[-1] = getattr(self._structure.decoder, self._structure.norm_name)(outputs[-1])
        return torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def likeliest(self, last_TH: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest next tokens, int32 ids [T, K] in falling order, and their log-probabilities, float32 [T, K].

        Args:
            last_TH: hidden states after the final norm, as ``packed_hidden_states`` appends them.
            count: K.
        """
        found = []
        for part_TH in last_TH.split(_LOGITS_AT_A_TIME):
            logits_TV = self.vocabulary.logits(part_TH).float()
            values_TK, ids_TK = logits_TV.topk(count, dim=-1)
            found.append((ids_TK.int(), values_TK - logits_TV.logsumexp(-1, keepdim=True)))
        ids, logprobs = (torch.cat(parts) for parts in zip(*found, strict=True))
        return ids, logprobs

    def _packed_outputs(self, documents: Sequence[torch.Tensor], tap_layers: Sequence[int]) -> list[torch.Tensor]:
        """The output [T, H] of each of the layers."""
        if not self.packs:
            ids_BT = torch.nn.utils.rnn.pad_sequence([ids.long() for ids in documents], batch_first=True)
            mask_BT = torch.arange(ids_BT.shape[1]) < torch.tensor([len(ids) for ids in documents])[:, None]
            features_BTF = self.hidden_states(ids_BT, mask_BT, tap_layers)
            return list(torch.cat([features_BTF[row, : len(ids)] for row, ids in enumerate(documents)]).chunk(len(tap_layers), dim=-1))
        self._check_taps(tap_layers)
        depth = max(tap_layers) + 1
        with self._lock:
            if depth not in self._packed:
                self._packed[depth] = PackedDecoder(self._structure, depth)
        with self.pass_through(tap_layers) as taps:
            self._packed[depth](Documents.of(documents, self.device))
        return [taps[layer][0] for layer in tap_layers]

    @torch.no_grad()
    def forward(
        self,
        ids_BT: torch.Tensor,
        cache: Any,
        *,
        tap_layers: Sequence[int] | None = None,
        attention_mask: torch.Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> TargetOutput:
        """Run T more tokens and append them to ``cache`` (from ``new_cache``).

        Args:
            tap_layers: layers whose outputs are wanted too.
            attention_mask: [B, cached + T], 1 for tokens, 0 for padding (on the left). None where there is none.
            logits_to_keep: logits of the last so many tokens only; 0: of all.
        """
        arguments: dict[str, Any] = {self.cache_keyword: cache, "logits_to_keep": logits_to_keep}
        if attention_mask is not None:
            positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
            arguments |= {"attention_mask": attention_mask, "position_ids": positions[:, -ids_BT.shape[1] :]}
        with self.pass_through(tap_layers or ()) as taps:
            output = self._model(input_ids=ids_BT, use_cache=True, **arguments)
        features = torch.cat([taps[layer] for layer in tap_layers], dim=-1).to(self.device) if tap_layers else None
        return TargetOutput(output.logits.to(self.device), features)

    def new_cache(self) -> Any:
        """An empty key/value cache that ``crop_cache`` can shorten.

        Raises:
            TargetError: the target has recurrent layers, whose state cannot be taken back.
        """
        from transformers import DynamicCache

        kinds = set(getattr(self._model.config.get_text_config(decoder=True), "layer_types", None) or ())
        recurrent = sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"})
        if recurrent:
            raise TargetError(
                f"{self.info.name} has layers of the kind {', '.join(recurrent)}, whose state cannot be cropped. Only attention can be decoded."
            )
        # Without the config every layer keeps all it has seen: windowed layers then mask, and can be cropped like the others.
        return DynamicCache()

    def crop_cache(self, cache: Any, length: int) -> None:
        """Shorten ``cache`` to its first ``length`` tokens. Raises ``ValueError`` if it holds fewer."""
        held = cache.get_seq_length()
        if not 0 <= length <= held:
            raise ValueError(f"cannot crop a cache of {held} tokens to {length}")
        if length < held:
            cache.crop(length - held)  # a negative count of tokens to remove: the one meaning that Transformers 5.17 and 5.24 share

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationConfig,
        *,
        seeds: Sequence[int] | None = None,
        stop: Sequence[int] | None = None,
        progress: Progress | None = None,
    ) -> list[Response]:
        """Answer prompts (token ids), up to ``settings.batch_size`` at a time: as soon as one is answered the next begins.

        Args:
            seeds: one per prompt, needed when ``settings.temperature`` is above 0. A prompt's draws depend on its seed alone.
            stop: tokens that end an answer. Default: the target's own.
            progress: told as answers end.

        Returns:
            One ``Response`` per prompt, in order; the stop token is included if it was generated.
        """
        progress = progress or no_progress
        responses: dict[int, Response] = {}
        for index, response in self.answers(prompts, settings, seeds=seeds, stop=stop):
            responses[index] = response
            progress(len(responses), len(prompts), "responses")
        return [responses[index] for index in range(len(prompts))]

    def answers(
        self, prompts: Sequence[Sequence[int]], settings: GenerationConfig, *, seeds: Sequence[int] | None = None, stop: Sequence[int] | None = None
    ) -> Iterator[tuple[int, Response]]:
        """``generate``, but each answer as soon as it has ended, with the index of its prompt.

        An answer does not depend on which prompts come with it, but for the last bits of low precision on a CPU, where they can tip a tie.
        """
        from dflash_core.target.generate import generate  # which is built on this module

        if settings.temperature > 0.0 and seeds is None:
            raise ValueError("sampling needs one seed per prompt")
        seeds = seeds if seeds is not None else [0] * len(prompts)
        if len(seeds) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(seeds)} seeds")
        return generate(self, prompts, settings, seeds, frozenset(self.info.eos_token_ids if stop is None else stop))

    def _check_taps(self, tap_layers: Sequence[int]) -> None:
        count = len(self._structure.layers)
        if not tap_layers or any(not 0 <= layer < count for layer in tap_layers):
            raise TargetError(
                f"drafter.tap_layers = {list(tap_layers)}: expected 0-based ids of layers, 0 to {count - 1}, as {self.info.name} has {count} layers. "
                "Correct the list."
            )

    def _decoder_of_depth(self, depth: int) -> torch.nn.Module:
        with self._lock:
            if depth not in self._truncated:
                self._truncated[depth] = truncated_decoder(self._structure, depth)
            return self._truncated[depth]

    @torch.no_grad()
    def _check_embedding(self) -> None:
        """Compare what enters layer 0 with ``vocabulary.embed``: a factor nobody knows of would silently ruin every drafter."""
        ids_BT = torch.tensor([[1, 2]], device=self.device)
        entered: list[torch.Tensor] = []
        hook = self._structure.layers[0].register_forward_pre_hook(
            lambda _module, arguments, named: entered.append(arguments[0] if arguments else named["hidden_states"]), with_kwargs=True
        )
        try:
            self._decoder_of_depth(1)(input_ids=ids_BT, use_cache=False)
        finally:
            hook.remove()
        if not torch.allclose(entered[0].float(), self.vocabulary.embed(ids_BT).float(), rtol=1e-2, atol=1e-5):
            raise TargetError(
                f"{self.info.name} ({self.info.model_type}): its first layer gets something else than its embeddings times "
                f"{self.info.embedding_scale}. This kind of model is not supported; please report it."
            )
