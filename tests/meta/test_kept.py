"""What is kept between laws: bounded, and told apart by every bit of a case."""

import numpy as np
from dropless.parity.covering import tiny_problems
from dropless.parity.inputs import make_case
from dropless.parity.kept import Kept, digest
from dropless.parity.law_tools import oracle_view


def test_the_least_recently_used_go_first_by_number_and_by_size():
    made = []

    def array(name, size=1):
        return lambda: made.append(name) or np.zeros(size, np.uint8)

    few = Kept(2, 1000)
    for name in ("a", "b", "a", "c", "a", "b"):
        few.get(name, array(name))
    assert made == ["a", "b", "c", "b"]
    made.clear()
    small = Kept(9, 1000)
    for name in ("a", "b", "a"):
        small.get(name, array(name, 600))
    small.get("large", array("large", 5000))
    small.get("large", array("large", 5000))
    assert made == ["a", "b", "a", "large"]


def test_a_digest_sees_every_bit_dtype_shape_and_absence():
    x = np.arange(6, dtype=np.float32)
    unlike = [x, -x, x.reshape(2, 3), x.astype(np.float16), x[:5], None, (x, None), (None, x), np.float32(1), x[:0]]
    assert len({digest(each) for each in unlike}) == len(unlike)
    assert digest(x.copy()) == digest(x)
    assert digest(np.float32(0.0)) != digest(np.float32(-0.0))


def test_the_oracle_answers_anew_when_any_part_of_a_case_changes():
    case = make_case(tiny_problems()[0])
    view = oracle_view(case)
    assert oracle_view(make_case(tiny_problems()[0])) is view
    assert not np.array_equal(oracle_view(case.replace(x=case.x + 1))["y"].value, view["y"].value)
    turned = case.replace(cotangent=-case.cotangent)
    assert np.array_equal(oracle_view(turned)["x"].value, -view["x"].value)
    assert set(oracle_view(case, grad=False)) == {"y"}
