"""`weft.TensorArray`, in Python and under JAX, and the examples."""

from __future__ import annotations

import doctest
import runpy
import threading
from pathlib import Path

import numpy as np
import pytest
from support.libraries import back, need, to

import weft
import weft.tensor_array.array
from weft import TensorArray, errors

INVALID = errors.InvalidArgumentError
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("tensor_array_*.py"))


def f32(*values):
    return np.array(values, np.float32)


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(weft.tensor_array.array, extraglobs={"np": np}).failed == 0


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run_and_check_themselves(path, capsys):
    runpy.run_path(str(path), run_name="__main__")
    assert "largest difference" in capsys.readouterr().out


def test_there_are_examples():
    assert [path.stem for path in EXAMPLES] == [
        "tensor_array_ensemble",
        "tensor_array_jacobian",
        "tensor_array_per_example_gradients",
    ]


def test_it_grows_and_learns_its_dtype_and_shape(library):
    array = TensorArray()
    assert (len(array), array.dtype, array.element_shape) == (0, None, None)
    for value in (f32(1, 2), f32(3, 4)):
        assert array.append(to(library, value)) is array
    array.write(3, to(library, f32(5, 6)))
    assert (len(array), array.dtype, array.element_shape) == (4, "float32", (2,))
    assert back(array.stack()).tolist() == [[1, 2], [3, 4], [0, 0], [5, 6]]
    assert back(array.concat()).tolist() == [1, 2, 3, 4, 0, 0, 5, 6]
    assert back(array.gather([3, 0])).tolist() == [[5, 6], [1, 2]]
    assert [back(x).tolist() for x in array] == [[1, 2], [3, 4], [0, 0], [5, 6]]


def test_whole_arrays_in_and_out(library):
    rows = to(library, np.arange(6, dtype=np.float32).reshape(3, 2))
    assert back(TensorArray(size=3).unstack(rows).stack()).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert back(TensorArray().unstack(rows).read(1)).tolist() == [2, 3]
    scattered = TensorArray(size=4).scatter([3, 0, 1], rows)
    assert back(scattered.stack()).tolist() == [[2, 3], [4, 5], [0, 0], [0, 1]]
    pieces = TensorArray(size=2, infer_shape=False).split(rows, [2, 1])
    assert back(pieces.read(0)).tolist() == [[0, 1], [2, 3]]
    assert back(pieces.concat()).tolist() == back(rows).tolist()


def test_python_values_make_an_array_too():
    assert TensorArray().append(1.5).append(2).stack().tolist() == [1.5, 2.0]
    assert TensorArray("int32").unstack([1, 2]).stack().dtype == np.int32
    assert TensorArray().append("ab").append("c").stack().tolist() == ["ab", "c"]


def test_integers_of_any_kind_are_indices(library):
    array = TensorArray(size=np.int64(3), dtype="float32")
    for index in np.arange(3):
        array.write(index, to(library, f32(index)))
    assert back(array.read(to(library, np.array(1, np.int32)))).tolist() == [1]
    assert back(array.gather(to(library, np.array([2, 0], np.int32)))).ravel().tolist() == [2, 0]
    assert TensorArray("float32").split(to(library, f32(1, 2)), np.array([1, 1], np.int32)).concat().shape == (2,)


