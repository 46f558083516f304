"""Mutants that stay sound as far as their format goes: their lies are in what they say, not in how it is written.

Archives of arrays with headers that are not about their data, tensors renamed or of another dtype with offsets that
fit, plans whose digests are those of what they describe, ONNX graphs that grow, and texts of the command line.
"""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

from benchmarks.attack_mutators import NUMBERS, TEXTS, mutate_bytes, mutate_tree, to_text

# ---- arrays ---------------------------------------------------------------------------------------------------------


SHAPES = ("()", "(0,)", "(1,)", "(3,)", "(-1,)", "(2, -1)", "(10000000000,)", "(4294967296, 4294967296)", "(9223372036854775807,)",
          "(99999999999999999999999,)", "(1.0,)", "('a',)", "None", "[3]", "(True,)", "(3, 4)", "(1,) * 100", "(" * 200, "(0, 10000000000)",
          "(" + "1," * 70 + ")", "(" + "1," * 30_000 + ")")
DTYPES = ("'<f8'", "'>f8'", "'<f4'", "'<f2'", "'<i8'", "'|b1'", "'<c16'", "'|O'", "'<U9'", "'<M8[s]'", "'|V8'", "'|S0'", "'x'", "3", "None",
          "[('a', '<f8')]", "[('a', '|O')]", "('<f8', (3,))", "('<f8', (100000000,))", "'<f8,<f8'", "'<U1000000000'")


def mutate_arrays(data: bytes, rng: Random) -> bytes:
    """Return an archive of arrays: with other headers, values, names or parts, or packed otherwise."""
    if rng.random() < 0.25:
        return mutate_bytes(data, rng)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = [(item.filename, archive.read(item)) for item in archive.infolist()]
    at, other = rng.randrange(len(parts)), rng.randrange(len(parts))
    name, content = parts[at]
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    match rng.randrange(9):
        case 0 | 1 | 2:
            parts[at] = name, _with_header(content, rng)
        case 3:
            del parts[at]
        case 4:
            parts[at] = rng.choice((parts[other][0], *(text for text in TEXTS if text.isprintable() and len(text) < 1000))), content
        case 5:
            parts[at] = name, parts[other][1]
        case 6:
            body = bytearray(content)
            body[-rng.choice((2, 4, 8)):] = rng.choice((b"\x00\x7e", b"\x00\x00\xc0\x7f", b"\xff" * 8, b"\x00" * 6 + b"\xf0\x7f"))
            parts[at] = name, bytes(body)
        case 7:
            parts[at] = name, rng.choice((content[:-3], content + bytes(8), content[:5], b"", b"\x80\x04N.", bytes(100 << 20)))
        case _:
            parts += [(f"{index}.npy", content) for index in range(rng.choice((1, 10, 3000)))]
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in parts:
            archive.writestr(zipfile.ZipInfo(name), content, compress_type=method)
    return stream.getvalue()


def _with_header(content: bytes, rng: Random) -> bytes:
    start = 10 + int.from_bytes(content[8:10], "little")
    shape, dtype = rng.choice(SHAPES), rng.choice(("'<f8'", rng.choice(DTYPES)))
    text = f"{{'descr': {dtype}, 'fortran_order': {rng.choice(('False', 'True', '3'))}, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY" + rng.choice((b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x09\x00")) + min(len(text), 65535).to_bytes(
        2, "little") + text + content[start:]


# ---- tensors --------------------------------------------------------------------------------------------------------


SAME_SIZE = {1: ("BOOL", "U8", "I8", "F8_E4M3"), 2: ("F16", "BF16", "I16"), 4: ("F32", "I32"), 8: ("F64", "I64", "C64")}


def mutate_sound_tensors(data: bytes, rng: Random) -> bytes:
    """Return a safetensors file that fits together, with tensors of other names, dtypes, shapes or values."""
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8:8 + length]), data[8 + length:]
    extra = header.pop("__metadata__", {})
    tensors = {name: [entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])]] for name, entry in header.items()}
    for _ in range(rng.choice((1, 1, 2))):
        name, other = rng.choice(sorted(tensors)), rng.choice(sorted(tensors))
        _change_tensor(tensors, name, other, rng)
        if not tensors:
            break
    made, offset = {"__metadata__": extra}, 0
    for name, (dtype, shape, part) in tensors.items():
        made[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(part)]}
        offset += len(part)
    text = json.dumps(made).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(part for _, _, part in tensors.values())


