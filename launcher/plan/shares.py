"""The arithmetic of even shares: how many each gets, and where the cuts fall."""

from collections.abc import Hashable, Sequence
from itertools import accumulate


def cut_evenly(blocks: Sequence[Hashable], totals: Sequence[int]) -> list[slice]:
    """Cut a list into consecutive shares that are as even as can be, one for each entry of `totals`.

    `blocks` names the block (cache, core) of each item; a block's items are consecutive. `totals` is what
    each share's owner has already: where that differs, those with least get the odd items. Else the odd
    items go where the cuts split the fewest blocks.
    """
    if len(set(totals)) == 1:
        sizes = order_sizes(len(blocks), len(totals), find_edges(blocks))
    else:
        sizes = level_sizes(len(blocks), totals)
    ends = list(accumulate(sizes))
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def find_edges(blocks: Sequence[Hashable]) -> frozenset[int]:
    """Positions where a block ends, the end of the list included."""
    inner = (at for at in range(1, len(blocks)) if blocks[at] != blocks[at - 1])
    return frozenset((*inner, len(blocks)))


def level_sizes(total: int, totals: Sequence[int]) -> list[int]:
    """Even shares of `total`, the odd ones to those that have least."""
    each, odd = divmod(total, len(totals))
    poor = sorted(range(len(totals)), key=lambda at: (totals[at], at))[:odd]
    return [each + (at in poor) for at in range(len(totals))]


def order_sizes(total: int, count: int, edges: frozenset[int]) -> list[int]:
    """Order the `count` even shares of `total` so that the fewest cuts miss an edge.

    Dynamic programming over (large, small) shares still to come: exact, in at most count²/4 steps.
    """
    each, odd = divmod(total, count)
    if not odd:
        return [each] * count
    cost: dict[tuple[int, int], int] = {(0, 0): 0}
    for large in range(odd + 1):
        for small in range(count - odd + 1):
            here = [cost[large - 1, small]] if large else []
            here += [cost[large, small - 1]] if small else []
            if here:
                # What is still to come begins here, so the cut lies this far from the end.
                cut = total - large * (each + 1) - small * each
                cost[large, small] = min(here) + (cut not in edges and cut != 0)
    return read_order(cost, odd, count - odd, each)


def read_order(cost: dict[tuple[int, int], int], large: int, small: int, each: int) -> list[int]:
    """Read the cheapest order off the table, the larger share first where both are as cheap."""
    sizes = []
    while large or small:
        if large and (not small or cost[large - 1, small] <= cost[large, small - 1]):
            large -= 1
            sizes.append(each + 1)
        else:
            small -= 1
            sizes.append(each)
    return sizes
