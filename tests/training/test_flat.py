import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.training.flat import ALIGNMENT, FlatLayout

SHAPES = {"b.weight": (7, 9), "a.norm": (5,), "a.weight": (3, 64), "z.norm": (64,)}


def test_matrices_come_before_vectors_and_every_tensor_is_aligned() -> None:
    layout = FlatLayout(SHAPES)
    assert list(layout.offsets) == ["a.weight", "b.weight", "a.norm", "z.norm"]
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets.values())
    assert layout.num_decayed == layout.offsets["a.norm"]


def test_the_layout_does_not_depend_on_the_order_of_the_names() -> None:
    assert FlatLayout(dict(reversed(SHAPES.items()))).offsets == FlatLayout(SHAPES).offsets


def test_views_write_through_and_do_not_overlap() -> None:
    layout = FlatLayout(SHAPES)
    flat = torch.zeros(layout.size + 3)
    for i, view in enumerate(layout.views(flat).values()):
        view.add_(i + 1)
    assert [view.unique().tolist() for view in layout.views(flat).values()] == [[1.0], [2.0], [3.0], [4.0]]
    assert flat[layout.size :].sum() == 0


def test_a_buffer_of_the_vectors_alone_has_their_views() -> None:
    layout = FlatLayout(SHAPES)
    flat = torch.arange(layout.size)
    whole, vectors = layout.views(flat), layout.views(flat[layout.num_decayed :])
    assert list(vectors) == ["a.norm", "z.norm"]
    assert all(torch.equal(vectors[name], whole[name]) for name in vectors)


@given(name=st.sampled_from(sorted(SHAPES)), bit=st.integers(0, 31))
def test_a_single_flipped_bit_changes_exactly_the_checksum_of_its_tensor(name: str, bit: int) -> None:
    layout = FlatLayout(SHAPES)
    flat = torch.randn(layout.size, generator=torch.Generator().manual_seed(0))
    before = layout.checksums(flat)
    layout.views(flat)[name].view(-1).view(torch.int32)[2] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
    changed = (layout.checksums(flat) != before).nonzero().flatten().tolist()
    assert changed == [list(layout.offsets).index(name)]


@given(parts=st.integers(1, 5))
def test_shards_are_of_one_size_and_hold_every_element_once(parts: int) -> None:
    layout = FlatLayout(SHAPES, parts)
    shards = [layout.shard(part) for part in range(parts)]
    assert len({shard.size for shard in shards}) == 1
    assert sum(shard.num_decayed for shard in shards) == layout.num_decayed
    flat, seen = torch.zeros(layout.size), []
    for shard in shards:
        for name, elements, place in layout.pieces(shard):
            flat[shard.slice][place] += 1
            seen.append((name, elements.start, elements.stop))
    assert all((view == 1).all() for view in layout.views(flat).values())
    assert flat.sum() == sum(stop - start for _, start, stop in seen)