def _change_tensor(tensors: dict[str, list[Any]], name: str, other: str, rng: Random) -> None:
    dtype, shape, part = tensor = tensors[name]
    match rng.randrange(9):
        case 0:
            size = next((size for size, names in SAME_SIZE.items() if dtype in names), 4)
            tensor[0] = rng.choice(SAME_SIZE[size])
        case 1:
            tensor[1] = rng.choice((shape[::-1], [*shape, 1], [1, *shape], [len(part) // 4] if dtype == "F32" else shape))
        case 2:
            tensors[name], tensors[other] = tensors[other], tensors[name]
        case 3:
            del tensors[name]
        case 4:
            tensors[rng.choice((f"{name}.more", "x", "", "../x", "\u202e", "a.b.c", "0"))] = list(tensor)
        case 5:
            tensors[name] = list(tensors[other])
        case 6:
            tensor[1], tensor[2] = rng.choice(([0], [0, 2**47], [2**16, 0, 2**16], [0] * 500)), b""
        case 7:
            value = rng.choice((b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f", b"\x00\x00\x80\xff", b"\x01\x00\x00\x00", bytes(4)))
            tensor[2] = value * (len(part) // 4) + bytes(len(part) % 4)
        case _:
            for index in range(rng.choice((1, 100, 20_000))):
                tensors[f"{name}.{index}"] = [dtype, [0], b""]


# ---- plans ----------------------------------------------------------------------------------------------------------


def mutate_plan(data: bytes, rng: Random) -> bytes:
    """Return a plan that was changed, with the digest of the cluster that it now describes; sometimes of another model."""
    from weft.base.errors import WeftError
    from weft.cluster.cluster_file import parse_cluster

    value = json.loads(data)
    part = rng.choice(("cluster", "stages", "order", "gradients", "model", "search", None))
    for _ in range(rng.choice((1, 1, 2))):
        if part is None or not isinstance(value, dict) or part not in value:
            value = mutate_tree(value, rng)
        else:
            value[part] = mutate_tree(value[part], rng)
    if rng.random() < 0.2 and isinstance(value, dict) and isinstance(value.get("model"), dict):
        value["model"]["digest"] = "0" * 16
        if rng.random() < 0.3:
            value["model"].pop("parameters", None)
            value["model"].pop("inputs", None)
    with contextlib.suppress(WeftError, KeyError, TypeError, AttributeError, IndexError):
        value["cluster"]["digest"] = parse_cluster(value["cluster"]["description"]).digest
    return to_text(value)


# ---- ONNX -----------------------------------------------------------------------------------------------------------


SIZES = (0, 1, -1, 3, 1000, 10**6, 10**7, 2**31, 2**40, 2**62, 2**63 - 1)


def mutate_functions(data: bytes, rng: Random) -> bytes:
    """Return the ONNX file with functions, values of shapes, branches or nodes that make more of it than it looks."""
    import onnx

    model = onnx.load_model_from_string(data)
    rng.choice((_nest_functions, _add_sizes, _add_sizes, _double_values, _add_nodes, _add_branches, _add_outside, _set_inputs))(model, rng)
    if rng.random() < 0.3:
        _add_sizes(model, rng)
    return bytes(model.SerializeToString())


def _nest_functions(model: Any, rng: Random) -> None:
    from onnx import helper

    imports, depth, width = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)], rng.choice((1, 2, 10, 17, 40, 300)), rng.choice((1, 2, 9))
    for number in range(depth):
        name = "Relu" if not number else f"F{number - 1}"
        domain = "" if not number else "f"
        if rng.random() < 0.02:
            name, domain = rng.choice((f"F{depth - 1}", f"F{number}", "Nothing")), "f"
        calls = [helper.make_node(name, [f"t{at}"], [f"t{at + 1}"], domain=domain) for at in range(width)]
        model.functions.append(helper.make_function("f", f"F{number}", ["t0"], [f"t{width}"], calls, imports))
    model.opset_import.append(imports[1])
    model.graph.node.append(helper.make_node(f"F{depth - 1}", [model.graph.node[0].output[0]], ["z"], domain="f"))


def _add_sizes(model: Any, rng: Random) -> None:
    """Add a node whose output is as large as a constant says, and some that read it."""
    from onnx import TensorProto, helper

    graph, mark = model.graph, f"s{len(model.graph.node)}"
    def constant(name: str, *values: int) -> str:
        graph.initializer.append(helper.make_tensor(mark + name, TensorProto.INT64, [len(values)] if name != "scalar" and len(
            name) > 1 else [], list(values)))
        return mark + name
    sizes = [rng.choice(SIZES) for _ in range(rng.choice((1, 1, 2, 4)))]
    kind = rng.choice(("ConstantOfShape", "Expand", "Reshape", "Tile", "Range", "Pad", "OneHot", "Slice", "Resize"))
    source = rng.choice([name for node in graph.node for name in node.output])
    inputs = {"ConstantOfShape": lambda: [constant("shape", *sizes)], "Range": lambda: [constant("a", 0), constant("b", sizes[0]),
                                                                                       constant("c", rng.choice((1, -1, 0)))],
              "OneHot": lambda: [constant("index", 0, 1), constant("d", sizes[0]), constant("both", 0, 1)],
              "Slice": lambda: [constant("all", *range(50)), constant("from", 0), constant("to", sizes[0])],
              "Resize": lambda: [source, "", "", constant("shape", *sizes)]}
    graph.node.append(helper.make_node(kind, inputs.get(kind, lambda: [source, constant("shape", *sizes)])(), [f"{mark}y"]))
    graph.node.append(helper.make_node("Cast", [f"{mark}y"], [f"{mark}i"], to=TensorProto.INT64))
    if rng.random() < 0.5:
        graph.node.append(helper.make_node("ConstantOfShape", [f"{mark}i"], [f"{mark}z"]))


def _double_values(model: Any, rng: Random) -> None:
    from onnx import helper

    graph, times = model.graph, rng.choice((1, 5, 20, 28, 60))
    graph.node.append(helper.make_node("Shape", [graph.node[0].output[0]], ["v0"]))
    for at in range(times):
        kind, more = rng.choice((("Concat", {"axis": 0}), ("Mul", {}))) if rng.random() < 0.1 else ("Concat", {"axis": 0})
        graph.node.append(helper.make_node(kind, [f"v{at}", f"v{at}"], [f"v{at + 1}"], **more))
    graph.node.append(helper.make_node(rng.choice(("ConstantOfShape", "Identity", "Size")), [f"v{times}"], ["vy"]))


def _add_nodes(model: Any, rng: Random) -> None:
    graph = model.graph
    node = rng.choice(graph.node)
    for at in range(rng.choice((10, 1000, 20_000))):
        graph.node.add().CopyFrom(node)
        graph.node[-1].output[0] = f"n{at}"
        if at and rng.random() < 0.5:
            graph.node[-1].input[0] = f"n{at - 1}"


def _add_branches(model: Any, rng: Random) -> None:
    """Put a node into branches inside of each other, as deep as messages may be and deeper."""
    from onnx import AttributeProto

    last = model.graph.node[-1]
    for _ in range(rng.choice((1, 5, 28, 40))):
        inner = type(last)()
        inner.CopyFrom(last)
        last.op_type = rng.choice(("If", "Loop", "Relu"))
        attribute = last.attribute.add()
        attribute.name, attribute.type = "then_branch", AttributeProto.GRAPH
        attribute.g.node.add().CopyFrom(inner)
        if last.ByteSize() > 1 << 20:
            break


def _add_outside(model: Any, rng: Random) -> None:
    """Say that a tensor lies in another file, or is sparse, packed in another field or of a strange type."""
    tensor = rng.choice(model.graph.initializer)
    match rng.randrange(4):
        case 0:
            tensor.data_location = 1
            for key, text in (("location", rng.choice(("../../etc/passwd", "/dev/zero", "", "x" * 5000, "\u202e"))),
                              ("offset", rng.choice(("0", "-1", "x", "9" * 40))), ("length", rng.choice(("0", "9" * 30)))):
                entry = tensor.external_data.add()
                entry.key, entry.value = key, text
        case 1:
            sparse = model.graph.sparse_initializer.add()
            sparse.values.CopyFrom(tensor)
            sparse.dims.extend([rng.choice(SIZES), rng.choice(SIZES)])
        case 2:
            tensor.ClearField("float_data")
            tensor.raw_data = bytes(rng.choice((0, 3, 8, 10**6)))
        case _:
            tensor.ClearField("dims")
            tensor.dims.extend([rng.choice(SIZES)] * rng.choice((1, 2, 100)))


def _set_inputs(model: Any, rng: Random) -> None:
    """Give an input another rank or kind of type, and read it as a list of numbers."""
    from onnx import TensorProto, helper

    graph = model.graph
    size = rng.choice(SIZES)
    graph.input.append(helper.make_tensor_value_info("more", rng.choice((TensorProto.FLOAT, TensorProto.INT64)), [size] * rng.choice((1, 1, 2, 50))))
    for at in range(rng.choice((1, 3, 100))):
        graph.node.append(helper.make_node(rng.choice(("Cast", "Add", "Identity", "Unsqueeze")), ["more"] * rng.choice((1, 2)), [f"m{at}"], to=7))
    if rng.random() < 0.2:
        rng.choice(graph.input).type.CopyFrom(helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, [size])))


# ---- the command line -----------------------------------------------------------------------------------------------


LINES: tuple[tuple[str, ...], ...] = (
    ("cluster", "show", "4 x A100-80GB over nvlink4, 2 x RTX3090", "--json"), ("cluster", "show", "2 x H100-80GB"),
    ("fit", "@traced.json", "2 x A100-80GB over nvlink3", "--time-limit", "0.2", "-q"),
    ("plan", "@traced.json", "2 x A100-80GB", "--headroom", "10%", "--time-limit", "0.2", "-q", "--strategy", "single"),
    ("deploy", "@traced.json", "2 x A100-80GB", "--method", "heft", "--optimizer", "adam", "--dtype", "float32", "-q"),
    ("schedule", "@problem.json", "-n", "3", "--width", "80", "--time-limit", "0.2", "-q"),
    ("show", "@plan.json", "--model", "@traced.json", "--width", "80"), ("check", "@plan.json", "--model", "@traced.json", "--cluster", "2 x A100-80GB"),
    ("model", "gpt2-tiny:layers=4,seq=32"), ("model", "llama-tiny:kv_heads=2"))
PIECES = ("x", ",", "over", ":", "=", "%", "-", " ", "NaN", "inf", "1e9", "\u0664", "\u00b2", "GiB", "Gbit/s", "@", "0", "--", "A100-80GB", "nvlink4")


def mutate_texts(data: bytes, rng: Random) -> bytes:
    """Return a command with one of its texts changed, here and there or as a whole."""
    line = list(rng.choice(LINES))
    at = rng.randrange(1, len(line))
    words: list[Callable[[], str]] = [
        lambda: rng.choice(TEXTS).replace("\x00", "\\0"), lambda: str(rng.choice(NUMBERS[:-4])), lambda: line[at][:rng.randrange(len(line[at]) + 1)],
        lambda: " ".join(rng.sample(line[at].split(), len(line[at].split()))), lambda: f"{line[at]}, " * rng.choice((2, 100, 3000)) + line[at]]
    if rng.random() < 0.5:
        place = rng.randrange(len(line[at]) + 1)
        line[at] = line[at][:place] + rng.choice(PIECES) + line[at][place + rng.choice((0, 1)):]
    else:
        line[at] = rng.choice(words)()
    return json.dumps(line).encode()
