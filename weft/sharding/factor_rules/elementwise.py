"""Factor rules of operators that work entry by entry, of reductions and softmax, and of operators that make tensors.

Entry by entry, every dimension of the result is a factor, which the operands have where they are not broadcast. A
reduction has those dimensions that it keeps; the reduced ones are factors only of sums and means.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weft.sharding.factor_rules.common import Call, aligned, dims_in, nonnegative, rule, shape_of
from weft.sharding.factors import OpFactors


def _names(*texts: str) -> list[str]:
    """Return targets: ``add:Tensor,Scalar`` stands for two overloads, ``relu`` for ``relu.default``."""
    return [f"aten.{name}.{overload}" for text in texts for item in text.split()
            for name, _, overloads in [item.partition(":")] for overload in (overloads or "default").split(",")]


def _entrywise(call: Call, linear: Iterable[Iterable[Any]] = ()) -> OpFactors | None:
    """Return the factors of a call whose tensors are broadcast to the shape of its result."""
    dims = call.plain(call.output)
    inputs = [(tensor, aligned(shape_of(tensor), dims)) for tensor in call.tensors]
    return call.done(inputs, [dims] * len(call.outputs), linear=linear)


# ---- entry by entry -------------------------------------------------------------------------------------------------


@rule(*_names(
    "abs acos acosh angle asin asinh atan atan2 atanh ceil celu cos cosh deg2rad digamma elu erf erfc erfinv exp exp2",
    "expm1 floor frac gelu hardshrink hardsigmoid hardswish hardtanh i0 isfinite isinf isnan isneginf isposinf",
    "leaky_relu lgamma log log10 log1p log2 log_sigmoid logical_not logit mish nan_to_num rad2deg reciprocal relu",
    "relu6 round:default,decimals rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink",
    "special_entr special_erfcx special_expit special_log_ndtr special_ndtr special_ndtri sqrt square tan tanh",
    "threshold trunc fix bitwise_not absolute polygamma",
    "eq:Scalar,Tensor ne:Scalar,Tensor ge:Scalar,Tensor gt:Scalar,Tensor le:Scalar,Tensor lt:Scalar,Tensor",
    "greater:Scalar,Tensor greater_equal:Scalar,Tensor less:Scalar,Tensor less_equal:Scalar,Tensor",
    "not_equal:Scalar,Tensor isclose logical_and logical_or logical_xor",
    "bitwise_and:Tensor,Scalar,Scalar_Tensor bitwise_or:Tensor,Scalar,Scalar_Tensor",
    "bitwise_xor:Tensor,Scalar,Scalar_Tensor bitwise_left_shift:Tensor,Tensor_Scalar,Scalar_Tensor",
    "bitwise_right_shift:Tensor,Tensor_Scalar,Scalar_Tensor __and__:Tensor,Scalar __or__:Tensor,Scalar",
    "__xor__:Tensor,Scalar __lshift__:Tensor,Scalar __rshift__:Tensor,Scalar",
    "maximum minimum max:other min:other fmax fmin clamp:default,Tensor clamp_min:default,Tensor",
    "clamp_max:default,Tensor clip:default,Tensor copysign:Tensor,Scalar heaviside hypot gcd lcm logaddexp logaddexp2",
    "nextafter floor_divide:default,Scalar fmod:Tensor,Scalar remainder:Tensor,Scalar,Scalar_Tensor",
    "pow:Tensor_Scalar,Tensor_Tensor,Scalar float_power:Tensor_Scalar,Tensor_Tensor,Scalar xlogy:Tensor,Scalar_Other",
    "xlogy:Scalar_Self addcmul addcdiv lerp:Scalar,Tensor rsub:Scalar ldexp:Tensor",
    "zeros_like ones_like full_like empty_like zero fill:Scalar"))
def _pointwise(call: Call) -> OpFactors | None:
    return _entrywise(call)


@rule(*_names("neg negative positive alias clone contiguous detach lift_fresh lift_fresh_copy _to_copy",
              "to:dtype,device,dtype_layout"))
def _same(call: Call) -> OpFactors | None:
    return _entrywise(call, [call.tensors])


@rule(*_names("to:other type_as"))
def _same_as(call: Call) -> OpFactors | None:
    """The other tensor gives only its type; where it has the same shape it need not be whole for that."""
    source, other = call.args["self"], call.args["other"]
    dims = call.plain(call.output)
    inputs = [(source, dims)] + ([(other, dims)] if shape_of(other) == call.output else [])
    return call.done(inputs, [dims], linear=[(source,)])


@rule(*_names("add:Tensor,Scalar sub:Tensor,Scalar rsub:Tensor subtract:Tensor,Scalar",
              "where:self,ScalarSelf,ScalarOther,Scalar masked_fill:Scalar,Tensor"))
def _add(call: Call) -> OpFactors | None:
    """Every entry is a sum or one of two; where one of them is the number 0, only the other counts."""
    pair = call.args["self"], call.args["other"] if "other" in call.args else call.args["value"]
    summed = [value for value in pair if not (isinstance(value, int | float) and value == 0)]
    return _entrywise(call, [summed] if summed else [])


@rule(*_names("mul:Tensor,Scalar multiply:Tensor,Scalar"))
def _mul(call: Call) -> OpFactors | None:
    own, other = call.args["self"], call.args["other"]
    return _entrywise(call, [] if own is other else [(own,), (other,)])


@rule(*_names("div:Tensor,Scalar,Tensor_mode,Scalar_mode divide:Tensor,Scalar true_divide:Tensor,Scalar"))
def _div(call: Call) -> OpFactors | None:
    own, other = call.args["self"], call.args["other"]
    return _entrywise(call, [] if own is other or call.args.get("rounding_mode") else [(own,)])


@rule(*_names("dropout native_dropout"))
def _dropout(call: Call) -> OpFactors | None:
    is_active = call.args.get("p") != 0 and call.args.get("train") is not False
    return _entrywise(call, [] if is_active or len(call.outputs) > 1 else [call.tensors])


@rule(*_names("copy fill:Tensor"))
def _copy(call: Call) -> OpFactors | None:
    """The first tensor gives only shape and type."""
    return _entrywise(call, [(call.args["src"] if "src" in call.args else call.args["value"],)])


@rule(*_names("prelu"))
def _prelu(call: Call) -> OpFactors | None:
    dims = call.plain(call.output)
    weight = call.args["weight"]
    channels = dims[1] if len(dims) > 1 and shape_of(weight)[0] == call.output[1] else ()
    return call.done([(call.args["self"], dims), (weight, [channels])], [dims])


@rule(*_names("glu"))
def _glu(call: Call) -> OpFactors | None:
    after = call.plain(call.output)
    at = nonnegative(call.args["dim"], len(after))
    halves = call.factor("halves", 2, fixed=True)
    before = [halves + dim if place == at else dim for place, dim in enumerate(after)]
    return call.done([(call.args["self"], before)], [after])


# ---- reductions -----------------------------------------------------------------------------------------------------


@rule(*_names("sum:default,dim_IntList mean:default,dim nansum"))
def _sum(call: Call) -> OpFactors | None:
    """Parts of a sum are summed; a device with a part of a mean divides by the size of the whole."""
    source, shape = call.args["self"], call.shape
    reduced = set(dims_in(call.args.get("dim"), len(shape)))
    is_mean = "mean" in call.operator
    before = [call.factor(f"d{dim}", size, special=is_mean and dim in reduced) for dim, size in enumerate(shape)]
    return call.done([(source, before)], [_kept(call, before, reduced)],
                     linear=[] if "nansum" in call.operator else [(source,)])


@rule(*_names(
    "amax amin aminmax max:default,dim min:default,dim prod:default,dim_int var:default,dim,correction",
    "std:default,dim,correction var_mean:default,dim,correction std_mean:default,dim,correction",
    "any:default,dim,dims all:default,dim,dims argmax argmin logsumexp median:default,dim nanmedian:default,dim",
    "norm:Scalar,ScalarOpt_dim linalg_vector_norm mode kthvalue count_nonzero:dim_IntList,default nanmean"))
def _reduce(call: Call) -> OpFactors | None:
    reduced = set(dims_in(call.args.get("dim"), len(call.shape)))
    before = call.plain(call.shape, but=reduced)
    return call.done([(call.args["self"], before)], [_kept(call, before, reduced)] * len(call.outputs))


def _kept(call: Call, before: list[tuple[int, ...]], reduced: set[int]) -> list[tuple[int, ...]]:
    """Return the dimensions of a reduction's result."""
    if call.args.get("keepdim"):
        return [() if dim in reduced else factors for dim, factors in enumerate(before)]
    return [factors for dim, factors in enumerate(before) if dim not in reduced]


@rule(*_names("cumprod cummax cummin logcumsumexp topk sort:default,stable argsort:default,stable",
              "softmax:int _softmax log_softmax:int _log_softmax"))
def _along(call: Call) -> OpFactors | None:
    """Return the factors where one dimension is needed whole and stays."""
    dims = call.plain(call.shape, but=dims_in(call.args["dim"], len(call.shape)))
    return call.done([(call.args["self"], dims)], [dims] * len(call.outputs))


# ---- making tensors -------------------------------------------------------------------------------------------------


@rule(*_names("zeros ones full empty:memory_format new_zeros new_ones new_full new_empty"))
def _constant(call: Call) -> OpFactors | None:
    return call.done([], [call.plain(call.output)], shape_args=call.shape_arg("size"))


@rule(*_names("arange:default,start,start_step linspace logspace eye:default,m scalar_tensor tril_indices triu_indices",
              "rand randn randint:default,low randperm rand_like randn_like randint_like:default,low_dtype"))
def _by_position(call: Call) -> OpFactors | None:
    """Entries depend on where they are (or on the ones drawn before them): every device makes them all."""
    return call.done([], [[()] * len(shape) for shape in call.outputs])
