"""The NIC of each rank: nearest by PCI, then by NUMA node, with even load."""

from collections import Counter
from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from launcher.plan.model import Gpu, Machine, Nic, Plan, Request
from launcher.plan.planner import plan

from .lab_machines import convert, describe


def make_gpu(index: int, node: int | None, *path: str) -> Gpu:
    return Gpu(index, f"GPU-{index}", f"{index:04x}:00:00.0", node, path=path)


def make_nics(*places: tuple[int | None, tuple[str, ...]], **more: object) -> tuple[Nic, ...]:
    """mlx5_0 and so on, each by NUMA node and path."""
    return tuple(
        replace(Nic(f"mlx5_{at}", f"1000:{at:02x}:00.0", node, path), **more)  # type: ignore[arg-type]  # fields by name
        for at, (node, path) in enumerate(places)
    )


def build(nodes: int, gpus: tuple[Gpu, ...], nics: tuple[Nic, ...], **more: object) -> Machine:
    cpus = [f"{8 * at}-{8 * at + 7}" for at in range(nodes)]
    machine = convert(describe(cpus, [], **more))
    return replace(machine, gpus=gpus, nics=nics)


def under(switch: int, depth: int = 3) -> tuple[str, ...]:
    """The way to a device under a switch: host bridge, root port, the switch's two ends."""
    return (f"pci0000:{switch:x}0", f"0000:{switch:x}0:01.0", f"0000:{switch:x}1:00.0")[:depth]


def names(made: Plan) -> list[str]:
    """The number of each rank's NIC, `-` for none."""
    return [rank.nic.removeprefix("mlx5_") if rank.nic else "-" for rank in made.ranks]


def why(made: Plan, rank: int = 0) -> str:
    return made.ranks[rank].notes[0].rpartition("; NIC ")[2]


def port(bridge: int, switch: int) -> str:
    """A downstream port of a switch: the devices of a switch differ there."""
    return f"0000:{switch:x}2:{bridge:02x}.0"