def test_appending_goes_on_behind_what_was_written():
    array = TensorArray(size=4, dtype="float32")
    array.append(1.0).write(2, 3.0).append(4.0)
    assert array.stack().tolist() == [1, 0, 3, 4]
    with pytest.raises(INVALID):
        array.append(5.0)


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda a: a.write(0, f32(9, 9)), INVALID),
        (lambda a: a.write(1, f32(9)), INVALID),
        (lambda a: a.write(5, f32(9, 9)), INVALID),
        (lambda a: a.write(-1, f32(9, 9)), INVALID),
        (lambda a: a.write(1, np.zeros(2)), INVALID),
        (lambda a: a.write(1.0, f32(9, 9)), INVALID),
        (lambda a: a.write(True, f32(9, 9)), INVALID),
        (lambda a: a.write([1], f32(9, 9)), INVALID),
        (lambda a: a.gather(1), INVALID),
        (lambda a: a.gather([0.5]), INVALID),
        (lambda a: a.scatter([1, 1], f32(1, 2, 3, 4).reshape(2, 2)), INVALID),
        (lambda a: a.unstack(np.zeros((5, 2), np.float32)), INVALID),
        (lambda a: a.unstack(1.0), INVALID),
        (lambda a: a.split(f32(1, 2, 3), [1, 2]), INVALID),
        (lambda a: a.read(3), INVALID),
        (lambda a: a.gather([-1]), INVALID),
        (lambda a: a.gradient("g", [-1]), INVALID),
        (lambda a: a.gradient("g", [0.5]), INVALID),
        (lambda a: a.gradient(3), TypeError),
        (lambda a: TensorArray(size=-1), INVALID),
        (lambda a: TensorArray(size=1.5), INVALID),
        (lambda a: TensorArray(size=10**30), errors.ResourceExhaustedError),
        (lambda a: TensorArray("float33"), INVALID),
        (lambda a: TensorArray(element_shape=3), TypeError),
    ],
)
def test_what_cannot_be_right_is_refused(use, error):
    array = TensorArray(size=3).write(0, f32(1, 2))
    with pytest.raises(error):
        use(array)
    assert array.stack().tolist() == [[1, 2], [0, 0], [0, 0]]


def test_nothing_can_be_read_before_there_is_a_dtype():
    for use in (TensorArray.stack, TensorArray.concat, lambda a: a.read(0), lambda a: a.gradient()):
        with pytest.raises(errors.FailedPreconditionError):
            use(TensorArray(size=2))
    with pytest.raises(INVALID):
        TensorArray("float32", size=2).stack()
    with pytest.raises(INVALID):
        TensorArray(size=-1, dtype="float32")
    with pytest.raises(errors.UnimplementedError):
        TensorArray("float32").stack()
    assert TensorArray("float32", element_shape=[3]).stack().shape == (0, 3)


def test_clear_after_read_and_close():
    array = TensorArray(clear_after_read=True).append(1.0)
    assert array.read(0) == 1
    with pytest.raises(INVALID):
        array.read(0)
    array.close()
    with pytest.raises(INVALID):
        len(array)


def test_a_refused_first_write_decides_nothing():
    array = TensorArray(size=1)
    with pytest.raises(INVALID):
        array.write(3, f32(1))
    assert array.dtype is None
    assert array.write(0, 7).stack().tolist() == [7]


