"""The runtime: executes a plan's program on processes over ``torch.distributed``.

    launch      run_plan: local processes, watched; ``python -m weft.run`` is one rank, also under torchrun
    prepare     plan and model -> program, stages, parameters of one rank (partition, split_backward, stage)
    executor    the steps of one rank: closures (bind, wiring, compute, cells) over messages (transport)
    verify      the original module on one device, to compare with
    parallelize a rank's part of a module in a training script (trainer), with checkpoints (checkpoint) and plans for
                the devices that are left (replan)
"""
