"""Small schedules as text: what runs where and when, every action one unit of time long.

Letters: in inputs, E embed, A attend with routing, L whole layers, X experts, U upload, W dequantise, i read ids,
h hand off, O output, D download; then the layer, the slab after a slash, the ubatch after a dot.
"""

from __future__ import annotations

from textwrap import dedent

from overspill.device.lane import Lane
from overspill.pipeline.ledger import StreamId
from overspill.pipeline.schedule import Action, Order, Policy, Verb, WaveSchedule, actions
from overspill.pipeline.simulate import Timed, grid, simulate
from overspill.pipeline.split import Layout, Slab


def layout(n_devices: int, *, n_layers: int, n_slabs: int = 1, grain: int = 1) -> Layout:
    """Layers in turn over the devices; experts on the host in so many slabs, or resident."""
    where = tuple(i // grain % n_devices for i in range(n_layers))
    return Layout(n_devices, where, where[-1], (tuple(Slab(i, i + 1) for i in range(n_slabs)),) * n_layers)


def assert_grid(layout: Layout, schedule: WaveSchedule, n_ubatches: int, expected: str) -> None:
    text = "\n".join(line.rstrip() for line in grid(layout, schedule, n_ubatches).splitlines())
    assert text == dedent(expected).strip("\n")


def test_breadth_first_uploads_each_layer_once() -> None:
    assert_grid(
        layout(2, n_layers=2),
        WaveSchedule(Order.BREADTH_FIRST),
        3,
        """
        device 0 compute     in     .      A0.0   X0/0.0 A0.1   X0/0.1 A0.2   X0/0.2 .      .      .      .      .
        device 0 hand_off    .      h.0    h.1    h.2    .      .      .      .      .      .      .      .      .
        device 0 upload      U0/0   .      .      .      .      .      .      .      .      .      .      .      .
        device 1 compute     in     .      .      .      .      A1.0   X1/0.0 A1.1   X1/0.1 A1.2   X1/0.2 O.2    .
        device 1 hand_off    .      .      .      .      h.0    .      h.1    .      h.2    .      .      .      D.2
        device 1 upload      U1/0   .      .      .      .      .      .      .      .      .      .      .      .
        host compute         E.0    E.1    E.2    .      .      .      .      .      .      .      .      .      .
        """,
    )


def test_depth_first_uploads_each_layer_for_each_ubatch() -> None:
    assert_grid(
        layout(2, n_layers=2),
        WaveSchedule(Order.DEPTH_FIRST),
        3,
        """
        device 0 compute     in     .      A0.0   X0/0.0 A0.1   X0/0.1 A0.2   X0/0.2 .      .      .      .      .
        device 0 hand_off    .      h.0    h.1    h.2    .      .      .      .      .      .      .      .      .
        device 0 upload      U0/0   U0/0   .      .      U0/0   .      .      .      .      .      .      .      .
        device 1 compute     in     .      .      .      .      A1.0   X1/0.0 A1.1   X1/0.1 A1.2   X1/0.2 O.2    .
        device 1 hand_off    .      .      .      .      h.0    .      h.1    .      h.2    .      .      .      D.2
        device 1 upload      U1/0   U1/0   .      .      .      .      .      U1/0   .      .      .      .      .
        host compute         E.0    E.1    E.2    .      .      .      .      .      .      .      .      .      .
        """,
    )


def test_serial_does_one_thing_at_a_time() -> None:
    assert_grid(
        layout(1, n_layers=1),
        WaveSchedule(Order.SERIAL),
        2,
        """
        device 0 compute     in     .      .      .      .      A0.0   X0/0.0 .      .      A0.1   X0/0.1 O.1    .
        device 0 hand_off    .      .      .      .      h.0    .      .      .      h.1    .      .      .      D.1
        device 0 upload      .      U0/0   U0/0   .      .      .      .      .      .      .      .      .      .
        host compute         .      .      .      E.0    .      .      .      E.1    .      .      .      .      .
        """,
    )


def test_a_slab_goes_up_when_a_slot_is_free() -> None:
    assert_grid(
        layout(1, n_layers=1, n_slabs=3),
        WaveSchedule(Order.BREADTH_FIRST),
        2,
        """
        device 0 compute     in     .      A0.0   A0.1   X0/0.0 X0/0.1 X0/1.0 X0/1.1 X0/2.0 X0/2.1 O.1    .
        device 0 hand_off    .      h.0    h.1    .      .      .      .      .      .      .      .      D.1
        device 0 upload      U0/0   U0/1   .      .      .      .      U0/2   .      .      .      .      .
        host compute         E.0    E.1    .      .      .      .      .      .      .      .      .      .
        """,
    )


def test_selected_reads_ids_first() -> None:
    assert_grid(
        layout(1, n_layers=1),
        WaveSchedule(Order.BREADTH_FIRST, Policy.SELECTED),
        2,
        """
        device 0 compute     in     .      A0.0   A0.1   .      .      X0/0.0 X0/0.1 O.1    .
        device 0 hand_off    .      h.0    h.1    i0.0   i0.1   .      .      .      .      D.1
        device 0 upload      .      .      .      .      .      U0/0   .      .      .      .
        host compute         E.0    E.1    .      .      .      .      .      .      .      .
        """,
    )


def test_the_cpu_gets_one_ubatch_after_the_other() -> None:
    assert_grid(
        layout(2, n_layers=2),
        WaveSchedule(Order.BREADTH_FIRST, Policy.CPU),
        3,
        """
        device 0 compute     in   .    A0.0 A0.1 .    A0.2 .    .    .    .    .    .    .    .    .    .
        device 0 hand_off    .    h.0  h.1  h.0  h.2  h.1  h.2  .    .    .    .    .    .    .    .    .
        device 1 compute     in   .    .    .    .    .    A1.0 .    A1.1 .    A1.2 .    .    .    O.2  .
        device 1 hand_off    .    .    .    .    .    h.0  .    h.1  h.0  h.2  h.1  h.2  .    h.2  .    D.2
        host compute         E.0  E.1  E.2  .    X0.0 .    X0.1 X0.2 .    X1.0 .    X1.1 X1.2 .    .    .
        """,
    )


def test_resident_layers_follow_each_other_closely() -> None:
    assert_grid(
        layout(2, n_layers=4, n_slabs=0),
        WaveSchedule(Order.BREADTH_FIRST),
        4,
        """
        device 0 compute     in   .    L0.0 L0.1 L0.2 L0.3 L2.0 L2.1 L2.2 L2.3 .    .    .    .
        device 0 hand_off    .    h.0  h.1  h.2  h.3  h.0  h.1  h.2  h.3  .    .    .    .    .
        device 1 compute     in   .    .    .    L1.0 L1.1 L1.2 L1.3 L3.0 L3.1 L3.2 L3.3 O.3  .
        device 1 hand_off    .    .    .    h.0  h.1  h.2  h.3  h.0  h.1  h.2  h.3  .    .    D.3
        host compute         E.0  E.1  E.2  E.3  .    .    .    .    .    .    .    .    .    .
        """,
    )


def test_stages_of_two_layers() -> None:
    assert_grid(
        layout(2, n_layers=4, n_slabs=0, grain=2),
        WaveSchedule(Order.DEPTH_FIRST),
        3,
        """
        device 0 compute     in   .    L0.0 L0.1 L0.2 .    .    .    .
        device 0 hand_off    .    h.0  h.1  h.2  .    .    .    .    .
        device 1 compute     in   .    .    .    L2.0 L2.1 L2.2 O.2  .
        device 1 hand_off    .    .    .    h.0  h.1  h.2  .    .    D.2
        host compute         E.0  E.1  E.2  .    .    .    .    .    .
        """,
    )


def test_slabs_are_dequantised_once() -> None:
    assert_grid(
        layout(1, n_layers=2),
        WaveSchedule(Order.BREADTH_FIRST, widen=True),
        2,
        """
        device 0 compute     in     W0/0   A0.0   X0/0.0 A0.1   X0/0.1 W1/0   A1.0   X1/0.0 A1.1   X1/0.1 O.1    .
        device 0 hand_off    .      h.0    h.1    .      .      .      .      .      .      .      .      .      D.1
        device 0 upload      U0/0   U1/0   .      .      .      .      .      .      .      .      .      .      .
        host compute         E.0    E.1    .      .      .      .      .      .      .      .      .      .      .
        """,
    )


def timed(n_devices: int, schedule: WaveSchedule, *, n_layers: int, n_ubatches: int, n_slabs: int = 1) -> list[Timed]:
    """A layer on a ubatch takes 1, in attention 0.25 and experts 0.75; hand-offs are quick, uploads take 2."""
    us = {
        Verb.LAYERS: 1.0,
        Verb.ATTEND: 0.25,
        Verb.EXPERTS: 0.75 / max(n_slabs, 1),
        Verb.UPLOAD: 2.0 / max(n_slabs, 1),
        Verb.HAND_OFF: 0.05,
    }

    def cost_us(action: Action) -> float:
        return us.get(action.verb, 0.0)

    issued = actions(layout(n_devices, n_layers=n_layers, n_slabs=n_slabs), schedule, [0] * (n_ubatches - 1) + [1])
    return simulate(issued, cost_us, is_serial=schedule.order is Order.SERIAL)


def makespan(n_devices: int, schedule: WaveSchedule, *, n_slabs: int = 1) -> float:
    """Of 16 layers and 8 ubatches."""
    return max(t.end_us for t in timed(n_devices, schedule, n_layers=16, n_ubatches=8, n_slabs=n_slabs))


def test_breadth_first_keeps_all_devices_busy() -> None:
    """The bubble is (N - 1) items and their hand-offs, whether experts are resident or go up (Huang et al. 2019)."""
    schedule = WaveSchedule(Order.BREADTH_FIRST)
    for n_devices in (1, 2, 4):
        n_items, n_bubble = 16 * 8 / n_devices, n_devices - 1
        assert makespan(n_devices, schedule, n_slabs=0) <= n_items + n_bubble * 1.05 + 0.1
        assert makespan(n_devices, schedule) <= 2.0 + n_items + n_bubble * 1.05 + 0.1


def test_breadth_first_hides_uploads_that_depth_first_repeats() -> None:
    """At 2 units an upload, one a ubatch and layer: twice the computing."""
    assert makespan(1, WaveSchedule(Order.BREADTH_FIRST)) < 131
    assert makespan(1, WaveSchedule(Order.DEPTH_FIRST)) > 2 * 128


def test_a_layer_in_two_slabs_costs_overlap_of_devices() -> None:
    """Why a slab should be a whole layer where there is room: the next device waits for the last slab."""
    schedule = WaveSchedule(Order.BREADTH_FIRST)
    assert makespan(4, schedule, n_slabs=2) > 2 * makespan(4, schedule, n_slabs=1)
    assert makespan(1, schedule, n_slabs=2) <= makespan(1, schedule, n_slabs=1)


def test_the_cpu_never_waits_for_a_ubatch() -> None:
    """Experts on the CPU, one after the other without a gap, over devices and layers."""
    for n_devices in (1, 2, 4):
        wave = timed(n_devices, WaveSchedule(Order.BREADTH_FIRST, Policy.CPU), n_layers=6, n_ubatches=8)
        host = [t for t in wave if t.action.stream == StreamId(n_devices, Lane.COMPUTE)]
        experts = [t for t in host if t.action.verb is Verb.EXPERTS]
        assert len(experts) == 6 * 8
        busy_us = sum(t.end_us - t.start_us for t in experts)
        assert experts[-1].end_us - experts[0].start_us <= busy_us + 1e-9
