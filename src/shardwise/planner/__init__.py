"""Numbers known before anything is allocated.

``memory``         bytes at rest of a concrete model, to the byte
``ways``           slices of each state: how the formulas see a sharding
``states``         model states by accounting, the largest model, the fewest ranks
``optimizers``     words of optimizer state
``finetune``       adapters beside a frozen base
``shapes``         shapes of transformers and their parameters; ``shape_table`` has published ones
``activations``    bytes kept for backward; ``recompute`` what recomputation costs
``budget``         buffers, fragmentation, and the sum that must fit
``communication``  elements, messages and seconds of a step; ``crosshost`` between hosts
``parallel``       traffic and idle time of tensor and pipeline parallelism
``compute``        FLOPs, utilization, time of training; ``rates`` compares measured runs
``offload``        states on host and disk; ``infinity`` the bandwidths this needs
``balance``        how evenly tensors lie on ranks
``hardware``       devices, hosts, links; ``defaults`` of other engines

Each formula is one function, and names its source. Results are bytes, elements, seconds or FLOPs.
"""
