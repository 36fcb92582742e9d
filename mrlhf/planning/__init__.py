"""What a run will take before it is started: parameters, memory, FLOPs, traffic and time, by arithmetic alone.

Nothing here imports torch, opens a file or joins other ranks. Bytes are bytes, times are seconds, and every number is
of one rank unless its name says otherwise. In formulas: h hidden size, f feed-forward columns, a query heads, g
key-value heads, d head size, L layers, V vocabulary, t tensor ranks, p pipeline stages, n tokens of a micro-batch.
"""
