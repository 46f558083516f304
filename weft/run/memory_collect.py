"""Rank 0 gathers what the ranks have measured of their memory, and puts it beside the account."""

from __future__ import annotations

from dataclasses import replace

from weft.base.files import decode, encode
from weft.model.source import ModelSource
from weft.model.trace import trace
from weft.plan.lower import lower
from weft.plan.memory import MemoryAccount, account_memory
from weft.plan.program import Program
from weft.run.memory_meter import MeterRecord, compare_memory, measured_account
from weft.run.result import RunResult
from weft.run.transport import Transport


def add_memory(result: RunResult | None, program: Program, own: MeterRecord, *, source: ModelSource,
               transport: Transport) -> RunResult | None:
    """Return rank 0's result with the memory of all ranks, in its timeline too; all ranks call this together."""
    found = transport.gather_records(encode(own))
    if result is None or found is None:
        return result
    assert result.timeline is not None
    records = [decode(MeterRecord, record, where="memory") for record in found]
    timeline = replace(result.timeline, stored_memory=measured_account(program, records), memory_source="measured")
    return replace(result, memory=compare_memory(program, promised_memory(program, source), records), timeline=timeline)


def promised_memory(program: Program, source: ModelSource) -> MemoryAccount:
    """Return the account of a program that is run, with what autograd keeps of each operator looked at, as in planning.

    To run it, the model was traced without that, which takes longer.
    """
    graph = trace(source, batch=program.graph.batch, batch_dims=True).graph
    return account_memory(lower(replace(program.plan, model=replace(program.plan.model, digest=graph.digest)), graph))