def test_threads_that_write_first_share_one_array():
    array = TensorArray()
    threads = [threading.Thread(target=array.append, args=(f32(number),)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(array.concat().tolist()) == list(range(16))


def test_gradient_arrays(library):
    array = TensorArray(size=3).write(0, to(library, f32(1, 2)))
    gradient = array.gradient("g", prepend=[2])
    assert len(gradient) == 3
    gradient.write(1, to(library, np.ones((2, 2), np.float32)))
    array.gradient("g").write(1, to(library, np.ones((2, 2), np.float32)))
    assert back(gradient.stack())[1].tolist() == [[2, 2], [2, 2]]
    assert "size 3" in repr(array)
    with pytest.raises(INVALID):
        array.gradient("other").gradient()


def test_it_says_what_it_is():
    assert repr(TensorArray(size=2)) == "<TensorArray of size 2, nothing written>"
    array = TensorArray("float32", element_shape=[None, 2])
    assert repr(array) == "<TensorArray float32[?,2], size 0>"
    array.close()
    assert repr(array) == "<TensorArray float32[?,2], closed>"


# ----- under JAX -----


@pytest.fixture
def jax():
    need("jax")
    import jax

    return jax


def empty(size=4, shape=(2,), **options):
    return TensorArray("float32", size=size, element_shape=shape, **options)


def test_scan_carries_it(jax):
    @jax.jit
    def run(x, array):
        def step(carry, i):
            array, x = carry
            first = array.read(0)
            return (array.write(i, x), x * 2), first

        (array, _), reads = jax.lax.scan(step, (array, x), jax.numpy.arange(4))
        return array, reads

    array, reads = run(jax.numpy.ones(2), empty())
    assert isinstance(array, TensorArray)
    assert array.stack().tolist() == [[1, 1], [2, 2], [4, 4], [8, 8]]
    assert reads.tolist() == [[0, 0], [1, 1], [1, 1], [1, 1]]
    assert [x.tolist() for x in array] == array.stack().tolist()
    assert array.concat().shape == (8,)
    assert (len(array), array.dtype, array.element_shape) == (4, "float32", (2,))


def test_while_loops_append_to_it(jax):
    def step(carry):
        array, n = carry
        return array.append(jax.numpy.full(2, n, jax.numpy.float32)), n + 1

    array, _ = jax.jit(lambda a: jax.lax.while_loop(lambda c: c[1] < 3, step, (a, 0)))(empty())
    assert array.stack().tolist() == [[0, 0], [1, 1], [2, 2], [0, 0]]


def test_what_was_written_before_goes_in(jax):
    array = empty().write(1, f32(5, 6)).write(0, f32(1, 2))
    found = jax.jit(lambda a, i: a.write(i, jax.numpy.ones(2)))(array, 2)
    assert found.stack().tolist() == [[1, 2], [5, 6], [1, 1], [0, 0]]
    assert array.stack().tolist() == [[1, 2], [5, 6], [0, 0], [0, 0]]
    with pytest.raises(INVALID, match="element 1 cannot be written twice"):
        jax.jit(lambda a, i: a.write(i, jax.numpy.ones(2)))(array, 1).stack()


def test_gradients_flow_through_a_scan(jax):
    from jax.test_util import check_grads

    def value(x, array):
        def step(array, i):
            return array.write(i, x ** (i + 1)), None

        array, _ = jax.lax.scan(step, array, jax.numpy.arange(3))
        return (array.stack() ** 2).sum() + array.read(2).sum()

    x = jax.numpy.asarray(f32(0.5, 2))
    found = jax.jit(jax.grad(value))(x, empty(3))
    np.testing.assert_allclose(found, 2 * x + 4 * x**3 + 6 * x**5 + 3 * x**2, rtol=1e-5)
    check_grads(jax.jit(lambda x: value(x, empty(3))), [x], order=2, modes=["rev"], rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda a, i, x: a.write(i, x), "index must be in .0, 4., got 7"),
        (lambda a, i, x: a.write(i - 8, x), "got -1"),
        (lambda a, i, x: a.write(i - 6, x).write(i - 6, x), "element 1 cannot be written twice"),
        (lambda a, i, x: a.scatter(i - jax_array([7, 7]), two(x)), "element 0 cannot be written twice"),
        (lambda a, i, x: a.scatter(i - jax_array([7, 1]), two(x)), "got 6"),
        (lambda a, i, x: a.unstack(two(two(x))[0].repeat(2, 0)).append(x), "got 4"),
        (lambda a, i, x: a.write(i, x).write(0, x).write(0, x), "got 7"),  # the first fault stays
    ],
)
def test_overflow_sticks_and_raises_outside(jax, write, message):
    found = jax.jit(write)(empty(), 7, jax.numpy.ones(2))
    for use in (TensorArray.stack, len, lambda a: a.read(0), lambda a: a.append(jax.numpy.ones(2))):
        with pytest.raises(INVALID, match=message):
            use(found)
    again = jax.jit(lambda a: a)(found)
    with pytest.raises(INVALID, match=message):
        again.stack()


def jax_array(values):
    import jax.numpy as jnp

    return jnp.asarray(values)


def two(x):
    import jax.numpy as jnp

    return jnp.stack([x, x])


def test_a_dropped_write_changes_nothing_else(jax):
    def run(array, i):
        return array.write(0, jax.numpy.ones(2)).write(i, jax.numpy.full(2, 9.0))

    for index in (0, 4, -1):
        leaves = jax.tree.leaves(jax.jit(run)(empty(), index))
        assert leaves[0].tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]


def test_known_mistakes_raise_while_tracing(jax):
    ones = jax.numpy.ones
    for use in (
        lambda a: a.write(4, ones(2)),
        lambda a: a.write(0, ones(3)),
        lambda a: a.write(0, ones(2, int)),
        lambda a: a.unstack(ones((3, 3))),
        lambda a: a.read(-1),
        lambda a: a.split(ones(8), [1, 2, 3, 2]),
    ):
        with pytest.raises(INVALID):
            jax.jit(lambda a, use=use: use(a))(empty())