# Two GPUs and two NICs below each of four switches, two switches a node; two NICs for storage elsewhere.
DGX_A100 = build(
    2,
    tuple(make_gpu(at, at // 4, *under(at // 2 + 1), port(at % 2, at // 2 + 1)) for at in range(8)),
    make_nics(
        *((at // 4, (*under(at // 2 + 1), port(8 + at % 2, at // 2 + 1))) for at in range(8)),
        (0, under(9)),
        (1, under(10)),
        rate_gbps=200.0,
    ),
)


def test_each_gpu_has_a_nic_on_its_switch() -> None:
    made = plan(DGX_A100, Request())
    assert names(made) == list("01234567")
    assert why(made) == "mlx5_0, on one PCI switch with the GPU"
    assert [dict(rank.env)["LAUNCH_NIC"] for rank in made.ranks] == [f"mlx5_{at}" for at in range(8)]


def test_a_permutation_does_not_move_nics_from_their_gpus() -> None:
    made = plan(DGX_A100, Request(environ=(("CUDA_VISIBLE_DEVICES", "7,1,0,6"),)))
    assert names(made) == list("7106")


def test_half_a_machine_leaves_the_other_half_its_nics() -> None:
    assert names(plan(DGX_A100, Request(environ=(("CUDA_VISIBLE_DEVICES", "1,3,5,7"),)))) == list("1357")
    assert names(plan(DGX_A100, Request(environ=(("CUDA_VISIBLE_DEVICES", "0,2,4,6"),)))) == list("0246")


def test_ranks_of_one_gpu_share_its_nic() -> None:
    assert names(plan(DGX_A100, Request(16))) == list("0123456701234567")
    mig = (replace(DGX_A100.gpus[3], mig=("MIG-a", "MIG-b")), DGX_A100.gpus[5])
    assert names(plan(replace(DGX_A100, gpus=mig), Request(devices="own"))) == ["2", "2", "4"]


def test_eight_gpus_share_four_nics_by_switch() -> None:
    four = replace(DGX_A100, nics=DGX_A100.nics[:8:2])
    assert names(plan(four, Request())) == list("00224466")


def test_gpus_that_share_nics_on_one_switch_have_them_in_blocks() -> None:
    gpus = tuple(make_gpu(at, 0, *under(1), port(at, 1)) for at in range(4))
    nics = make_nics(*((0, (*under(1), port(8 + at, 1))) for at in range(2)))
    machine = build(1, gpus, nics)
    assert names(plan(machine, Request())) == list("0011")
    assert names(plan(machine, Request(8))) == list("00110011")
    assert names(plan(replace(machine, gpus=gpus[:3]), Request())) == list("011")
    shown = Request(environ=(("CUDA_VISIBLE_DEVICES", "3,2,1,0"),))
    assert names(plan(machine, shown)) == list("1100")
    # A job with some of the GPUs uses all NICs, and a GPU alone the NIC that it has in the whole machine.
    assert names(plan(machine, Request(2))) == list("01")
    assert names(plan(machine, Request(environ=(("CUDA_VISIBLE_DEVICES", "2"),)))) == list("1")


def test_gpus_of_unknown_places_have_nics_in_blocks() -> None:
    gpus = tuple(make_gpu(at, None) for at in range(8))
    assert names(plan(build(1, gpus, make_nics(*((None, ()) for _ in range(4)))), Request())) == list(
        "00112233"
    )


def test_four_gpus_share_the_only_nic() -> None:
    one = build(2, tuple(make_gpu(at, at // 2) for at in range(4)), make_nics((0, ())))
    made = plan(one, Request())
    assert names(made) == list("0000")
    assert why(made, 0) == "mlx5_0, on the GPU's NUMA node"
    assert why(made, 3) == "mlx5_0, the nearest to the GPU (distance 21)"


def test_the_longer_way_in_common_is_the_nearer() -> None:
    nics = make_nics((0, ("pci0000:10",)), (0, under(1, 2)), (0, under(1)), (1, under(2)))
    machine = build(2, (make_gpu(0, 0, *under(1), "0000:12:00.0"),), nics)
    assert names(plan(machine, Request())) == ["2"]
    assert names(plan(replace(machine, nics=nics[:2]), Request())) == ["1"]
    bridge = plan(replace(machine, nics=(nics[3], nics[0])), Request())
    assert (names(bridge), why(bridge)) == (["0"], "mlx5_0, on one host bridge with the GPU")


def test_a_virtual_machines_one_host_bridge_leaves_it_to_the_numa_node() -> None:
    bridge = ("pci0000:00",)
    gpus = tuple(make_gpu(at, at // 2, *bridge) for at in range(4))
    nics = make_nics((1, bridge), (1, bridge), (0, bridge), (0, bridge))
    assert names(plan(build(2, gpus, nics), Request())) == list("2301")


def test_gb200_goes_by_the_numa_node() -> None:
    gpus = tuple(make_gpu(at, at // 2, f"pci{at:04x}:00") for at in range(4))
    nics = make_nics(*((at // 2, (f"pci00{at}a:00",)) for at in range(4)))
    made = plan(build(2, gpus, nics), Request())
    assert names(made) == list("0123")
    assert why(made) == "mlx5_0, on the GPU's NUMA node"


def test_distance_decides_where_no_nic_is_on_the_gpus_node() -> None:
    nics = make_nics((0, ()), (2, ()))
    machine = build(4, (make_gpu(0, 3), make_gpu(1, 1)), nics, packages=[0, 0, 1, 1], distance=[12, 32])
    assert names(plan(machine, Request())) == list("10")


def test_azure_has_nics_in_turn_where_nothing_is_known() -> None:
    # Each device alone in a PCI domain; GPUs have a node, NICs none. The last is for management.
    gpus = tuple(make_gpu(at, (1, 1, 0, 0, 3, 3, 2, 2)[at], f"pci{at + 1:04x}:00") for at in range(8))
    ib = make_nics(*((None, (f"pci{at + 257:04x}:00",)) for at in range(8)), rate_gbps=200.0)
    ethernet = Nic("mlx5_8", "0201:00:02.0", None, ("pci0201:00",), "Ethernet", 40)
    machine = build(4, gpus, (*ib, ethernet))
    made = plan(machine, Request())
    assert names(made) == list("01234567")
    assert why(made) == "mlx5_0, its place unknown, so that NICs go round in order"
    assert names(plan(machine, Request(environ=(("CUDA_VISIBLE_DEVICES", "4,5,6,7"),)))) == list("4567")


def test_a_gpu_without_a_node_goes_by_its_local_cpus() -> None:
    gpu = replace(make_gpu(0, None), local_cpus=frozenset(range(8, 16)))
    machine = build(2, (gpu,), make_nics((0, ()), (1, ())))
    assert names(plan(machine, Request())) == ["1"]
    anywhere = replace(gpu, local_cpus=frozenset(range(16)))
    assert "its place unknown" in why(plan(replace(machine, gpus=(anywhere,)), Request()))


def test_those_with_least_choice_are_served_first() -> None:
    # GPU 0 may have either NIC of its node; GPU 1 shares a switch with the first alone.
    gpus = (make_gpu(0, 0), make_gpu(1, 0, *under(1)))
    assert names(plan(build(1, gpus, make_nics((0, under(1)), (0, under(2)))), Request())) == list("10")


def test_the_fastest_of_the_nearest_are_taken() -> None:
    slow, fast, down = make_nics((0, ()), (0, ()), (0, ()))
    nics = (
        replace(slow, rate_gbps=200.0),
        replace(fast, rate_gbps=400.0),
        replace(down, rate_gbps=800.0, active=False),
    )
    machine = build(2, (make_gpu(0, 0), make_gpu(1, 1)), nics)
    assert names(plan(machine, Request())) == list("11")
    assert names(plan(replace(machine, nics=nics[2:]), Request())) == list("--")
    assert "LAUNCH_NIC" not in dict(plan(replace(machine, nics=()), Request()).ranks[0].env)


def test_a_management_port_is_no_nic_for_training_though_it_is_near() -> None:
    near, far = make_nics((0, ()), (1, ()))
    nics = (replace(near, rate_gbps=25.0), replace(far, rate_gbps=200.0))
    assert names(plan(build(2, (make_gpu(0, 0),), nics), Request())) == ["1"]
    assert names(plan(build(2, (make_gpu(0, 0),), nics[:1]), Request())) == ["0"]


def test_ranks_without_gpus_go_by_their_numa_node() -> None:
    machine = build(2, (), make_nics((1, ()), (0, ()), (1, ()), (0, ())))
    made = plan(machine, Request(4))
    assert names(made) == list("1302")
    assert why(made) == "mlx5_1, on the rank's NUMA node"
    assert names(plan(machine, Request(4, binding="none"))) == list("1302")


@given(st.integers(0, 2**32), st.integers(1, 24))
def test_load_is_even_and_nothing_depends_on_the_order_of_gpus(seed: int, ranks: int) -> None:
    random = Random(seed)
    gpus = tuple(
        make_gpu(at, random.choice([None, 0, 1, 2]), *under(random.randint(1, 3), random.randint(0, 3)))
        for at in range(random.randint(0, 6))
    )
    nics = make_nics(
        *(
            (random.choice([None, 0, 1, 2]), under(random.randint(1, 3), random.randint(0, 3)))
            for _ in range(random.randint(0, 5))
        )
    )
    machine = build(3, gpus, nics)
    made = plan(machine, Request(ranks))
    assert {rank.nic for rank in made.ranks} <= {nic.name for nic in nics} | ({None} if not nics else set())
    mixed = replace(machine, gpus=tuple(random.sample(gpus, len(gpus))))
    assert plan(mixed, Request(ranks)).ranks == made.ranks
    alike = Counter(rank.nic for rank in made.ranks)
    same = {(gpu.node, gpu.path) for gpu in gpus}
    if gpus and len(same) == 1 and ranks == len(gpus):
        counts = [alike[name] for name in alike]
        assert max(counts) - min(counts) <= 1
