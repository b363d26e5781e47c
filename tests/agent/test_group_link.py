"""The agent's link to a coordinator beside it."""

from launcher.agent.coordinator import Coordinator, JobEnd
from launcher.agent.group import GroupNode, GroupStart
from launcher.agent.group_link import LocalLink


def test_the_only_node_of_a_job_gets_its_orders_in_turn() -> None:
    coordinator = Coordinator(("here",), 1, 1, lambda host, number: (host, 1000 + number))
    link = LocalLink(coordinator, "here")
    assert link.take_order() is None
    link.report_ready(3)
    link.report_failure(0, 2, -9)
    nodes = (GroupNode("here", 3),)
    assert link.take_order() == GroupStart(0, nodes, "here", 1000)
    assert link.take_order() == GroupStart(1, nodes, "here", 1001)
    link.report_end(0)
    assert link.take_order() is None, "that start is over"
    link.report_taken_port(1)
    assert link.take_order() == GroupStart(2, nodes, "here", 1002)
    link.report_end(2)
    assert (link.take_order(), link.take_order()) == (JobEnd(failed=False), None)
