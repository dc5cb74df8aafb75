"""Blocks: where they start, what is fed into them, and what they are to predict.

    B rows   T row length   N anchor slots   S block size   k slot of a block

A block at anchor a holds the clean token a in slot 0 and mask tokens in slots 1..S-1. An empty slot has anchor -1. Everything but
``sample_anchors`` runs on the device of its arguments, with shapes that depend on shapes alone and no host synchronisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash_core.drafter.config import DFlashConfig
from dflash_core.drafter.spec import DFLASH, DrafterSpec

IGNORE = -100
"""Label of a slot that is not trained, as torch's cross-entropy spells it."""
Values = TypeVar("Values", Tensor, npt.NDArray[Any])


def valid_anchors(loss_mask_T: Values, document_ids_T: Values) -> Values:
    """[..., T] bool: the positions where a block may start: the token and the next one are supervised and of one document.

    Args:
        loss_mask_T:    [..., T] bool, supervised tokens; a tensor or an array, as the other
        document_ids_T: [..., T] int, document of each token, -1 for padding
    """
    valid = loss_mask_T & (document_ids_T >= 0)
    valid[..., :-1] &= valid[..., 1:] & (document_ids_T[..., :-1] == document_ids_T[..., 1:])
    valid[..., -1:] = False
    return valid


def sample_anchors(loss_mask_T: Tensor, document_ids_T: Tensor, num_anchors: int, generator: torch.Generator) -> Tensor:
    """Draw the anchors of one row, without repetition: each document its share, each valid position of a document equally likely.

    A document's share is in proportion to its valid positions, rounded up or down at random so that it is right on average, and at least one
    where there are no more documents than slots: drawn over the whole row, a short document beside long ones would often get none.

    Args:
        loss_mask_T:    [T] bool on the CPU
        document_ids_T: [T] int on the CPU, -1 for padding; equal in one contiguous run for each document
        num_anchors:    N, slots of the row
        generator:      CPU generator, seeded by the caller from (seed, epoch, row)

    Returns:
        [N] int64: exactly min(k, N) of the k valid positions in ascending order, then -1 for every empty slot.
    """
    documents_T = document_ids_T.numpy()  # by NumPy, as torch would let go of Python's lock and wait for it again with each of so small steps
    valid = np.flatnonzero(valid_anchors(loss_mask_T.numpy(), documents_T))
    anchors_N = np.full(num_anchors, -1, dtype=np.int64)
    if len(valid):
        of_valid = documents_T[valid]
        edges = [0, *(np.flatnonzero(of_valid[1:] != of_valid[:-1]) + 1).tolist(), len(valid)]
        sizes = [end - begin for begin, end in pairwise(edges)]
        shares = _shares(sizes, min(len(valid), num_anchors), generator)
        chosen = np.zeros(len(valid), dtype=np.bool_)
        for begin, size, share in zip(edges, sizes, shares, strict=False):
            chosen[begin : begin + size][torch.randperm(size, generator=generator).numpy()[:share]] = True
        anchors_N[: sum(shares)] = valid[chosen]
    return torch.from_numpy(anchors_N)


