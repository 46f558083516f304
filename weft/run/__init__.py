"""The runtime: executes a plan's program on processes over ``torch.distributed``.

    launch      run_plan: local processes, watched; ``python -m weft.run`` is one rank, also under torchrun
    worker      one rank's run: trace, prepare, step, collect, verify
    prepare     plan and model -> program, stages, parameters of one rank (stage, shard_stage, split_backward)
    executor    the steps of one rank: closures (bind, wiring) over messages (transport, exchange)
    verify      the original module on one device, to compare with
    checkpoint  parameters, buffers and the optimizer's state, whole and by name

Training scripts use it through ``weft.training``. It reaches for no planner.
"""
