"""Hand-worked arrays; the experts of real routers are in tests/test_doctor.py."""

import numpy as np

from rtk.trace import plausible


def test_all_zero_is_about_the_whole_row():
    routes = np.array([[[0, 0], [0, 1]], [[3, 0], [0, 0]]], dtype=np.uint8)
    assert plausible.all_zero(routes).tolist() == [[True, False], [False, True]]


def test_out_of_range_counts_from_zero():
    routes = np.array([[0, 7], [8, 1], [-1, 2]])
    assert plausible.out_of_range(routes, 8).tolist() == [False, True, True]
    assert not plausible.out_of_range(np.array([[255, 0]], dtype=np.uint8), 256).any()


def test_repeated_experts_need_not_be_neighbours():
    routes = np.array([[5, 2, 5], [5, 2, 1], [0, 0, 0]])
    assert plausible.repeated_experts(routes).tolist() == [True, False, True]
    assert not plausible.repeated_experts(np.array([[3], [3]])).any()


def test_the_same_experts_in_another_order_are_the_same():
    a, b = np.array([[1, 2], [1, 2], [1, 2]]), np.array([[2, 1], [1, 2], [1, 3]])
    assert plausible.same_experts(a, b).tolist() == [True, True, False]


def _moving(rows: int) -> np.ndarray:
    """Two layers of top-2 that never stand still: the first counts up."""
    routes = np.empty((rows, 2, 2), dtype=np.uint16)
    routes[:, 0, 0], routes[:, 0, 1] = np.arange(rows), 900
    routes[:, 1] = [1, 2]
    return routes


def test_stuck_rows_are_found_where_they_are():
    routes = _moving(60)
    routes[20:31] = routes[19]
    assert plausible.stuck_rows(routes, list(range(60))) == (19, 30)


def test_a_layer_that_stands_still_alone_is_not_stuck():
    assert plausible.stuck_rows(_moving(60), list(range(60))) is None


def test_equal_routes_of_equal_tokens_are_not_stuck():
    routes = _moving(60)
    routes[20:31] = routes[19]
    assert plausible.stuck_rows(routes, [7] * 60) is None


def test_a_model_whose_neighbours_often_agree_is_not_stuck():
    # One expert of two: half of all neighbours agree, and over 200 rows a run of five is nothing.
    choice = np.random.default_rng(5).integers(0, 2, size=200)
    assert plausible.stuck_rows(choice.reshape(-1, 1, 1) + 1, list(range(200))) is None


def test_rows_of_zeros_are_left_to_all_zero():
    routes = _moving(60)
    routes[20:31] = 0
    assert plausible.stuck_rows(routes, list(range(60))) is None


def test_a_single_row_is_nothing_to_compare():
    assert plausible.stuck_rows(_moving(1), [4]) is None