def _shares(sizes: Sequence[int], slots: int, generator: torch.Generator) -> list[int]:
    """How many of ``slots`` (at most the sum of the sizes) each document gets; never more than its size.

    Systematic rounding: exact shares laid end to end, and whole numbers counted from a random start. Whoever has less than one gets one first.
    """
    shares = [0] * len(sizes)
    small = list(range(len(sizes))) if slots >= len(sizes) else []
    while small:
        left, total = slots - sum(shares), sum(size for size, share in zip(sizes, shares, strict=True) if not share)
        small = [d for d, size in enumerate(sizes) if not shares[d] and size * left < total]
        for d in small:
            shares[d] = 1
    rest = [0 if share else size for size, share in zip(sizes, shares, strict=True)]
    left, total = slots - sum(shares), sum(rest)
    if total == 0:
        return shares
    start = int(torch.randint(total, (), generator=generator))
    ends = [(end * left + start) // total for end in accumulate(rest)]  # in whole numbers, so that nothing is lost to rounding
    return [share + end - before for share, before, end in zip(shares, [0, *ends], ends, strict=False)]


def teacher_states(states_BTX: Tensor, anchors_BN: Tensor, block_size: int, spec: DrafterSpec = DFLASH) -> Tensor:
    """[B, N, P, X]: of each of the P slots that predict, what the target knows where it predicts the same token: one position before that.

    Args:
        states_BTX: [B, T, X] the target's last hidden states, or its likeliest next tokens, at every token
        anchors_BN: [B, N] int64, -1 for an empty slot; its states, and those beyond the row, are some others'
    """
    B, T, X = states_BTX.shape
    slots_P = torch.arange(spec.first_predicting_slot, block_size, device=anchors_BN.device)
    position_BNP = (anchors_BN[..., None] + slots_P + spec.label_offset - 1).clamp(0, T - 1)
    flat_BM1 = position_BNP.reshape(B, -1, 1)
    return states_BTX.gather(1, flat_BM1.expand(-1, -1, X)).view(*position_BNP.shape, X)


def block_tokens(tokens_BT: Tensor, anchors_BN: Tensor, config: DFlashConfig) -> Tensor:
    """[B, N, S] int64: the token ids fed into each block: the anchor's token, then mask tokens. Empty slots hold mask tokens only.

    Args:
        tokens_BT:  [B, T] int64
        anchors_BN: [B, N] int64, -1 for an empty slot
        config:     gives the block size and the mask token
    """
    anchor_tokens = tokens_BT.gather(1, anchors_BN.clamp(min=0))
    first = torch.where(anchors_BN >= 0, anchor_tokens, config.mask_token_id)
    rest = first.new_full((*first.shape, config.block_size - 1), config.mask_token_id)
    return torch.cat([first[..., None], rest], dim=-1)


def block_positions(positions_BT: Tensor, anchors_BN: Tensor, block_size: int) -> Tensor:
    """[B, N, S] int64: absolute positions of the slots, counted on from the anchor's position in its document. Empty slots count from 0.

    Args:
        positions_BT: [B, T] int64, position of each token within its document
        anchors_BN:   [B, N] int64, -1 for an empty slot
    """
    first = torch.where(anchors_BN >= 0, positions_BT.gather(1, anchors_BN.clamp(min=0)), 0)
    return first[..., None] + torch.arange(block_size, device=first.device)


def block_labels(
    tokens_BT: Tensor, loss_mask_BT: Tensor, document_ids_BT: Tensor, anchors_BN: Tensor, block_size: int, spec: DrafterSpec = DFLASH
) -> Tensor:
    """[B, N, S] int64: what each slot is trained to predict, ``IGNORE`` where there is nothing.

    Slot k of the block at anchor a predicts token a+k (spec ``dflash``). It has a label only if the whole run a..a+k lies in the row and
    in the anchor's document and is supervised: a drafted token counts only if those before it were accepted.

    Args:
        tokens_BT:       [B, T] int64
        loss_mask_BT:    [B, T] bool
        document_ids_BT: [B, T] int, -1 for padding
        anchors_BN:      [B, N] int64, -1 for an empty slot
    """
    B, T = tokens_BT.shape
    N = anchors_BN.shape[1]
    span = torch.arange(block_size + spec.label_offset, device=anchors_BN.device)
    position_BNS = anchors_BN[..., None] + span
    inside = (anchors_BN[..., None] >= 0) & (position_BNS < T)
    flat = position_BNS.clamp(0, T - 1).reshape(B, -1)
    document = document_ids_BT.gather(1, flat).view(B, N, -1)
    supervised = loss_mask_BT.bool().gather(1, flat).view(B, N, -1)
    run = inside & supervised & (document >= 0) & (document == document[..., :1])
    unbroken = run.to(torch.int32).cumprod(dim=-1).bool()
    labels = torch.where(unbroken, tokens_BT.gather(1, flat).view(B, N, -1), IGNORE)[..., spec.label_offset :]
    return torch.where(torch.arange(block_size, device=labels.device) >= spec.first_predicting_slot, labels, IGNORE)
