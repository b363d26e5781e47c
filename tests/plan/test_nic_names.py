"""What NCCL and programs are told of NICs, and what the user has said of them."""

import pytest

from launcher.plan.model import Nic, Request
from launcher.plan.planner import plan

from .test_nics import DGX_A100, build, make_gpu, make_nics, names


@pytest.mark.parametrize(
    ("hca", "expected"),
    [
        ("=mlx5_2,mlx5_3:1", "2233"),
        ("mlx5_3", "3333"),
        ("^=mlx5_0,mlx5_1", "2233"),
        ("^mlx5_", "0123"),
        ("mlx4", "0123"),
    ],
)
def test_nics_that_the_user_leaves_out_are_not_offered(hca: str, expected: str) -> None:
    machine = build(1, tuple(make_gpu(at, 0) for at in range(4)), make_nics(*[(0, ())] * 4))
    made = plan(machine, Request(nic=True, environ=(("NCCL_IB_HCA", hca),)))
    assert names(made) == list(expected)
    assert "NCCL_IB_HCA" not in dict(made.ranks[0].env)
    assert f"NCCL_IB_HCA={hca} kept, set by the user" in made.ranks[0].notes


def test_a_name_without_the_equals_sign_is_a_prefix() -> None:
    nics = tuple(Nic(f"mlx5_{at}", "", 0) for at in (1, 2, 10))
    machine = build(1, tuple(make_gpu(at, 0) for at in range(4)), nics)
    environ = (("NCCL_IB_HCA", "mlx5_1"),)
    assert names(plan(machine, Request(environ=environ))) == ["1", "1", "10", "10"]
    assert names(plan(machine, Request(environ=(("NCCL_IB_HCA", "=mlx5_1"),)))) == ["1"] * 4


def test_nccl_is_told_by_exact_name_where_that_was_asked_for() -> None:
    assert "NCCL_IB_HCA" not in dict(plan(DGX_A100, Request()).ranks[1].env)
    assert dict(plan(DGX_A100, Request(nic=True)).ranks[1].env)["NCCL_IB_HCA"] == "=mlx5_1"


def test_the_users_nic_wins() -> None:
    made = plan(DGX_A100, Request(nic=True, environ=(("LAUNCH_NIC", "mlx5_9"),)))
    assert names(made) == ["9"] * 8
    assert dict(made.ranks[0].env)["NCCL_IB_HCA"] == "=mlx5_9"
    assert "LAUNCH_NIC" not in dict(made.ranks[0].env)
    assert made.warnings == ()
    assert plan(DGX_A100, Request(environ=(("LAUNCH_NIC", ""),))) == plan(DGX_A100, Request())


def test_a_nic_of_the_users_that_is_not_there_is_a_warning() -> None:
    made = plan(DGX_A100, Request(environ=(("LAUNCH_NIC", "mlx5_99"),)))
    assert names(made) == ["99"] * 8
    assert "LAUNCH_NIC=mlx5_99 is none of this machine's RDMA devices (mlx5_0, mlx5_1" in made.warnings[0]


def test_efa_is_not_for_nccls_verbs() -> None:
    gpus = tuple(make_gpu(at, at // 4, f"pci0000:{at // 2 + 1}0") for at in range(8))
    efa = tuple(
        Nic(
            f"rdmap{16 * (at + 1)}s27",
            f"0000:{at + 1}0:1b.0",
            at // 2,
            (f"pci0000:{at + 1}0",),
            rate_gbps=100,
        )
        for at in range(4)
    )
    made = plan(build(2, gpus, efa), Request(nic=True))
    assert [rank.nic for rank in made.ranks] == [efa[at // 2].name for at in range(8)]
    assert all("NCCL_IB_HCA" not in dict(rank.env) for rank in made.ranks)
    assert made.ranks[0].notes[-1] == (
        "NCCL_IB_HCA is not set: rdmap16s27 is an EFA device, which NCCL reaches by libfabric"
    )
