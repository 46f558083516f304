"""Factors of normalisations and recurrent layers: everything but what is normalised over.

The images of a batch normalisation in training are special: its statistics are taken over the whole batch, by
all-reduces inside; all devices then have the same statistics, so these results are whole. The groups of a group
normalisation are special, because their number is an argument.
"""

from __future__ import annotations

from dataclasses import replace

from weft.sharding.factor_rules.common import Call, rule
from weft.sharding.factors import OpFactors


@rule("aten.layer_norm.default", "aten.native_layer_norm.default", "aten.rms_norm.default")
def layer_norm(call: Call) -> OpFactors | None:
    """Return the factors of a normalisation over the last dimensions."""
    num_rows = len(call.shape) - len(call.args["normalized_shape"])
    dims = call.plain(call.shape, but=range(num_rows, len(call.shape)))
    return call.done([(call.args["input"], dims)], [dims for _ in call.outputs])


@rule("aten.group_norm.default")
def group_norm(call: Call) -> OpFactors | None:
    """Return the factors of a normalisation of groups of channels."""
    x, num_groups, shape = call.args["input"], call.args["num_groups"], call.shape
    images, groups = call.factor("images", shape[0]), call.factor("groups", num_groups, special=True)
    within = call.factor("within", shape[1] // num_groups, fixed=True)
    dims = [images, groups + within, *[()] * (len(shape) - 2)]
    channels = [(call.args[name], [groups + within]) for name in ("weight", "bias") if call.args[name] is not None]
    return call.done([(x, dims), *channels], [dims])


@rule("aten._native_batch_norm_legit_functional.default", "aten._native_batch_norm_legit_no_training.default",
      "aten.batch_norm.default")
def batch_norm(call: Call) -> OpFactors | None:
    """Return the factors of a normalisation of channels over the batch."""
    x, shape = call.args["input"], call.shape
    in_training = call.args.get("training", False)
    if in_training and "functional" not in call.operator:
        return None  # it changes its statistics in place
    vector = float(shape[1] * max(x.meta["val"].dtype.itemsize, 4))
    images = call.factor("images", shape[0], special=in_training,  # mean, then variance; back both at once
                         forward_sums=(vector, vector) if in_training else (),
                         backward_sums=(2 * vector,) if in_training else ())
    channels = call.factor("channels", shape[1])
    dims = [images, channels, *[()] * (len(shape) - 2)]
    names = ("weight", "bias", "running_mean", "running_var")
    vectors = [(call.args[name], [channels]) for name in names if call.args[name] is not None]
    statistics = [[channels] if result == (shape[1],) else [()] for result in call.outputs[1:]]
    found = call.done([(x, dims), *vectors], [dims, *statistics])
    return None if found is None else replace(found, whole_outputs=tuple(range(1, len(call.outputs))))


@rule("aten.lstm.input", "aten.gru.input")
def recurrent(call: Call) -> OpFactors | None:
    """Return the factors of a recurrent layer: the sequences of the batch."""
    x, shape = call.args["input"], call.shape
    if len(shape) != 3 or (call.args["dropout"] and call.args["train"]):
        return None
    batch_dim = 0 if call.args["batch_first"] else 1
    batch = call.factor("batch", shape[batch_dim])
    dims = [batch if dim == batch_dim else () for dim in range(3)]
    states = call.args["hx"] if isinstance(call.args["hx"], list | tuple) else [call.args["hx"]]
    state_dims = [(), batch, ()]
    return call.done([(x, dims), *((state, state_dims) for state in states)],
                     [dims, *[state_dims] * (len(call.outputs) - 1)])