def test_the_old_array_is_spent(jax):
    def forgets(array):
        array.write(0, jax.numpy.ones(2))
        return array.write(1, jax.numpy.ones(2))

    def loses(array):
        array.write(0, jax.numpy.ones(2))
        return array

    for function in (forgets, loses):
        with pytest.raises(errors.FailedPreconditionError, match="writing returned"):
            jax.jit(function)(empty())


def finish(jax, result):
    """Wait until a compiled program and its checks are done."""
    jax.block_until_ready(result)
    jax.effects_barrier()


def test_checked_raises_from_inside(jax, capfd):
    run = jax.jit(lambda a, i: a.write(i, jax.numpy.ones(2)).stack())
    assert run(empty(checked=True), 3).shape == (4, 2)
    with pytest.raises(jax.errors.JaxRuntimeError, match="got 7"):
        finish(jax, run(empty(checked=True), 7))
    read = jax.jit(lambda a, i: a.read(i))
    with pytest.raises(jax.errors.JaxRuntimeError, match="got 9"):
        finish(jax, read(empty(checked=True), 9))


def test_reads_outside_look_like_nothing(jax):
    read = jax.jit(lambda a, i: a.read(i))
    assert np.isnan(read(empty(), 4)).all()
    assert np.isnan(read(empty(), -1)).all()
    assert int(read(TensorArray("int32", size=1, element_shape=[]), 1)) == np.iinfo(np.int32).min


def test_splitting_and_scattering_inside(jax):
    values = jax.numpy.arange(8, dtype=jax.numpy.float32)
    assert jax.jit(lambda a: a.split(values, [2] * 4).stack())(empty()).tolist() == values.reshape(4, 2).tolist()
    found = jax.jit(lambda a, i: a.scatter(i, values.reshape(4, 2)).gather(i[:2]))(empty(), jax_array([2, 0, 3, 1]))
    assert found.tolist() == [[0, 1], [2, 3]]
    assert jax.jit(lambda a: a.unstack(values.reshape(4, 2)).concat())(empty()).tolist() == values.tolist()
    far = np.array([2**32, 1])  # not element 0 where indices have 32 bits
    with pytest.raises(INVALID, match="index must be in"):
        jax.jit(lambda a: a.scatter(far, values.reshape(4, 2)[:2]))(empty()).stack()
    assert np.isnan(jax.jit(lambda a: a.gather(far))(empty())[0]).all()


def test_what_jax_cannot_carry_is_refused(jax):
    for array in (
        TensorArray("float32", element_shape=[2]),
        TensorArray("float32", size=2),
        TensorArray("float32", size=2, element_shape=[None]),
        TensorArray("float64", size=2, element_shape=[2]),
        empty(clear_after_read=True),
        empty().gradient(),
    ):
        with pytest.raises(INVALID, match="under jit"):
            jax.jit(lambda a: a)(array)
    with pytest.raises(errors.UnimplementedError):
        jax.jit(lambda a: a.gradient().stack())(empty())
    with pytest.raises(errors.UnimplementedError):
        jax.jit(lambda a: a.close())(empty())


def test_a_traced_index_is_enough(jax):
    def run(i):
        return empty().write(i, jax.numpy.ones(2)).stack()

    assert jax.jit(run)(2).tolist() == [[0, 0], [0, 0], [1, 1], [0, 0]]


def test_vmap_over_arrays(jax):
    def run(x):
        def step(array, i):
            return array.append(x * i), None

        return jax.lax.scan(step, empty(3, ()), jax.numpy.arange(3.0))[0].stack()

    assert jax.vmap(run)(jax.numpy.arange(2.0)).tolist() == [[0, 0, 0], [0, 1, 2]]


def test_faults_under_vmap_are_found(jax):
    found = jax.vmap(lambda i: empty(2, ()).write(i, 1.0))(jax.numpy.arange(3))
    with pytest.raises(INVALID, match="got 2"):
        found.stack()


def test_a_first_write_may_be_traced(jax):
    def run(i):
        return TensorArray(size=3, element_shape=()).write(i, jax.numpy.float32(2)).stack()

    assert jax.jit(run)(1).tolist() == [0, 2, 0]


def test_an_array_without_elements_is_carried_too(jax):
    found = jax.jit(lambda a, i: a.write(i, jax.numpy.ones(2)))(empty(0), 0)
    with pytest.raises(INVALID, match="got 0"):
        found.stack()
